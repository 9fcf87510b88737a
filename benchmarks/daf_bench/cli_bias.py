"""``daf bench bias``: what of the codes' errors does not average out."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from daf_bench.bias import run
from daf_bench.bias.networks import NETWORKS
from daf_bench.cli_output import (
    JsonOption,
    OutOption,
    QuickOption,
    counted_progress,
    keep,
    rows_beside,
    show,
)


def bias_command(
    out: OutOption = None,
    only: Annotated[
        str | None, typer.Option(help="These networks only, as in 'gelu,one_hot'; all by default.")
    ] = None,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure the squared bias and the noise of the gradient under codes of 1 to 4 bits."""
    job = run.quick_job() if quick else run.BiasJob()
    if only is not None:
        job = replace(job, networks=_named(only))
    with counted_progress() as progress:
        result = run.run(job, rows_beside(out), progress)
    keep(result, out)
    show(result, as_json=as_json)


def _named(only: str) -> tuple[str, ...]:
    names = tuple(each.strip() for each in only.split(","))
    if unknown := [each for each in names if each not in NETWORKS]:
        known = ", ".join(NETWORKS)
        raise typer.BadParameter(f"asked for {', '.join(unknown)}; there are {known}")
    return names
