"""Memory under the budget over time, drained to a file so that the log stays small."""

import time
from collections.abc import Callable
from typing import Any, TypeVar

from daf.files.records import Extent, GrowingFile, read_lines
from daf.memory.process_memory import MemoryTimeline
from daf.training.run_folder import RunFolder

_FLUSH_EVERY_S = 1.0
_Value = TypeVar("_Value")


class MemoryLog(MemoryTimeline):
    """A context that samples ``held_bytes`` and, from ``write_to`` on, writes ``memory.jsonl``.

    A line is ``{"seconds", "resident_bytes"}``, ``{"seconds", "mark"}`` or, if the budget changed,
    ``{"seconds", "budget_bytes"}`` (null: none from then on). A resumed run continues the seconds.
    """

    def __init__(self, interval_ms: float, held_bytes: Callable[[], int]) -> None:
        super().__init__(interval_ms, held_bytes)
        self._budgets: list[tuple[float, int | None]] = []
        self._budget_moves = -1
        self._file: GrowingFile | None = None
        self._offset_s = 0.0
        self._flushed_s = time.monotonic()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        if self._file is not None:  # what the summary tells of it is whole: nothing is added
            self._file.close()

    def note_budget(self, time_s: float, budget_bytes: int | None) -> float:
        """Record a budget from ``time_s`` (``perf_counter``) on; return the run's seconds."""
        since_entry_s = time_s - self.start_s
        self._budgets.append((since_entry_s, budget_bytes))
        self._budget_moves += 1
        return round(self._offset_s + since_entry_s, 3)

    def write_to(self, folder: RunFolder) -> None:
        """Write the log to ``folder`` from now on, earlier samples included."""
        self._file = GrowingFile(folder.memory)
        self._offset_s = max((line["seconds"] for line in read_lines(folder.memory)), default=0.0)

    def flush_if_old(self) -> None:
        """Flush if the last flush is more than a second ago."""
        if time.monotonic() - self._flushed_s > _FLUSH_EVERY_S:
            self.flush()

    def flush(self) -> None:
        """Move the samples from memory to the file; raises RunFolderError if the disk is full."""
        self._flushed_s = time.monotonic()
        if self._file is None:
            return
        lines = [
            {"seconds": round(self._offset_s + at, 3), key: value}
            for key, values in (
                ("mark", _drained(self.marks)),
                # The summary holds a budget that never changes.
                ("budget_bytes", _drained(self._budgets) if self._budget_moves > 0 else []),
                ("resident_bytes", _drained(self.samples)),
            )
            for at, value in values
        ]
        self._file.append(lines)

    def sync(self) -> Extent:
        """Flush, and return the file's extent once it is on disk."""
        assert self._file is not None
        self.flush()
        return self._file.sync()


def _drained(values: list[_Value]) -> list[_Value]:
    taken = values[:]
    del values[: len(taken)]  # the sampling thread may have appended since
    return taken
