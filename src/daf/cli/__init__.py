"""The command line: ``daf train``, ``plan``, ``report``, ``run``, ``doctor`` and plugins."""

from importlib import metadata
from typing import Annotated

import typer

from daf.cli.commands import DafGroup

# Plain help: importing rich for it takes longer than the rest of `daf --help`.
app = typer.Typer(
    cls=DafGroup, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None
)


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
