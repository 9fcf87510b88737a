"""``daf bench peers``: the table, the verdicts, the page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from daf.core.errors import DataError
from daf_bench.cli_output import (
    OutOption,
    PictureOption,
    counted_progress,
    keep,
    rows_beside,
    to_file,
)
from daf_bench.harness.result import BenchResult
from daf_bench.peers import run
from daf_bench.peers.page import COLUMNS, cells, peers_page
from daf_bench.peers.plot import draw_peers
from daf_bench.peers.verdicts import losses, verdicts, workloads_of
from daf_bench.workloads import named_workloads


def peers_command(
    workload: Annotated[
        str | None,
        typer.Option("--workload", "--only", help="Such as W1 or W1,W2a; by default all."),
    ] = None,
    report: Annotated[
        Path | None, to_file("Write the side-by-side as a page into this HTML file.")
    ] = None,
    picture: PictureOption = None,
    out: OutOption = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Timed steps of everybody.")] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0.1, help="Start nothing new when they are over.")
    ] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Fewer contestants and steps: under 30 minutes on two cores."),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.")
    ] = False,
) -> None:
    """Compare DAF with every alternative a user has, each in a process of its own, interleaved."""
    job = run.quick_job() if quick else run.PeersJob()
    if workload is not None:
        job = replace(job, workloads=named_workloads(workload))
    if steps is not None:
        job = replace(job, steps=steps, step_counts=())
    job = replace(job, minutes=minutes or job.minutes)
    with counted_progress() as progress:
        result = run.run(job, rows_beside(out), progress)
    keep(result, out)
    if report is not None:
        _write(report, peers_page(result.rows, result.figures, result.notes))
    if picture is not None:
        draw_peers(result.rows, picture)
    if as_json:
        typer.echo(result.as_json())
    else:
        _show(result)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror}; name another") from error


def _show(result: BenchResult) -> None:
    console = Console()
    for name, rows in workloads_of(result.rows).items():
        table = Table(*COLUMNS, title=f"daf bench peers: {name}")
        for row in rows:
            table.add_row(*cells(row))
        console.print(table)
        for sentence in verdicts(rows):
            console.print(f"• {sentence}", highlight=False, markup=False)
    console.print("Where a peer wins", style="bold")
    for sentence in losses(result.rows):
        console.print(f"• {sentence}", highlight=False, markup=False)
    for figure, value in result.figures.items():
        console.print(f"{figure} {value:.3f}", highlight=False)
    for note in result.notes:
        console.print(note, style="dim", highlight=False, markup=False)
