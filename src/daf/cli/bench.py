"""``daf bench``: comparisons that print one JSON object with machine, rows and figures."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from daf.bench import main_job
from daf.bench.result import BenchResult

app = typer.Typer(help="Measure DAF against what a user would pick instead.")

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
QuickOption = Annotated[bool, typer.Option("--quick", help="A short run with fewer steps.")]


@app.callback()
def bench() -> None:
    """Measure DAF against what a user would pick instead."""


@app.command("main")
def main_command(
    data: Annotated[
        str | None,
        typer.Option(help="Data set; by default CIFAR-10 if the measuring data is there."),
    ] = None,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """Compare the main job (ResNet-18 within a budget) with plain PyTorch, interleaved."""
    name = data or main_job.default_data()
    job = main_job.quick_job(name) if quick else main_job.MainJob(name)
    with Console(stderr=True).status("starting") as status:
        result = main_job.run(job, on_progress=status.update)
    show(result, as_json=as_json)


def show(result: BenchResult, *, as_json: bool) -> None:
    """Print a benchmark's outcome, for programs or for people."""
    if as_json:
        typer.echo(result.as_json())
        return
    table = Table("figure", "value", title=f"daf bench {result.name}")
    for name, value in result.figures.items():
        table.add_row(name, f"{value:,.4g}" if isinstance(value, float) else f"{value:,}")
    console = Console()
    console.print(table)
    for note in result.notes:
        console.print(f"[dim]{note}[/dim]")
