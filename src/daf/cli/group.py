"""The command group that turns DAF's errors into one line and an exit code."""

from __future__ import annotations

import json
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from daf.cli.commands import LazyCommand, find_command, lazy_commands
from daf.core.errors import BudgetError, DafError, NonFiniteLossError
from daf.core.units import format_bytes

EXIT_REFUSED = 2
EXIT_NON_FINITE = 3
EXIT_INTERRUPTED = 130  # what a shell reports for SIGINT


class DafGroup(TyperGroup):
    """A command group that prints DAF errors without a traceback; with ``--json`` also as JSON."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        """Return all names, for ``--help``."""
        return list(lazy_commands())

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        """Return the command's name and short help, without importing it."""
        return find_command(cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Import the requested command."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, command.load() if isinstance(command, LazyCommand) else command, rest

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Note whether ``--json`` was asked for."""
        ctx.meta[_JSON_KEY] = "--json" in args
        rest: list[str] = super().parse_args(ctx, args)
        return rest

    def invoke(self, ctx: Any) -> Any:
        """Run the requested command."""
        try:
            return super().invoke(ctx)
        except DafError as error:
            _report(error, as_json=bool(ctx.meta.get(_JSON_KEY)))
            raise typer.Exit(_exit_code(error)) from error


_JSON_KEY = "daf.json"


def _exit_code(error: DafError) -> int:
    return EXIT_NON_FINITE if isinstance(error, NonFiniteLossError) else EXIT_REFUSED


def _report(error: DafError, *, as_json: bool) -> None:
    least = error.least_bytes if isinstance(error, BudgetError) else None
    text = str(error)
    if least is not None:
        text += f"\nThe least budget that could: {format_bytes(least)} (--budget {least})"
    print(f"daf: {text}", file=sys.stderr)
    if as_json:
        kind = BudgetError if isinstance(error, BudgetError) else type(error)
        facts: dict[str, Any] = {"kind": kind.__name__, "message": str(error)}
        if least is not None:
            facts["least_bytes"] = least
        print(json.dumps({"error": facts}))
