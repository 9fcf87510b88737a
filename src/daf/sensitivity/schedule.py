"""The schedule of measurements, a small part of the training time."""

from __future__ import annotations

from dataclasses import dataclass

OVERHEAD = 0.02


@dataclass(slots=True)
class Schedule:
    """Keeps measuring, and planning by its results, within ``overhead`` of the training time (ms).

    The first measurement must be earned too; until then the prior, which costs one pass, has to do.
    """

    overhead: float = OVERHEAD
    trained_ms: float = 0.0
    measured_ms: float = 0.0
    planned_ms: float = 0.0  # making plans by new numbers, and searching better ones beside steps
    plans: int = 0

    @property
    def usual_planning_ms(self) -> float:
        """Mean time of a new plan so far, its search included; 0 before the first."""
        return self.planned_ms / max(1, self.plans)

    def allows(self, expected_ms: float) -> bool:
        """True if a measurement that will take ``expected_ms`` may begin now."""
        spent_ms = self.measured_ms + self.planned_ms
        return spent_ms + expected_ms <= self.overhead * self.trained_ms
