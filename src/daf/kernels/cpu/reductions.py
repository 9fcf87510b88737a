"""Ranges and sums of channels, and what normalisations make of the sums, by the native kernels.

Element ``i`` in memory order is of channel ``(i // inner) % channels``; a whole tensor is one
channel. Addresses, ``threads`` and KernelError are as in ``daf.kernels.cpu.codecs``. The bytes
follow section 8 of ``docs/format.md``, whatever the threads, instruction set or strategy. A
workspace may lie anywhere and hold anything.
"""

from __future__ import annotations

from typing import Any

import daf._native as _native
from daf.core.code_format import ElementType
from daf.core.errors import KernelError
from daf.kernels import ChannelSums, GradientFactors, RangeStrategy, RunningMoments
from daf.kernels.cpu.checks import (
    check_call,
    check_channels,
    check_member,
    check_pointer,
    check_row_length,
)
from daf.kernels.cpu.codecs import read
from daf.kernels.cpu.job import Job, run

_OPTIONAL_FACTORS = ("gamma_pointer", "of_gamma_pointer", "of_beta_pointer")


def range_strategy(count: int, threads: int, channels: int = 1, inner: int = 1) -> RangeStrategy:
    """Return the strategy of least predicted time for ``measure_ranges``."""
    _check_shape(count, threads, channels, inner)
    return RangeStrategy(_native.range_strategy(count, channels, inner, threads))


def ranges_workspace_bytes(
    count: int, threads: int, channels: int, inner: int, strategy: RangeStrategy
) -> int:
    """Return the workspace bytes of ``measure_ranges``."""
    _check_shape(count, threads, channels, inner)
    check_member("strategy", strategy, tuple(RangeStrategy))
    return int(_native.ranges_workspace_bytes(count, channels, inner, threads, int(strategy)))


def sums_workspace_bytes(count: int, threads: int, channels: int = 1, inner: int = 1) -> int:
    """Return the workspace bytes of ``measure_sums``."""
    _check_shape(count, threads, channels, inner)
    return int(_native.sums_workspace_bytes(count, channels, inner, threads))


def measure_ranges(
    source: int,
    element_type: ElementType,
    count: int,
    least: int,
    greatest: int,
    workspace: int,
    threads: int,
    channels: int,
    inner: int,
    strategy: RangeStrategy,
) -> None:
    """Write the least and the greatest element of each channel, ``channels`` float32 each.

    -0 is less than +0. A channel with a NaN has the canonical NaN for both; an empty one has +inf
    and -inf. ``strategy`` does not change the results.
    """
    check_channels(channels, inner)
    check_member("strategy", strategy, tuple(RangeStrategy))
    places = (least, greatest, workspace)
    _check_pointers(("least", "greatest", "workspace"), places)
    more = (channels, inner, *places, int(strategy))
    job = Job(threads, count, element_type, source)
    run(lambda *call: _native.measure_ranges(*call, *more), job, "source")


def measure_sums(
    source: int, element_type: ElementType, count: int, sums: ChannelSums, threads: int
) -> None:
    """Write float64 sums and sums of squares of channels in the format's order; canonical NaN."""
    read(Job(threads, count, element_type, source, sums=sums))


def statistics_of_sums(
    sums: ChannelSums,
    count: int,
    epsilon: float,
    mean: int,
    inverse_deviation: int,
    running: RunningMoments | None = None,
) -> None:
    """Write mean and inverse deviation, float32; ``running`` follow by the unbiased variance.

    The variance ``max(squares / count - mean², 0)`` is float64's. Its relative error is about 2⁻⁵²
    · (1 + mean² / variance) times the longest chain of additions: of float32's 24 bits none is lost
    to cancellation. ``count`` is at least 1 (2 with ``running``).
    """
    fewest = 1 if running is None else 2
    if count < fewest:
        raise KernelError(f"asked for statistics of {count} elements; the least is {fewest}")
    check_channels(sums.channels, sums.inner)
    where = (sums.sums_pointer, sums.squares_pointer, mean, inverse_deviation)
    _check_pointers(("sums", "squares", "mean", "deviation"), where)
    if running is not None:
        _check_pointers(("running mean", "running variance"), running[:2])
    _native.statistics_of_sums(sums.channels, count, epsilon, where, running)


def factors_of_sums(channels: int, count: int, factors: GradientFactors) -> None:
    """Write backward's second factors from its first sums, of channels of ``count`` >= 1."""
    check_channels(channels, 1)
    if count < 1:
        raise KernelError(f"asked for factors of {count} elements; the least is 1")
    for name, address in zip(factors._fields, factors, strict=True):
        if address or name not in _OPTIONAL_FACTORS:
            check_pointer(name, address)
    _native.factors_of_sums(channels, count, factors)


def rows_workspace_bytes(count: int, length: int, threads: int) -> int:
    """Return the workspace bytes of backward for ``count`` elements in rows of ``length``."""
    check_call(count, threads)
    check_row_length(count, length)
    return int(_native.rows_workspace_bytes(count, length, threads))


def _check_pointers(names: tuple[str, ...], addresses: tuple[Any, ...]) -> None:
    for name, address in zip(names, addresses, strict=True):
        check_pointer(name, address)


def _check_shape(count: int, threads: int, channels: int, inner: int) -> None:
    check_call(count, threads)
    check_channels(channels, inner)
