"""Observed steps to a profile's parts: made-up observations, nothing measured."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daf.core.policy import KEEP, Method, Need, Site, Treatment
from daf.core.profile import Affine
from daf.profiling.profile_assembly import _Moments, build, transient
from daf.saved_tensors.observation import ModuleCall, Observation, ObservedTensor

CODED = Treatment(Method.ROTATED, 1)


def save(
    place: int,
    nbytes: int,
    saved: int,
    dies: int,
    read: int,
    released: int,
    treatment: Treatment = KEEP,
    storage: int | None = None,
) -> ObservedTensor:
    return ObservedTensor(
        site=Site("m", "f", place, 0),
        need=Need.LINEAR,
        treatment=treatment,
        storage=place if storage is None else storage,
        storage_bytes=nbytes,
        content=place if storage is None else storage,
        tensor_bytes=nbytes,
        elements=nbytes // 4,
        held_bytes=nbytes // 32 if treatment != KEEP else nbytes,
        treatable=True,
        parents=None,
        call=0,
        saved=saved,
        dies=dies,
        read=read,
        released=released,
    )


def observation(examples: int, scale: int = 4096) -> Observation:
    """Six moments; the second tensor is coded; one gradient comes in moment 5."""
    size = scale * examples
    saves = [save(0, size, 0, 2, 4, 5), save(1, 2 * size, 1, 2, 3, 3, CODED)]
    call = ModuleCall("m", -1, 0, 1, 2.0 * examples, [(0, size)], 3 * size)
    return Observation(
        examples,
        peak_bytes=[size, 4 * size, 2 * size, 5 * size, 3 * size, size + 100],
        gradient_bytes=[0, 0, 0, 0, 0, 100],
        saves=saves,
        calls=[call],
        forward=3,
    )


def test_what_the_program_holds_is_the_peak_less_what_autograd_does() -> None:
    size = 4096 * 2
    # Kept from its death (2) until released (5); the coded one only as decoded, in moment 3.
    assert transient(observation(2)) == [size, 4 * size, size, 2 * size, 2 * size, 0]


def test_what_is_kept_twice_is_taken_off_once_and_until_the_last_release() -> None:
    found = observation(1)
    size = 4096
    found.saves = [save(0, size, 0, 1, 3, 3), save(1, size, 0, 1, 4, 5, storage=0)]
    found.peak_bytes = [10 * size] * 6
    found.gradient_bytes = [0] * 6
    assert transient(found) == [10.0 * size] + [9.0 * size] * 5


def test_it_is_never_negative() -> None:
    found = observation(1)
    found.peak_bytes = [0] * 6
    assert transient(found) == [0.0] * 6


def test_two_sizes_make_lines() -> None:
    parts = build([observation(2), observation(4)])
    assert parts.savings[0].storage_bytes == Affine(0.0, 4096.0)
    assert parts.savings[1].elements == Affine(0.0, 2048.0)
    assert parts.calls[0].forward_ms == Affine(0.0, 2.0)
    assert parts.calls[0].inputs == ((0, Affine(0.0, 4096.0)),)
    assert parts.calls[0].output_bytes == Affine(0.0, 3 * 4096.0)
    assert parts.timeline.transient[1] == Affine(0.0, 4 * 4096.0)
    assert parts.timeline.gradient_bytes[-1] == 100
    assert [each.at(8) for each in parts.timeline.transient] == transient(observation(8))


def test_what_does_not_grow_with_the_batch_is_the_line_s_fixed_part() -> None:
    small, large = observation(2), observation(4)
    for each in (small, large):
        each.peak_bytes = [peak + 1000 for peak in each.peak_bytes]
    assert build([small, large]).timeline.transient[0] == Affine(1000.0, 4096.0)


@pytest.mark.parametrize("change", ["save", "moment", "call"])
def test_where_steps_differ_the_largest_alone_counts_in_proportion(change: str) -> None:
    small, large = observation(2), observation(4)
    small.peak_bytes = [7 * peak for peak in small.peak_bytes]  # would bend every line
    if change == "save":
        small.saves[1] = replace(small.saves[1], site=Site("other", "f", 0, 0))
    elif change == "moment":
        small.forward = 2
    else:
        small.calls[0].module = "other"
    assert build([small, large]) == build([large])
    assert build([large]).timeline.transient[1] == Affine(0.0, 4 * 4096.0)


def test_a_call_is_replayable_if_it_was_at_every_size() -> None:
    small, large = observation(2), observation(4)
    small.calls[0].replayable = False
    assert [each.replayable for each in build([small, large]).calls] == [False]


def test_moments_in_which_nothing_begins_or_ends_are_one() -> None:
    found = observation(1)
    found.peak_bytes = [1, 9, 2, 3, 4, 5, 8, 6]
    found.gradient_bytes = [0] * 8
    found.forward = 4
    found.saves = [save(0, 4096, 1, 4, 6, 6)]
    found.calls = []
    moments = _Moments(found)
    assert moments.begins == [0, 1, 4, 6, 7]
    assert [moments.number(each) for each in range(9)] == [0, 1, 1, 1, 2, 2, 3, 4, 5]
    assert moments.highest(found.peak_bytes) == [1, 9, 5, 8, 6]
    assert (moments.count, moments.forward) == (5, 2)


@st.composite
def observations(draw: st.DrawFn) -> Observation:
    forward, backward = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    count = forward + backward
    found = Observation(draw(st.integers(1, 8)), forward=forward)
    found.peak_bytes = draw(st.lists(st.integers(0, 10**6), min_size=count, max_size=count))
    steps = draw(st.lists(st.sampled_from((0, 0, 7)), min_size=backward, max_size=backward))
    total = 0
    found.gradient_bytes = [0] * forward
    for step in steps:
        found.gradient_bytes.append(total)
        total += step
    for place in range(draw(st.integers(0, 5))):
        saved = draw(st.integers(0, forward - 1))
        read = draw(st.integers(forward, count - 1))
        released = draw(st.integers(read, count - 1))
        dies = draw(st.integers(saved, count))
        treatment = draw(st.sampled_from((KEEP, CODED)))
        size = draw(st.integers(1, 10**4)) * 4
        found.saves.append(save(place, size, saved, dies, read, released, treatment))
    return found


@given(observations())
def test_merged_moments_lose_no_order_and_no_peak(found: Observation) -> None:
    before = deepcopy(found)
    parts = build([found])
    assert found == before  # pure
    moments = _Moments(found)
    numbers = [moments.number(each) for each in range(len(found.peak_bytes) + 1)]
    assert numbers == sorted(numbers)
    assert set(numbers) == set(range(moments.count + 1))
    merged = [each.at(found.examples) for each in parts.timeline.transient]
    exact = transient(found)
    for moment, value in enumerate(exact):
        assert merged[numbers[moment]] >= value - 1e-6
    assert max(merged) == pytest.approx(max(exact))
    for line, made in zip(found.saves, parts.savings, strict=True):
        assert made.saved < parts.timeline.forward <= made.read <= made.released
        # Alive spans cover the same moments as before: none is lost or added by merging.
        inside = {numbers[m] for m in range(line.read, line.released + 1)}
        assert inside == set(range(made.read, made.released + 1))
    for moment, number in enumerate(numbers[:-1]):
        assert parts.timeline.gradient_bytes[number] == found.gradient_bytes[moment]


@given(observations(), st.integers(2, 5))
def test_a_step_twice_as_large_in_everything_doubles_every_line(
    found: Observation, factor: int
) -> None:
    larger = deepcopy(found)
    larger.examples *= factor
    larger.peak_bytes = [factor * each for each in found.peak_bytes]
    larger.gradient_bytes = [0] * len(found.gradient_bytes)
    found.gradient_bytes = [0] * len(found.gradient_bytes)
    for each in larger.saves:
        each.tensor_bytes *= factor
        each.storage_bytes *= factor
    lines = build([found, larger]).timeline.transient
    expected = build([larger]).timeline.transient
    size = 3 * larger.examples
    assert [each.at(size) for each in lines] == pytest.approx([each.at(size) for each in expected])
