"""``daf bench papers``: every part of both papers, and DAF as published beside ours."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from daf_bench.cli_output import JsonOption, OnlyOption, OutOption, QuickOption, run_kept
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
