"""``daf bench ablations`` and ``levers``: what each mechanism gains, and what plans choose."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from daf_bench.ablations import run
from daf_bench.cli_output import JsonOption, OnlyOption, OutOption, QuickOption, run_kept
from daf_bench.levers import run as levers
from daf_bench.workloads import named_workloads


def ablations_command(
    out: OutOption = None,
    only: OnlyOption = None,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """Train with SAGE's techniques one after another, and DAF's mechanisms one at a time."""
    job = run.quick_job() if quick else run.AblationsJob()
    if only is not None:
        job = replace(job, workloads=named_workloads(only))
    run_kept(partial(run.run, job), out, as_json=as_json)


def levers_command(
    out: OutOption = None,
    only: OnlyOption = None,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """Tell of each treatment, each of its fields and each policy where a plan chooses it."""
    job = levers.quick_job() if quick else levers.LeversJob()
    if only is not None:
        job = replace(job, workloads=named_workloads(only))
    run_kept(partial(levers.run, job), out, as_json=as_json)
