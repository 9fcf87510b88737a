"""The command line: ``daf train``, ``plan``, ``report``, ``run``, ``doctor`` and ``bench``."""

from __future__ import annotations

from importlib import metadata
from typing import Annotated

import typer
from daf_bench.cli import app as bench_app

from daf.cli.doctor import doctor_command
from daf.cli.group import DafGroup
from daf.cli.plan import plan_command
from daf.cli.report import report_command
from daf.cli.run import run_command
from daf.cli.train import train_command

app = typer.Typer(cls=DafGroup, no_args_is_help=True, pretty_exceptions_enable=False)
app.command("train")(train_command)
app.command("plan")(plan_command)
app.command("report")(report_command)
app.command("run")(run_command)
app.command("doctor")(doctor_command)
app.add_typer(bench_app, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(metadata.version("daf-train"))
        raise typer.Exit


@app.callback()
def daf(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Train any PyTorch model inside a byte budget."""


def main() -> None:
    """Run the command line."""
    app()
