"""Which sizes are measured: the two wanted ones where they fit, smaller ones where they do not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from daf.profiling.small_steps import probe_sizes, sizes_within


@given(st.integers(1, 4096))
def test_with_room_an_eighth_and_a_quarter_of_the_batch_are_measured(examples: int) -> None:
    sizes = probe_sizes(examples)
    assert sizes_within(sizes, lambda size: float(size), 10**9) == sizes
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] <= examples
    assert sizes[-1] <= max(4, examples // 4)


@given(st.integers(1, 4096), st.integers(1, 10**6), st.integers(0, 10**9))
def test_nothing_is_measured_beyond_the_budget_but_one_example(
    examples: int, bytes_each: int, budget_bytes: int
) -> None:
    wanted = probe_sizes(examples)
    sizes = sizes_within(wanted, lambda size: float(bytes_each * size), budget_bytes)
    assert 1 <= len(sizes) <= len(wanted)
    assert sizes == (1,) or all(bytes_each * size <= budget_bytes for size in sizes)


def test_two_sizes_are_measured_wherever_two_fit() -> None:
    wanted = probe_sizes(128)
    assert wanted == (16, 32)
    for room, expected in ((31, (8, 16)), (15, (4, 8)), (3, (1, 2)), (1, (1,)), (0, (1,))):
        assert sizes_within(wanted, lambda size: float(size), room) == expected
