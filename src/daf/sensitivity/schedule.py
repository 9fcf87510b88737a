"""The schedule of measurements, a small part of the training time."""

from __future__ import annotations

from dataclasses import dataclass

OVERHEAD = 0.02


@dataclass(slots=True)
class Schedule:
    """Keeps the time spent on measuring, and on planning by what was found, within ``overhead``
    of the training time (milliseconds).

    The first measurement waits until it has been earned too; until then the analytic
    prior, which costs one pass, has to do.
    """

    overhead: float = OVERHEAD
    trained_ms: float = 0.0
    measured_ms: float = 0.0
    planned_ms: float = 0.0
    plans: int = 0

    def note_step(self, step_ms: float) -> None:
        """A training step took so long."""
        self.trained_ms += step_ms

    def note_measurement(self, measured_ms: float) -> None:
        """A measurement took so long."""
        self.measured_ms += measured_ms

    def note_plan(self, planned_ms: float) -> None:
        """A plan by new numbers took so long to make."""
        self.planned_ms += planned_ms
        self.plans += 1

    def note_search(self, searched_ms: float) -> None:
        """The search for a better one took so long beside training."""
        self.planned_ms += searched_ms

    @property
    def usual_planning_ms(self) -> float:
        """Mean time of a new plan so far, its search included; 0 before the first."""
        return self.planned_ms / max(1, self.plans)

    def allows(self, expected_ms: float) -> bool:
        """True if a measurement that will take ``expected_ms`` may begin now."""
        spent_ms = self.measured_ms + self.planned_ms
        return spent_ms + expected_ms <= self.overhead * self.trained_ms
