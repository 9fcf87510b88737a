"""``daf bench doors``: the ways into a budget, beside each other."""

from __future__ import annotations

from dataclasses import replace

from daf_bench.cli_output import (
    JsonOption,
    OnlyOption,
    OutOption,
    QuickOption,
    counted_progress,
    keep,
    rows_beside,
    show,
)
from daf_bench.doors import run
from daf_bench.workloads import named_workloads


def doors_command(
    out: OutOption = None,
    only: OnlyOption = None,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """Train through session.step, session.backward and compress(budget=), interleaved."""
    job = run.quick_job() if quick else run.DoorsJob()
    if only is not None:
        job = replace(job, workloads=named_workloads(only))
    with counted_progress() as progress:
        result = run.run(job, rows_beside(out), progress)
    keep(result, out)
    show(result, as_json=as_json)
