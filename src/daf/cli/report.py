"""``daf report``: runs as one HTML file, one picture, and text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from daf.errors import RunFolderError
from daf.report.page import page
from daf.report.picture import draw_report
from daf.report.runs import read_runs
from daf.report.terminal import show_report

Folders = Annotated[list[Path], typer.Argument(help="Run folders that `daf train` left.")]


def report_command(
    runs: Folders,
    html: Annotated[
        Path | None,
        typer.Option(help="The page; by default report.html in the first run's folder."),
    ] = None,
    png: Annotated[Path | None, typer.Option(help="Draw the same into this PNG file too.")] = None,
    text: Annotated[
        bool, typer.Option("--text", help="Print the report only, and write no page.")
    ] = False,
) -> None:
    """Show one run, or compare several: memory, account, plan, loss and throughput."""
    if text and html is not None:
        raise typer.BadParameter("--text writes no page; leave --text or --html out")
    found = read_runs(runs)
    console = Console()
    show_report(found, console)
    if not text:
        _write(html or runs[0] / "report.html", page(found), console)
    if png is not None:
        try:
            draw_report(found, png)
        except (OSError, ValueError) as error:
            raise RunFolderError(f"cannot draw into {png}: {error}") from error
        console.print(f"picture: {png}", highlight=False, markup=False)


def _write(path: Path, content: str, console: Console) -> None:
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise RunFolderError(
            f"cannot write {path}: {error.strerror}; name another --html"
        ) from error
    console.print(f"page: {path}", highlight=False, markup=False)
