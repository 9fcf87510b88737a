"""``daf report``: runs as one HTML file, one PNG, and text."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from daf.cli import options
from daf.core.errors import RunFolderError
from daf.files.atomic import replacing
from daf.report.comparison import findings
from daf.report.page import page
from daf.report.picture import draw
from daf.report.run_charts import charts_of
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
    text: Annotated[bool, typer.Option("--text", help="Print it, and write no page.")] = False,
    as_json: options.Json = False,
) -> None:
    """Show one run, or compare several: memory, account, plan, loss and throughput."""
    if text and html is not None:
        raise typer.BadParameter("--text writes no page; leave --text or --html out")
    found = read_runs(runs)
    written = None if text else html or runs[0] / "report.html"
    if written is not None:
        try:
            with replacing(written) as file:
                file.write(page(found).encode())
        except RunFolderError as error:
            raise RunFolderError(f"{error}; name another --html") from error
    if png is not None:
        try:
            draw(charts_of(found), png)
        except (OSError, ValueError) as error:
            raise RunFolderError(f"cannot draw into {png}: {error}; name another --png") from error
    if as_json:
        report = {
            "runs": [
                {"name": run.name, **run.summary, "problems": list(run.problems)} for run in found
            ],
            "findings": findings(found),
            "page": None if written is None else str(written),
            "picture": None if png is None else str(png),
        }
        typer.echo(json.dumps(report))
        return
    console = Console(markup=False, emoji=False)  # names are shown as they are
    show_report(found, console)
    for name, path in (("page", written), ("picture", png)):
        if path is not None:
            console.print(f"{name}: {path}", highlight=False)
