"""What a normalisation computes of its channels' sums: the oracle's bytes, and PyTorch's."""

from __future__ import annotations

import daf._native as native
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import channel_norm as reference_norm
from reference.reductions import Sums
from torch import nn

from daf.kernels.cpu.backend import CpuBackend
from daf.kernels.normalisation import Geometry, RunningStatistics

any_float = st.floats(width=64, allow_nan=True, allow_infinity=True)
single = st.floats(width=32, allow_nan=True, allow_infinity=True)


def same_bytes(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.dtype == expected.dtype == np.float32
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


class Written:
    """Room between guards, which must stay as they are."""

    def __init__(self, channels: int, content: np.ndarray | None = None) -> None:
        self._all = np.full(channels + 2, -7.0, np.float32)
        self._all[1:-1] = 3.0 if content is None else content
        self.address = int(self._all[1:].ctypes.data)

    def opened(self) -> np.ndarray:
        assert self._all[0] == self._all[-1] == -7.0
        return self._all[1:-1]


def statistics(sums: Sums, count: int, epsilon: float, rooms, running=None) -> None:
    read = (sums.sums.ctypes.data, sums.squares.ctypes.data)
    where = (*read, *(room.address for room in rooms))
    native.statistics_of_sums(len(sums.sums), count, epsilon, where, running)


def sums_of(pairs: list[tuple[float, float]]) -> Sums:
    both = np.array(pairs, np.float64).T.copy()
    return Sums(both[0].copy(), both[1].copy())


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(any_float, any_float, single, single), min_size=1, max_size=40),
    st.integers(2, 2**40),
    st.sampled_from((0.0, 1e-5, 0.1)),
    st.floats(0, 1),
)
def test_statistics_are_the_oracle_s(rows, count, epsilon, momentum) -> None:
    sums, channels = sums_of([row[:2] for row in rows]), len(rows)
    before = np.array([row[2:] for row in rows], np.float32).T.copy()
    expected = reference_norm.statistics_of_sums(
        sums, count, epsilon, (before[0], before[1]), momentum
    )
    rooms = [Written(channels), Written(channels), *(Written(channels, each) for each in before)]
    running = (rooms[2].address, rooms[3].address, momentum)
    statistics(sums, count, epsilon, rooms[:2], running)
    for room, wanted in zip(rooms, expected, strict=True):
        same_bytes(room.opened(), wanted)
    alone = [Written(channels), Written(channels)]
    statistics(sums, count, epsilon, alone)
    for room, wanted in zip(alone, expected[:2], strict=True):
        same_bytes(room.opened(), wanted)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(any_float, any_float, single, single), min_size=1, max_size=40),
    st.integers(1, 2**40),
    st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
def test_factors_are_the_oracle_s(rows, count, given_) -> None:
    has_gamma, wants_gamma, wants_beta = given_
    sums, channels = sums_of([row[:2] for row in rows]), len(rows)
    deviation, gamma = np.array([row[2:] for row in rows], np.float32).T.copy()
    expected = reference_norm.factors_of_sums(sums, count, deviation, gamma if has_gamma else None)
    rooms = [Written(channels) for _ in range(5)]
    wanted = (True, True, True, wants_gamma, wants_beta)
    at = [
        room.address if is_wanted else None for room, is_wanted in zip(rooms, wanted, strict=True)
    ]
    read = (sums.sums.ctypes.data, sums.squares.ctypes.data, deviation.ctypes.data)
    factors = (*read, gamma.ctypes.data if has_gamma else None, *at)
    native.factors_of_sums(channels, count, factors)
    for room, result, is_wanted in zip(rooms, expected, wanted, strict=True):
        same_bytes(room.opened(), result if is_wanted else np.full(channels, 3.0, np.float32))


def test_flushing_denormals_changes_nothing() -> None:
    sums = sums_of([(1e-41, 1e-41), (-3e-40, 2e-39)])
    expected = reference_norm.statistics_of_sums(sums, 1, 0.0)
    rooms = [Written(2), Written(2)]
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush denormals")
    try:
        statistics(sums, 1, 0.0, rooms)
    finally:
        torch.set_flush_denormal(False)
    for room, wanted in zip(rooms, expected[:2], strict=True):
        same_bytes(room.opened(), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_running_statistics_are_pytorch_s_whatever_its_default_number_is(dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 5, 6, 6) * 3 + 7
    plain = nn.BatchNorm2d(5, momentum=0.3)
    mean, variance = torch.zeros(5), torch.ones(5)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        for _ in range(3):
            found = CpuBackend().channel_statistics(
                x, Geometry(5, 36, x.numel()), 1e-5, RunningStatistics(mean, variance, 0.3)
            )
    finally:
        torch.set_default_dtype(before)
    for _ in range(3):
        plain(x)
    torch.testing.assert_close(mean, plain.running_mean)
    torch.testing.assert_close(variance, plain.running_var)
    assert {each.dtype for each in found} == {torch.float32}
    assert mean._version == variance._version == 0  # as after PyTorch's own
    exact = x.double().transpose(0, 1).flatten(1)
    torch.testing.assert_close(found.mean.double(), exact.mean(1), rtol=1e-6, atol=0)
    deviation = (exact.var(1, unbiased=False) + 1e-5).rsqrt()
    torch.testing.assert_close(found.inverse_deviation.double(), deviation, rtol=1e-6, atol=0)
