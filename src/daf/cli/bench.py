"""``daf bench``: comparisons that print one JSON object with machine, rows and figures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from daf.bench import allocator as allocator_bench
from daf.bench import kernels as kernels_bench
from daf.bench import main_job, packing, reduction
from daf.bench import pool as pool_bench
from daf.bench import pressure as pressure_bench
from daf.bench.kernels_picture import draw_roofline
from daf.bench.pool_picture import draw_times
from daf.bench.pressure_picture import draw_pressure
from daf.bench.result import BenchResult
from daf.cli.bench_peers import peers_command
from daf.report.allocator_picture import draw_trade

app = typer.Typer(help="Measure DAF against what a user would pick instead.")

app.command("peers")(peers_command)

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


@app.command("allocator")
def allocator_command(
    images: Annotated[
        str | None,
        typer.Option(help="Images; by default CIFAR-10 if the measuring data is there."),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(help="A text for the BERT-small, as text:FILE; without it, images only."),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw step time against peak into this PNG file.")
    ] = None,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """Compare the recycling allocator at several caps with glibc and others, interleaved."""
    name = images or main_job.default_data()
    job = allocator_bench.quick_job(name) if quick else allocator_bench.full_job(name, text)
    with Console(stderr=True).status("starting") as status:
        result = allocator_bench.run(job, on_progress=status.update)
    if picture is not None:
        draw_trade(result.rows, picture)
    show(result, as_json=as_json)


@app.command("pool")
def pool_command(
    picture: Annotated[
        Path | None, typer.Option(help="Draw time against live pages into this PNG file.")
    ] = None,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """Time the paged pool, and compare what it wastes with malloc, best fit and fixed growth."""
    job = pool_bench.quick_job() if quick else pool_bench.PoolJob()
    with Console(stderr=True).status("starting") as status:
        result = pool_bench.run(job, on_progress=status.update)
    if picture is not None:
        draw_times(result.rows, picture)
    show(result, as_json=as_json)


@app.command("pressure")
def pressure_command(
    picture: Annotated[
        Path | None,
        typer.Option(help="Draw budget, memory and throughput over time into this PNG file."),
    ] = None,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """Halve a run's budget in mid-step, restore it, then squeeze it by a second process."""
    job = pressure_bench.quick_job() if quick else pressure_bench.full_job()
    with Console(stderr=True).status("starting") as status:
        result = pressure_bench.run(job, on_progress=status.update)
    if picture is not None:
        draw_pressure(result.rows, picture)
    show(result, as_json=as_json)


@app.command("packing")
def packing_command(
    picture: Annotated[
        Path | None, typer.Option(help="Draw the stages into this PNG file.")
    ] = None,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """Time quantizing, packing and changing layouts apart, and beside one native pass."""
    job = packing.quick_job() if quick else packing.PackingJob()
    with Console(stderr=True).status("starting") as status:
        result = packing.run(job, on_progress=status.update)
    if picture is not None:
        packing.draw_packing(result.rows, picture)
    show(result, as_json=as_json)


@app.command("reduction")
def reduction_command(
    picture: Annotated[
        Path | None, typer.Option(help="Draw the strategies into this PNG file.")
    ] = None,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """Time ranges of tensors and channels by tree, atomics and both, beside PyTorch's."""
    job = reduction.quick_job() if quick else reduction.ReductionJob()
    with Console(stderr=True).status("starting") as status:
        result = reduction.run(job, on_progress=status.update)
    if picture is not None:
        reduction.draw_reduction(result.rows, picture)
    show(result, as_json=as_json)


@app.command("kernels")
def kernels_command(
    picture: Annotated[
        Path | None, typer.Option(help="Draw a roofline into this PNG file.")
    ] = None,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """Time every kernel on every instruction set against memcpy, interleaved."""
    job = kernels_bench.quick_job() if quick else kernels_bench.KernelsJob()
    with Console(stderr=True).status("starting") as status:
        result = kernels_bench.run(job, on_progress=status.update)
    if picture is not None:
        draw_roofline(result.rows, picture)
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
