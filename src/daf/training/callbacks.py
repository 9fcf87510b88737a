"""What a run reports to its observers."""

from dataclasses import asdict, dataclass
from typing import Any

from daf.core.step_report import StepReport


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One finished step of a run; ``step`` and ``epoch`` count from 1.

    ``budget_changes``: since the step before; each has ``time_s`` (seconds of the run), bytes,
    reason, and bytes of codes evicted at once.
    """

    step: int
    epoch: int
    report: StepReport
    examples_per_s: float
    resident_bytes: int  # of the process, or reserved by PyTorch on the run's GPU
    accuracy_percent: float | None = None
    budget_changes: tuple[dict[str, Any], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the record as a line of ``metrics.jsonl``, the report's fields among its own."""
        fields = asdict(self)
        return {**fields.pop("report"), **fields}


class Observer:
    """The base of displays: receives every event and shows nothing."""

    def begin(self, total_steps: int, first_step: int, budget_bytes: int | None) -> None:
        """Training begins at ``first_step`` (0: from the start)."""

    def note(self, text: str) -> None:
        """The run reports a line of text."""

    def profiling(self, policy_name: str) -> None:
        """The profiler starts to measure this policy."""

    def stepped(self, record: StepRecord) -> None:
        """A step is finished."""

    def end(self) -> None:
        """The run is over."""
