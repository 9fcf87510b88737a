"""``daf bench papers`` and ``jobs``: the parts of both papers, and DAF as published beside ours."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from daf_bench.cli_output import JsonOption, OnlyOption, OutOption, QuickOption, run_kept
from daf_bench.jobs import run as jobs
from daf_bench.papers import run
from daf_bench.workloads import named_workloads


def papers_command(
    out: OutOption = None,
    only: OnlyOption = None,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """List both papers' parts, and compare DAF as published with DAF's own plan and plain."""
    job = run.quick_job() if quick else run.PapersJob()
    if only is not None:
        job = replace(job, workloads=named_workloads(only))
    run_kept(partial(run.run, job), out, as_json=as_json)


def jobs_command(
    out: OutOption = None,
    only: OnlyOption = None,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """Train DAF's jobs at their real size with `daf train`: bytes and time, not accuracy.

    --only names jobs, such as roberta-mrpc,gpt2-e2e.
    """
    job = jobs.quick_job() if quick else jobs.JobsJob()
    if only is not None:
        job = replace(job, names=jobs.named_jobs(only))
    run_kept(partial(jobs.run, job), out, as_json=as_json)
