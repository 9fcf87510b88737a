"""How often a small step is timed, and which of them are."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from daf.profiling.small_steps import AGREE, LONG_MS, MOST_RUNS, fastest_ms, times_by_size


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


def affine(examples: int) -> float:
    return 7.0 + 2.0 * examples


def bent(examples: int) -> float:
    """As where the processor has work enough from eight examples on."""
    return 20.0 + max(0, examples - 8) * 3.0


@pytest.mark.parametrize(("took_ms", "measured"), [(affine, [32, 1, 8]), (bent, [32, 1, 8, 4, 16])])
def test_sizes_on_a_line_between_others_are_not_timed(
    took_ms: Callable[[int], float], measured: list[int]
) -> None:
    timed: list[int] = []

    def measure(examples: int) -> float:
        timed.append(examples)
        return took_ms(examples)

    sizes = (32, 16, 8, 4, 2, 1)
    found = times_by_size(sizes, measure)
    assert timed[:3] == measured[:3]
    assert sorted(timed) == sorted(measured)
    assert [examples for examples, _ in found] == sorted(sizes)
    assert dict(found) == pytest.approx({each: took_ms(each) for each in sizes})


@pytest.mark.parametrize(("off", "measured"), [(0.04, [16, 1, 4]), (0.06, [16, 1, 4, 8, 2])])
def test_a_time_is_on_the_line_within_a_twentieth(off: float, measured: list[int]) -> None:
    timed: list[int] = []

    def measure(examples: int) -> float:
        timed.append(examples)
        return affine(examples) * (1.0 + off * (examples == 4))

    times_by_size((1, 2, 4, 8, 16), measure)
    assert sorted(timed) == sorted(measured)


def test_a_short_time_is_on_the_line_within_what_it_differs_from_run_to_run() -> None:
    timed: list[int] = []

    def measure(examples: int) -> float:
        timed.append(examples)
        return 0.1 * affine(examples) + 0.2 * (examples == 4)  # a seventh more than on the line

    times_by_size((1, 2, 4, 8, 16), measure)
    assert sorted(timed) == [1, 4, 16]


@pytest.mark.parametrize("most", [0, 1, 3, 8, 99])
def test_sizes_that_are_refused_memory_are_left_out(most: int) -> None:
    found = times_by_size((1, 4, 8, 16), lambda n: affine(n) if n <= most else None)
    assert dict(found) == pytest.approx({n: affine(n) for n in (1, 4, 8, 16) if n <= most})
