"""What a user sees of a run: a live panel on a terminal, else plain lines; a closing table."""

import sys
import time
from typing import TYPE_CHECKING, Any

from daf.core.units import format_bytes
from daf.report.comparison import COLUMNS, row
from daf.training.callbacks import Observer, StepRecord
from daf.training.run_folder import RunFolder

# rich is imported where something is drawn: a quiet run does not hold it.
if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_LINE_EVERY_S = 10.0
_FRAMES_PER_S = 8
_BAR_WIDTH = 32


def make_display(*, quiet: bool) -> Observer:
    """Return no display if ``quiet``, a live panel for terminals, lines for log files."""
    if quiet:
        return Observer()
    return LiveDisplay() if sys.stdout.isatty() else LineDisplay()


class LineDisplay(Observer):
    """Progress as a line every ten seconds."""

    _total_steps = 0
    _budget_bytes: int | None = None
    _said_s = float("-inf")

    def begin(self, total_steps: int, first_step: int, budget_bytes: int | None) -> None:
        self._total_steps, self._budget_bytes = total_steps, budget_bytes
        if first_step:
            self.note(f"resumed after step {first_step}")

    def note(self, text: str) -> None:
        print(text, flush=True)

    def stepped(self, record: StepRecord) -> None:
        """Print the first and the last step, and one every ten seconds."""
        now_s = time.monotonic()
        if now_s - self._said_s < _LINE_EVERY_S and record.step != self._total_steps:
            return
        self._said_s = now_s
        self.note(
            f"step {record.step}/{self._total_steps}  {_progress_text(record)}  "
            f"memory {_memory_text(record, record.report.budget_bytes or self._budget_bytes)}"
        )


class LiveDisplay(LineDisplay):
    """A panel that is redrawn in place; notes scroll by above it."""

    def __init__(self, console: "Console | None" = None) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = console or Console(markup=False, emoji=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)

    def begin(self, total_steps: int, first_step: int, budget_bytes: int | None) -> None:
        """Open the panel."""
        super().begin(total_steps, first_step, budget_bytes)
        self._live.start()

    def note(self, text: str) -> None:
        """Print ``text`` above the panel."""
        self._console.print(text, highlight=False, markup=False)

    def profiling(self, policy_name: str) -> None:
        """Print the policy being measured."""
        self._console.print(f"measuring {policy_name} …", style="dim")

    def stepped(self, record: StepRecord) -> None:
        """Redraw the panel, at most eight times a second."""
        now_s = time.monotonic()
        if now_s - self._said_s >= 1 / _FRAMES_PER_S or record.step == self._total_steps:
            self._said_s = now_s
            self._live.update(self._panel(record), refresh=True)

    def end(self) -> None:
        """Remove the panel."""
        self._live.stop()

    def _panel(self, record: StepRecord) -> "Table":
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        grid = Table.grid(padding=(0, 2))
        steps = ProgressBar(self._total_steps, record.step, width=_BAR_WIDTH)
        epoch = f"step {record.step}/{self._total_steps} · epoch {record.epoch}"
        grid.add_row("progress", steps, epoch)
        budget = record.report.budget_bytes or self._budget_bytes
        bar = ProgressBar(
            budget or record.report.peak_bytes, record.resident_bytes, width=_BAR_WIDTH
        )
        grid.add_row("memory", bar, _memory_text(record, budget))
        grid.add_row("training", _progress_text(record))
        return grid


def _progress_text(record: StepRecord) -> str:
    accuracy = record.accuracy_percent
    right = "" if accuracy is None else f"  accuracy {accuracy:.1f} %"
    return f"loss {record.report.loss:.4f}{right}  {record.examples_per_s:.0f} examples/s"


def _memory_text(record: StepRecord, budget_bytes: int | None) -> str:
    of_budget = "" if budget_bytes is None else f" of {format_bytes(budget_bytes)}"
    return f"{format_bytes(record.report.peak_bytes)} at its peak{of_budget}"


def show_summary(summary: dict[str, Any], folder: RunFolder) -> None:
    """Print the run's figures as a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    for name, value in zip(COLUMNS, row(str(folder.path), summary), strict=True):
        table.add_row(name, value)
    for sentence in summary["warnings"]:
        table.add_row("note", sentence)
    if summary["evicted_bytes"]:
        table.add_row("evicted", f"{format_bytes(summary['evicted_bytes'])} of codes in all steps")
    Console(markup=False, emoji=False).print(table, highlight=False)
