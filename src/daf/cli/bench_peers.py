"""``daf bench peers``: the table, the verdicts, the page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from daf.bench import peers_job
from daf.bench.main_job import default_data
from daf.bench.result import BenchResult
from daf.errors import DataError
from daf.report.peers_page import COLUMNS, cells, peers_page, verdicts


def peers_command(
    workload: Annotated[str, typer.Option(help=f"One of {', '.join(peers_job.WORKLOADS)}.")] = "W1",
    data: Annotated[
        str | None,
        typer.Option(help="Data set; by default CIFAR-10 if the measuring data is there."),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write the side-by-side as a page into this HTML file.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A short run with fewer steps.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.")
    ] = False,
) -> None:
    """Compare DAF with every alternative a user has, each in a process of its own, interleaved."""
    make = peers_job.quick_job if quick else peers_job.full_job
    job = make(workload, data or default_data())
    with Console(stderr=True).status("starting") as status:
        result = peers_job.run(job, on_progress=status.update)
    if report is not None:
        try:
            report.write_text(peers_page(result.rows, result.notes), encoding="utf-8")
        except OSError as error:
            raise DataError(f"cannot write {report}: {error.strerror}; name another") from error
    if as_json:
        typer.echo(result.as_json())
    else:
        _show(result)


def _show(result: BenchResult) -> None:
    console = Console()
    table = Table(*COLUMNS, title=f"daf bench peers: {result.notes[0]}")
    for row in result.rows:
        table.add_row(*cells(row))
    console.print(table)
    for sentence in verdicts(result.rows):
        console.print(f"• {sentence}", highlight=False, markup=False)
    for note in result.notes[1:]:
        console.print(note, style="dim", highlight=False, markup=False)
