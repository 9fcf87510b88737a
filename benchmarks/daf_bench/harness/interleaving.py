"""Stepping contestants in turn, so that whatever disturbs the machine falls on all alike."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from daf_bench.harness.worker import Contestant

WARM_UP_STEPS = 3


def interleave(
    group: Sequence[Contestant], steps: int, on_progress: Callable[[str], None], what: str
) -> None:
    """Ask everybody for ``steps`` steps, one each at a time."""
    for index in range(steps):
        # The order alternates, so that neither side always follows the other.
        for contestant in group if index % 2 == 0 else reversed(group):
            contestant.step()
        on_progress(f"{what}: step {index + 1} of {steps}")


def warm_ms(contestant: Contestant) -> list[float]:
    """Times of its steps without those that warm up; the last step at least."""
    skip = min(WARM_UP_STEPS, len(contestant.steps) - 1)
    return [step.step_ms for step in contestant.steps[skip:]]


def median_ms(contestant: Contestant) -> float:
    """Median time of its steps once it was warm."""
    return statistics.median(warm_ms(contestant))


def mean_loss(contestant: Contestant, start: int) -> float:
    """Mean loss of the steps from ``start`` on."""
    return statistics.mean(step.loss for step in contestant.steps[start:])
