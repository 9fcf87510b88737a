"""Commands by name, imported only when they run: ``daf --help`` and ``--version`` import no torch.

Another distribution adds a command by an entry point of the group ``daf.commands``: a function or a
``typer.Typer``. Its distribution's summary is the short help.
"""

import json
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from itertools import dropwhile
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from daf.core.errors import BudgetError, DafError, MissingPackageError, NonFiniteLossError
from daf.core.units import format_bytes

GROUP = "daf.commands"
EXIT_REFUSED = 2
EXIT_NON_FINITE = 3
EXIT_INTERRUPTED = 130  # what a shell reports for SIGINT
_JSON_KEY = "daf.json"
PROGRAM_RUNNER = "run"  # what stands behind its first argument is the program's own

_OWN, _BENCH = str(Path(__file__).parents[1]), "daf_bench"
_LIBRARIES = ("<", *map(sysconfig.get_path, ("stdlib", "purelib", "platlib", "scripts")))

# The first lines of the docstrings of daf.cli.NAME:NAME_command.
OWN_COMMANDS: Mapping[str, str] = {
    "train": "Train MODEL on DATA with the process's memory, or a GPU's, kept below --budget.",
    "plan": "Measure a few small steps of MODEL on DATA and say how it would train within "
    "--budget.",
    "report": "Show one run, or compare several: memory, account, plan, loss and throughput.",
    "run": "Run a Python program within a budget, or count what its tensors hold.",
    "doctor": "Say what this machine offers: processor, memory, limits, GPU, and what works.",
}


class LazyCommand(TyperCommand):
    """A command's name and short help; ``load`` imports the command itself."""

    def __init__(self, name: str, summary: str, import_target: Callable[[], Any]) -> None:
        super().__init__(name=name, help=summary)
        self._import_target = import_target

    def load(self) -> Any:
        """Import the command; raises MissingPackageError if it is not installed."""
        target = self._import_target()
        if not isinstance(target, typer.Typer):
            app = typer.Typer(add_completion=False, rich_markup_mode=None)
            settings = {"allow_interspersed_args": self.name != PROGRAM_RUNNER}
            app.command(self.name, context_settings=settings)(target)
            target = app
        return typer.main.get_command(target)


def lazy_commands() -> dict[str, LazyCommand]:
    """Return DAF's own commands and those of installed distributions, by name."""
    own = [EntryPoint(name, f"daf.cli.{name}:{name}_command", GROUP) for name in OWN_COMMANDS]
    return {
        point.name: LazyCommand(point.name, _summary(point), point.load)
        for point in (*own, *entry_points(group=GROUP))
    }


def find_command(name: str) -> LazyCommand | None:
    """Return the command ``name``; ``bench`` without daf-bench names what to install."""
    found = lazy_commands().get(name)
    if found is None and name == "bench":
        return LazyCommand(name, "", _refuse_benchmarks)
    return found


def _summary(point: EntryPoint) -> str:
    if point.dist is None or "Summary" not in point.dist.metadata:
        return OWN_COMMANDS.get(point.name, "")
    return point.dist.metadata["Summary"]


def _refuse_benchmarks() -> Any:
    raise MissingPackageError(
        "'daf bench' comes with the distribution daf-bench, which is not installed; "
        "in a clone of DAF: pip install ./benchmarks"
    )


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
            is_non_finite = isinstance(error, NonFiniteLossError)
            raise typer.Exit(EXIT_NON_FINITE if is_non_finite else EXIT_REFUSED) from error
        except Exception as error:
            if not _tell_of_users(error):
                raise
            raise typer.Exit(1) from error


def _tell_of_users(error: Exception) -> bool:
    """Print an error of the user's own code as ``python`` does; False: it is of no user's code."""
    told = traceback.TracebackException.from_exception(error)
    others = (f for f in told.stack if not (f.filename.startswith(_OWN) or _BENCH in f.filename))
    told.stack[:] = dropwhile(lambda frame: frame.filename.startswith(_LIBRARIES), others)
    if told.stack or isinstance(error, SyntaxError):
        print("".join(told.format()), end="", file=sys.stderr)
        return True
    return False


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
