"""``daf bench conformance``: nothing silently different, on models that nobody here chose."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from daf.core.errors import UnknownNameError
from daf_bench.cli_output import (
    JsonOption,
    OutOption,
    counted_progress,
    keep,
    rows_beside,
    show,
    to_file,
)
from daf_bench.conformance import run


def conformance_command(
    out: OutOption = None,
    only: Annotated[
        str | None, typer.Option(help=f"Groups of cases, of {', '.join(run.GROUPS)}.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of weights, data and random operators.")] = 0,
    workers: Annotated[int, typer.Option(min=1, help="Cases tried at a time.")] = 2,
    record: Annotated[
        Path | None, to_file("Keep which levers acted rightly, as the record of this version.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Every twentieth case: some minutes.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Train many models under every lever, and hold each against plain PyTorch."""
    job = replace(run.quick_job() if quick else run.ConformanceJob(), seed=seed, workers=workers)
    if only is not None:
        job = replace(job, groups=_named(only))
    with counted_progress() as progress:
        result = run.run(job, rows_beside(out), progress)
    keep(result, out)
    if record is not None:
        record.write_text(run.as_record(result))
    show(result, as_json=as_json)
    if not as_json:
        for line in run.troubles(result.rows):
            typer.echo(line)


def _named(only: str) -> tuple[str, ...]:
    groups = tuple(each.strip() for each in only.split(","))
    unknown = [each for each in groups if each not in run.GROUPS]
    if unknown:
        raise UnknownNameError(f"unknown groups {unknown}; known: {', '.join(run.GROUPS)}")
    return groups
