"""``daf bench faults``: refusals, falls, kills, damage and hostile data that a seed draws."""

from __future__ import annotations

from typing import Annotated

import typer

from daf.core.errors import UnknownNameError
from daf_bench.cli_output import JsonOption, OutOption, counted_progress, keep, rows_beside, show
from daf_bench.faults import run


def faults_command(
    out: OutOption = None,
    only: Annotated[
        str | None, typer.Option(help=f"These parts only, of {', '.join(run.PARTS)}.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of everything that is drawn.")] = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help="A fiftieth of everything: some minutes.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Refuse memory, lower budgets, kill, damage and fill disks; count what does not survive it."""
    job = run.FaultsJob(_named(only), seed, quick)
    with counted_progress() as progress:
        result = run.run(job, rows_beside(out), progress)
    keep(result, out)
    show(result, as_json=as_json)


def _named(only: str | None) -> tuple[str, ...]:
    parts = run.PARTS if only is None else tuple(each.strip() for each in only.split(","))
    unknown = [each for each in parts if each not in run.PARTS]
    if unknown:
        raise UnknownNameError(f"unknown parts {unknown}; known: {', '.join(run.PARTS)}")
    return parts
