"""``daf bench values``: exact recomputation beside plain PyTorch."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Annotated

import typer

from daf_bench.cli_output import JsonOption, OnlyOption, OutOption, QuickOption, run_kept
from daf_bench.values import run
from daf_bench.workloads import named_workloads


def values_command(
    out: OutOption = None,
    only: OnlyOption = None,
    quick: QuickOption = False,
    rivals: Annotated[
        bool, typer.Option(help="Beside what users would take instead, too: hours.")
    ] = True,
    as_json: JsonOption = False,
) -> None:
    """Compare exact recomputation with plain PyTorch: saved bytes, step time, gradients."""
    job = run.quick_job() if quick else run.ValuesJob(has_rivals=rivals)
    if only is not None:
        job = replace(job, workloads=named_workloads(only))
    run_kept(partial(run.run, job), out, as_json=as_json)
