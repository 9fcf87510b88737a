"""What a run reports to its observers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One finished step; memory is the process's, or PyTorch's reservation on the run's GPU.

    ``step`` and ``epoch`` count from 1. ``evicted_bytes`` of codes were evicted in the step.
    Backward updated ``released_gradients`` parameters. ``budget_bytes`` was in force at the step's
    end. ``budget_changes`` lists changes since the step before: ``time_s`` (seconds of the run),
    bytes, reason, and bytes of codes evicted at once. The other fields are as in
    :class:`daf.StepReport`.
    """

    step: int
    epoch: int
    loss: float
    step_ms: float
    examples_per_s: float
    resident_bytes: int
    peak_bytes: int
    accuracy_percent: float | None
    evicted_bytes: int = 0
    released_gradients: int = 0
    overrun_bytes: int = 0
    budget_bytes: int | None = None
    budget_changes: tuple[dict[str, Any], ...] = ()
    added_variance: float | None = None
    batch_variance: float | None = None
    measuring_ms: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the record as a line of ``metrics.jsonl``."""
        return asdict(self)


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
