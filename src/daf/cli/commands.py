"""Commands by name, imported only when they run: ``daf --help`` and ``--version`` import no torch.

Another distribution adds a command by an entry point of the group ``daf.commands``: a function or a
``typer.Typer``. Its distribution's summary is the short help.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer
from typer.core import TyperCommand

from daf.core.errors import MissingPackageError

GROUP = "daf.commands"
PROGRAM_RUNNER = "run"  # what stands behind its first argument is the program's own

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
