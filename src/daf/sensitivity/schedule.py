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
    planned_ms: float = 0.0
    plans: int = 0

    def note_step(self, step_ms: float) -> None:
        """Count a training step's time."""
        self.trained_ms += step_ms

    def note_measurement(self, measured_ms: float) -> None:
        """Count a measurement's time."""
        self.measured_ms += measured_ms

    def note_plan(self, planned_ms: float) -> None:
        """Count the time of making a plan by new numbers."""
        self.planned_ms += planned_ms
        self.plans += 1

    def note_search(self, searched_ms: float) -> None:
        """Count the time of a search for a better plan beside training."""
        self.planned_ms += searched_ms

    @property
    def usual_planning_ms(self) -> float:
        """Mean time of a new plan so far, its search included; 0 before the first."""
        return self.planned_ms / max(1, self.plans)

    def allows(self, expected_ms: float) -> bool:
        """True if a measurement that will take ``expected_ms`` may begin now."""
        spent_ms = self.measured_ms + self.planned_ms
        return spent_ms + expected_ms <= self.overhead * self.trained_ms
