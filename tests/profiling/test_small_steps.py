"""How often a small step is timed."""

from __future__ import annotations

import pytest

from daf.profiling.small_steps import AGREE, LONG_MS, MOST_RUNS, fastest_ms


@pytest.mark.parametrize(
    ("took_ms", "runs"),
    [
        ((LONG_MS, 1.0), 1),
        ((LONG_MS - 1.0, 50.0), 2),
        ((1.0, 1.0 + AGREE, 0.5), 2),
        ((2.0, 1.0, 1.5, 1.02, 0.5), 4),  # two of them agree, not the first
        (tuple(1.1**-place for place in range(99)), MOST_RUNS),
        ((9.0, 6.0, 5.0, 1.0), 3),  # together long enough, though none agree
    ],
)
def test_a_long_step_is_timed_once_and_a_short_one_until_two_times_agree(
    took_ms: tuple[float, ...], runs: int
) -> None:
    left = list(took_ms)
    assert fastest_ms(lambda: left.pop(0)) == min(took_ms[:runs])
    assert len(took_ms) - len(left) == runs
