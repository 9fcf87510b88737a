"""Profiles of larger examples, from one or two that were measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import MIB, blocks, profile, saving

from daf.core.policy import Need
from daf.core.profile import Affine, Profile
from daf.profiling.growth import MOST_POWER, Growth, PeakGrowth, grown
from daf.saved_tensors.observation import Observation

BATCH = 8
ratios = st.floats(1.0, 2.0)
powers = st.floats(0.0, MOST_POWER)


def of_length(length: float, *, scores: float = MOST_POWER) -> Profile:
    """Two tensors that grow with the length, and with its power ``scores``."""
    numbers = (4096 * length, 64 * length**scores)
    savings = []
    for index, elements in enumerate(numbers):
        made = saving(index, len(numbers), Need.LINEAR, 1, call=1)
        sizes = Affine(0, 4 * elements)
        elements_line = Affine(0, elements)
        savings.append(
            replace(made, storage_bytes=sizes, tensor_bytes=sizes, elements=elements_line)
        )
    return profile(savings, calls=blocks(2, 1), transient=[4096 * length] * 4, batch=BATCH)


def bytes_of(found: Profile) -> list[float]:
    saved = [each.tensor_bytes.at(found.batch_size) for each in found.savings]
    return saved + [each.at(found.batch_size) for each in found.timeline.transient]


@given(ratio=ratios, step=st.floats(1.05, 1.6), scores=powers)
def test_two_sizes_show_how_each_number_grows(ratio: float, step: float, scores: float) -> None:
    before, last = of_length(100, scores=scores), of_length(100 * step, scores=scores)
    found = grown(last, BATCH, Growth(ratio, before, step))
    expected = of_length(100 * step * ratio, scores=scores)
    assert bytes_of(found) == pytest.approx(bytes_of(expected), rel=1e-6)


@given(ratio=ratios, scores=powers)
def test_one_size_promises_no_less_than_any_larger_one_takes(ratio: float, scores: float) -> None:
    found = grown(of_length(100, scores=scores), BATCH, Growth(ratio))
    truth = bytes_of(of_length(100 * ratio, scores=scores))
    assert all(a >= b * (1 - 1e-9) for a, b in zip(bytes_of(found), truth, strict=True))


def test_what_belongs_to_the_model_does_not_grow() -> None:
    before = of_length(100)
    found = grown(before, BATCH, Growth(1.5))
    assert found.parameter_bytes == before.parameter_bytes == 3 * MIB
    assert found.floor_bytes == before.floor_bytes
    assert found.timeline.gradient_bytes == before.timeline.gradient_bytes
    assert found.speeds is before.speeds


def test_more_examples_of_the_same_size_change_the_count_alone() -> None:
    before = of_length(100)
    assert grown(before, 12, Growth(1.0)) == replace(before, batch_size=12)


def test_another_course_of_saves_is_not_compared_number_by_number() -> None:
    last = of_length(100)
    other = replace(of_length(50), savings=last.savings[:1])
    assert grown(last, BATCH, Growth(1.2, other, 2.0)) == grown(last, BATCH, Growth(1.2))


fixed = st.integers(0, 10**9)
each_example = st.integers(0, 10**7)
sizes = st.integers(1, 64)


def observed(examples: int, fixed_bytes: int, example_bytes: int, pages: int = 0) -> Observation:
    nbytes = fixed_bytes + example_bytes * examples
    return Observation(examples, peak_bytes=[0, nbytes], process_bytes=nbytes + pages)


@given(fixed=fixed, example=each_example, size=sizes, times=st.integers(2, 8), wanted=sizes)
def test_two_sizes_tell_what_does_not_grow_with_the_batch(
    fixed: int, example: int, size: int, times: int, wanted: int
) -> None:
    growth = PeakGrowth()
    small, large = (observed(n, fixed, example) for n in (size, size * times))
    growth.note(small, "kind")
    growth.note(large, "kind")
    for found in (small, large):
        expected = growth.peak_bytes(found, wanted, gradient_bytes=0)
        assert expected == pytest.approx(fixed + example * wanted, rel=1e-9, abs=1)


@given(fixed=fixed, example=each_example, size=sizes, wanted=sizes, gradient=fixed)
def test_of_one_size_all_but_gradients_is_taken_to_grow(
    fixed: int, example: int, size: int, wanted: int, gradient: int
) -> None:
    growth, found = PeakGrowth(), observed(size, fixed, example)
    growth.note(observed(2 * size, 0, 0), "another cut")
    growth.note(found, "kind")
    growing = max(0, fixed + example * size - gradient)
    expected = growth.peak_bytes(found, wanted, gradient)
    assert expected == pytest.approx(growing * wanted / size, rel=1e-9)


def test_pages_that_come_and_go_do_not_hide_what_tensors_show() -> None:
    growth, found = PeakGrowth(), observed(2, 0, 10**6)
    growth.note(observed(1, 0, 10**6, pages=5 * 10**6), "kind")
    growth.note(found, "kind")
    assert growth.peak_bytes(found, 32, 0) == pytest.approx(32 * 10**6)
