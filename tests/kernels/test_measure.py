"""Ranges and sums against the oracle, byte for byte: every strategy, geometry and thread count."""

from __future__ import annotations

import math
from functools import partial

import native_calls
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import reductions as reference_reductions
from thoroughness import pairs

from daf.core.code_format import ElementType
from daf.core.errors import KernelError
from daf.kernels import RangeStrategy
from daf.kernels.cpu import codecs, reductions
from daf.kernels.cpu.instruction_sets import instruction_sets, use_instruction_set
from daf.kernels.cpu.job import Job

F32, TREE = ElementType.FLOAT32, RangeStrategy.TREE
INPUTS = ("smooth", "wild", "mixed", "broken")
TYPES = tuple(ElementType)
COUNTS = (1, 17, 255, 256, 257, 4097, 20_011)
# Channels and inner lengths: one channel; columns that divide sixteen, that sixteen divides, and
# neither; runs shorter and longer than a vector, a block, a span; more channels than elements.
GEOMETRIES = (
    *((1, 1), (1, 9), (2, 1), (16, 1), (64, 1), (96, 1), (1024, 1), (3, 1), (7, 1), (1009, 1)),
    *((30_000, 1), (30_001, 1), (5, 2), (300, 3), (7, 16), (5, 49), (3, 256), (2, 5000), (999, 64)),
)


class Native:
    """The native reductions behind the oracle's signatures, all memory guarded."""

    def __init__(self, cases, element_type=F32, threads=1, strategy=TREE, offset=0) -> None:
        self.cases, self.element_type, self.threads = cases, element_type, threads
        self.strategy, self.offset = strategy, offset

    def _room(self, count, dtype):
        return self.cases.guarded(count, dtype, self.offset)

    def measure_ranges(self, source, channels, inner) -> reference_reductions.Ranges:
        shape = (len(source), self.threads, channels, inner)
        moved = self._room(len(source), source.dtype).fill(source)
        least, greatest = self._room(channels, np.float32), self._room(channels, np.float32)
        workspace = self._room(reductions.ranges_workspace_bytes(*shape, self.strategy), np.uint8)
        native_calls.measure_ranges(
            *(moved.address, self.element_type, len(source), least.address, greatest.address),
            *(workspace.address, self.threads, channels, inner, self.strategy),
        )
        workspace.opened()
        return reference_reductions.Ranges(least.opened(), greatest.opened())

    def measure_sums(self, source, channels, inner) -> reference_reductions.Sums:
        shape = (len(source), self.threads, channels, inner)
        moved = self._room(len(source), source.dtype).fill(source)
        sums, squares = self._room(channels, np.float64), self._room(channels, np.float64)
        workspace = self._room(reductions.sums_workspace_bytes(*shape), np.uint8)
        where = (channels, inner, sums.address, squares.address, workspace.address)
        measure_sums(moved.address, self.element_type, len(source), where, self.threads)
        workspace.opened()
        return reference_reductions.Sums(sums.opened(), squares.opened())


def measure_sums(source, element_type, count, sums, threads) -> None:
    codecs.read(Job(threads, count, element_type, source, **native_calls.channel_sums(*sums)))


def same_bytes(found, expected) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one.view(np.uint8), other.view(np.uint8))


@pytest.mark.parametrize(("kind", "element_type"), pairs(INPUTS, TYPES))
def test_ranges_equal_the_oracle(cases, on_every_set, kind, element_type) -> None:
    for count in COUNTS:
        source = cases.as_type(getattr(cases, kind)(count, count), element_type)
        for geometry in GEOMETRIES:
            expected = reference_reductions.measure_ranges(source, *geometry)

            def check(source=source, geometry=geometry, expected=expected) -> None:
                for strategy in RangeStrategy:
                    native = Native(cases, element_type, strategy=strategy)
                    same_bytes(native.measure_ranges(source, *geometry), expected)

            on_every_set(check)


@pytest.mark.parametrize(("kind", "element_type"), pairs(INPUTS, TYPES))
def test_sums_equal_the_oracle(cases, on_every_set, kind, element_type) -> None:
    for count in COUNTS:
        source = cases.as_type(getattr(cases, kind)(count, count), element_type)
        for geometry in GEOMETRIES:
            expected = reference_reductions.measure_sums(source, *geometry)

            def check(source=source, geometry=geometry, expected=expected) -> None:
                native = Native(cases, element_type)
                same_bytes(native.measure_sums(source, *geometry), expected)

            on_every_set(check)


def test_every_ragged_size(cases, instruction_set) -> None:
    everything = cases.mixed(520)
    for count in range(1, 521):
        source, geometry = everything[-count:], GEOMETRIES[count % len(GEOMETRIES)]
        native = Native(cases, strategy=RangeStrategy(count % 3))
        expected = reference_reductions.measure_ranges(source, *geometry)
        same_bytes(native.measure_ranges(source, *geometry), expected)
        expected = reference_reductions.measure_sums(source, *geometry)
        same_bytes(native.measure_sums(source, *geometry), expected)


@pytest.mark.parametrize("offset", [1, 4, 20, 63])
def test_misaligned_memory(cases, instruction_set, offset) -> None:
    source = cases.smooth(3001)
    for geometry in GEOMETRIES:
        for strategy in RangeStrategy:
            native = Native(cases, strategy=strategy, offset=offset)
            expected = reference_reductions.measure_ranges(source, *geometry)
            same_bytes(native.measure_ranges(source, *geometry), expected)
        expected = reference_reductions.measure_sums(source, *geometry)
        same_bytes(native.measure_sums(source, *geometry), expected)


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_threads_and_strategies_change_no_byte(cases, instruction_set, geometry) -> None:
    """Enough blocks for four shares, a tail in the last one."""
    source = cases.mixed(4 * 256 * 256 + 77)
    ranges = reference_reductions.measure_ranges(source, *geometry)
    sums = reference_reductions.measure_sums(source, *geometry)
    for threads in (1, 2, 3, 4):
        same_bytes(Native(cases, threads=threads).measure_sums(source, *geometry), sums)
        for strategy in RangeStrategy:
            native = Native(cases, threads=threads, strategy=strategy)
            same_bytes(native.measure_ranges(source, *geometry), ranges)


def patterns(count: int) -> st.SearchStrategy[np.ndarray]:
    words = st.lists(st.integers(0, 2**32 - 1), min_size=count, max_size=count)
    return words.map(lambda found: np.array(found, np.uint32).view(np.float32))


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    count=st.integers(0, 600),
    channels=st.integers(1, 70),
    inner=st.integers(1, 70),
    strategy=st.sampled_from(RangeStrategy),
)
def test_any_bits_in_any_geometry(cases, data, count, channels, inner, strategy) -> None:
    source = data.draw(patterns(min(count, 8)))
    source = np.resize(source, count) if count else source
    ranges = reference_reductions.measure_ranges(source, channels, inner)
    sums = reference_reductions.measure_sums(source, channels, inner)
    for name in instruction_sets():
        with use_instruction_set(name):
            native = Native(cases, strategy=strategy)
            same_bytes(native.measure_ranges(source, channels, inner), ranges)
            same_bytes(native.measure_sums(source, channels, inner), sums)


@settings(max_examples=50, deadline=None)
@given(
    channels=st.integers(1, 40), rows=st.integers(1, 40), inner=st.integers(1, 40), data=st.data()
)
def test_ranges_are_those_of_each_channel_by_itself(cases, channels, rows, inner, data) -> None:
    source = cases.wild(rows * channels * inner, data.draw(st.integers(0, 99)))
    found = Native(cases).measure_ranges(source, channels, inner)
    by_channel = source.reshape(rows, channels, inner).transpose(1, 0, 2).reshape(channels, -1)
    assert (found.least == by_channel.min(axis=1)).all()
    assert (found.greatest == by_channel.max(axis=1)).all()


# --- what the numbers mean ------------------------------------------------------------------


def test_zeros_have_an_order_and_nan_poisons_its_channel_only(cases, instruction_set) -> None:
    zeros = np.array([0.0, -0.0], np.float32)
    negative_nan = np.array([0xFFC12345], np.uint32).view(np.float32)
    source = np.concatenate([np.tile(zeros, 100), np.full(200, 5, np.float32)])
    for strategy in RangeStrategy:
        native = Native(cases, strategy=strategy)
        least, greatest = native.measure_ranges(source, 2, 200)
        assert least.view(np.uint32).tolist() == [0x80000000, 0x40A00000]
        assert greatest.view(np.uint32).tolist() == [0, 0x40A00000]
        for nan in (negative_nan, -negative_nan):
            source[7] = nan[0]
            found = native.measure_ranges(source, 2, 200)
            for end in found:
                assert end.view(np.uint32).tolist() == [0x7FC00000, 0x40A00000]
            source[7] = 0


def test_channels_without_elements(cases, instruction_set) -> None:
    source = np.array([3, -4], np.float32)
    for strategy in RangeStrategy:
        least, greatest = Native(cases, strategy=strategy).measure_ranges(source, 3, 1)
        assert least.tolist() == [3, -4, math.inf]
        assert greatest.tolist() == [3, -4, -math.inf]
        empty = Native(cases, strategy=strategy).measure_ranges(source[:0], 1, 1)
        assert [end.tolist() for end in empty] == [[math.inf], [-math.inf]]
    assert [s.tolist() for s in Native(cases).measure_sums(source, 3, 1)] == [
        [3, -4, 0],
        [9, 16, 0],
    ]
    assert [s.tolist() for s in Native(cases).measure_sums(source[:0], 1, 1)] == [[0], [0]]


def test_sums_of_what_is_not_finite(cases, instruction_set) -> None:
    source = np.array(
        [np.inf, 1, -np.inf, np.nan, -0.0, np.inf, 2, -np.inf, 1, -np.inf], np.float32
    )
    found = Native(cases).measure_sums(source, 5, 1)
    nan = 0x7FF8000000000000
    assert found.sums[:3].tolist() == [np.inf, 3, -np.inf]
    assert found.sums[3:].view(np.uint64).tolist() == [nan, 0xFFF0000000000000]
    assert found.squares[[0, 2, 4]].tolist() == [np.inf, np.inf, np.inf]
    assert found.squares[3:4].view(np.uint64).tolist() == [nan]
    opposite = Native(cases).measure_sums(source[[0, 2]], 1, 1)
    assert opposite.sums.view(np.uint64).tolist() == [nan]


def test_sums_are_as_good_as_float64(cases) -> None:
    """Against the exact sums of ``fsum``: some hundred additions lie behind each number."""
    source = cases.gaussian(1_000_003) * np.float32(1e20) + np.float32(1e19)
    for channels, inner in ((1, 1), (7, 1), (16, 9)):
        found = Native(cases).measure_sums(source, channels, inner)
        channel = reference_reductions.channel_of(len(source), channels, inner)
        for c in range(channels):
            values = source[channel == c].astype(np.float64)
            size = 2.0**-46
            assert abs(found.sums[c] - math.fsum(values)) <= size * math.fsum(np.abs(values))
            assert abs(found.squares[c] / math.fsum(values * values) - 1) <= size


def test_mean_and_variance_survive_a_distant_mean(cases) -> None:
    source = cases.gaussian(100_000) + np.float32(1000)
    sums, squares = Native(cases).measure_sums(source, 1, 1)
    mean = sums[0] / len(source)
    variance = squares[0] / len(source) - mean * mean
    wide = source.astype(np.float64)
    assert mean == pytest.approx(wide.mean(), rel=1e-13)
    assert variance == pytest.approx(wide.var(), rel=1e-8)


def test_the_rule_knows_all_three_strategies() -> None:
    """One thread has nothing to share; many threads fold no long rows one after the other."""
    assert reductions.range_strategy(2**22, 1, 64) is RangeStrategy.TREE
    assert reductions.range_strategy(2**22, 64, 4096) is RangeStrategy.HYBRID
    assert reductions.range_strategy(2**22, 64, 2**18) is RangeStrategy.ATOMICS


@pytest.mark.parametrize("shape", [(1, 1), (64, 1), (1009, 1), (2048, 1), (64, 3136), (2048, 49)])
def test_workspaces_are_small_beside_a_large_tensor(shape) -> None:
    """However many threads: a share has four spans at least, a span 256 elements a channel."""
    source_bytes = 4 * 2**24
    for threads in (1, 4, 1000):
        size = reductions.sums_workspace_bytes(2**24, threads, *shape)
        assert size <= 0.08 * source_bytes
    chosen = reductions.range_strategy(2**24, 1, *shape)
    assert reductions.ranges_workspace_bytes(2**24, 1, *shape, chosen) <= 0.01 * source_bytes


def test_flushed_denormals_of_the_caller_change_nothing(cases) -> None:
    source = cases.wild(600_000) * np.float32(2.0**-100)
    expected = reference_reductions.measure_sums(source, 3, 1)
    ranges = reference_reductions.measure_ranges(source, 3, 1)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        found = [Native(cases, threads=threads).measure_sums(source, 3, 1) for threads in (1, 3)]
        measured = Native(cases).measure_ranges(source, 3, 1)
    finally:
        torch.set_flush_denormal(False)
    same_bytes(found[0], expected)
    same_bytes(found[1], expected)
    same_bytes(measured, ranges)


# --- the contract ---------------------------------------------------------------------------

ROOM = np.zeros(4096, np.float64)
AT = ROOM.ctypes.data
GOOD_RANGES = (AT, F32, 256, AT + 2048, AT + 4096, AT + 8192, 1, 1, 1, RangeStrategy.TREE)
GOOD_SUMS = (1, 1, AT + 2048, AT + 4096, AT + 8192)


def test_the_good_calls_are_good() -> None:
    native_calls.measure_ranges(*GOOD_RANGES)
    measure_sums(AT, F32, 256, GOOD_SUMS, 1)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        *((0, 0), (1, 5), (2, -1), (3, 0), (4, -1), (5, 0), (6, 0), (7, 0), (7, 2**32), (8, 0)),
        *((8, 2**63), (9, 3)),
    ],
)
def test_bad_ranges_are_refused(place, value) -> None:
    arguments = list(GOOD_RANGES)
    arguments[place] = value
    with pytest.raises(KernelError, match="asked for"):
        native_calls.measure_ranges(*arguments)


@pytest.mark.parametrize(
    ("place", "value"), [(0, 0), (1, 5), (2, -1), (4, 0), *((3, place) for place in range(5))]
)
def test_bad_sums_are_refused(place, value) -> None:
    arguments = [AT, F32, 256, GOOD_SUMS, 1]
    arguments[place] = value
    if place == 3:
        arguments[3] = tuple(0 if i == value else v for i, v in enumerate(GOOD_SUMS))
    with pytest.raises(KernelError, match="asked for"):
        measure_sums(*arguments)


@pytest.mark.parametrize("shape", [(-1, 1, 1, 1), (1, 0, 1, 1), (1, 1, 0, 1), (1, 1, 1, 0)])
def test_bad_shapes_are_refused(shape) -> None:
    for function in (
        reductions.range_strategy,
        partial(reductions.ranges_workspace_bytes, strategy=TREE),
        reductions.sums_workspace_bytes,
    ):
        with pytest.raises(KernelError, match="asked for"):
            function(*shape)
