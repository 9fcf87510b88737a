"""What the commands of ``daf bench`` share: options, progress, and printing a result."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from daf.core.errors import DataError
from daf.training.data import DATA
from daf_bench.harness.result import BenchResult


def checked_file(path: Path | None) -> Path | None:
    """Refuse a file that cannot be written before anything is measured."""
    if path is None:
        return None
    folder = path.absolute().parent
    if path.is_dir() or not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise typer.BadParameter(f"{path} cannot be written; name a file in a folder that exists")
    return path


def checked_picture(path: Path | None) -> Path | None:
    """Refuse what is no PNG, or cannot be written."""
    if path is not None and path.suffix != ".png":
        raise typer.BadParameter(f"{path} is no PNG; name it {path.stem}.png")
    return checked_file(path)


def checked_data(name: str | None) -> str | None:
    """Refuse data that nobody knows, or that lie nowhere, before anything is measured."""
    if name is not None:
        path = DATA.find(name).path
        if path and not Path(path).exists():
            raise DataError(f"asked for {name!r}; there is no {path}")
    return name


JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
QuickOption = Annotated[bool, typer.Option("--quick", help="A short run with fewer steps.")]
VaryingOption = Annotated[
    bool,
    typer.Option(
        "--varying",
        help="Ask instead if timing strategies again pays while load, threads and sizes change.",
    ),
]
OnlyOption = Annotated[
    str | None, typer.Option(help="These workloads only, as in 'W1,W3'; by default all.")
]
ImagesOption = Annotated[
    str | None,
    typer.Option(
        callback=checked_data, help="Images; by default CIFAR-10 if the measuring data is there."
    ),
]


def to_picture(help_text: str) -> Any:
    """The option of a PNG to draw into."""
    return typer.Option(callback=checked_picture, help=help_text)


def to_file(help_text: str) -> Any:
    """The option of a file to write."""
    return typer.Option(callback=checked_file, help=help_text)


def of_data(help_text: str) -> Any:
    """The option of a data set's name."""
    return typer.Option(callback=checked_data, help=help_text)


PictureOption = Annotated[Path | None, to_picture("Draw the result into this PNG file.")]
OutOption = Annotated[
    Path | None,
    typer.Option(
        callback=checked_file,
        help="Write the result to this JSON file, and rows as they come beside it (.jsonl): "
        "the same command goes on where it was interrupted.",
    ),
]


@contextmanager
def counted_progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on standard error for what is done, of what is expected."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("starting", total=None)

        def report(what: str, done: int, expected: int) -> None:
            progress.update(task, description=what, completed=done, total=expected)

        yield report


def measure(
    run: Callable[..., BenchResult],
    *,
    as_json: bool,
    draw: Callable[[list[dict[str, Any]], Path], None] | None = None,
    picture: Path | None = None,
) -> BenchResult:
    """Run a benchmark under a status line, draw its rows where that was asked, and print it."""
    with Console(stderr=True).status("starting") as status:
        result = run(on_progress=status.update)
    if draw is not None and picture is not None:
        draw(result.rows, picture)
    show(result, as_json=as_json)
    return result


def rows_beside(out: Path | None) -> Path | None:
    """Where the rows of a long measurement are kept: ``RESULT.jsonl`` beside ``RESULT.json``."""
    if out is None:
        return None
    rows = out.with_suffix(".jsonl")
    if rows == out:
        raise typer.BadParameter(f"asked for {out}, where the rows go; name it {out.stem}.json")
    return rows


def run_kept(run: Callable[..., BenchResult], out: Path | None, *, as_json: bool) -> None:
    """Run a long measurement under a bar, its rows kept beside ``out``, and tell its result."""
    with counted_progress() as progress:
        result = run(rows_beside(out), progress)
    keep(result, out)
    show(result, as_json=as_json)


def keep(result: BenchResult, out: Path | None) -> None:
    """Write a result where that was asked."""
    if out is not None:
        out.write_text(result.as_json())


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
