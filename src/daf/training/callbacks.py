"""What a run tells whoever watches it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from daf.core.plan import Plan


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One finished step. ``step`` and ``epoch`` count from 1; memory is the whole process's,
    or what PyTorch reserves on the GPU that the run is on.

    ``evicted_bytes`` of codes were given up in the step; ``released_gradients`` parameters
    were updated inside backward; ``overrun_bytes``: see :class:`daf.StepReport`.
    ``budget_bytes`` was in force at the step's end; ``budget_changes`` tells every change since
    the step before (``time_s`` in seconds of the run; bytes, reason, bytes of codes given up at
    once). ``added_variance``, ``batch_variance`` and ``measuring_ms``: see :class:`daf.StepReport`.
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
        """The record as a line of ``metrics.jsonl``."""
        return asdict(self)


class Observer:
    """Hears of everything and shows nothing; displays override what they show."""

    def begin(self, total_steps: int, first_step: int, budget_bytes: int | None) -> None:
        """Training is about to begin at ``first_step`` (0: from the start)."""

    def note(self, text: str) -> None:
        """Something worth a line happened."""

    def profiling(self, policy_name: str) -> None:
        """The profiler measures this policy now."""

    def planned(self, plan: Plan) -> None:
        """This is how the run will train."""

    def stepped(self, record: StepRecord) -> None:
        """A step is done."""

    def evaluated(self, epoch: int, metric_name: str, metric: float) -> None:
        """The test examples were scored after ``epoch``."""

    def end(self) -> None:
        """Nothing more will be shown."""
