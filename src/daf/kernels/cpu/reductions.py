"""Ranges and sums of a tensor or of each of its channels, by the native kernels.

Element ``i`` in memory order is of channel ``(i // inner) % channels``; a whole tensor is one
channel. Addresses, ``threads`` and errors are as in ``daf.kernels.cpu.paged``. The bytes follow
section 8 of ``docs/format.md``, whatever the threads, instruction set or strategy. A workspace may
lie anywhere and hold anything.
"""

from __future__ import annotations

import daf._native as _native
from daf.core.code_format import ElementType
from daf.core.errors import KernelError
from daf.kernels import ChannelSums, RangeStrategy
from daf.kernels.cpu.checks import check_call, check_channels, check_member, check_pointer
from daf.kernels.cpu.job import Job, run

_BY_THE_RULE = -1


def range_strategy(count: int, threads: int, channels: int = 1, inner: int = 1) -> RangeStrategy:
    """Return the strategy that ``measure_ranges`` takes by default."""
    _check_shape(count, threads, channels, inner)
    return RangeStrategy(_native.range_strategy(count, channels, inner, threads))


def ranges_workspace_bytes(
    count: int,
    threads: int,
    channels: int = 1,
    inner: int = 1,
    strategy: RangeStrategy | None = None,
) -> int:
    """Return the workspace bytes of ``measure_ranges``."""
    _check_shape(count, threads, channels, inner)
    number = _strategy_number(strategy)
    size_bytes: int = _native.ranges_workspace_bytes(count, channels, inner, threads, number)
    return size_bytes


def sums_workspace_bytes(count: int, threads: int, channels: int = 1, inner: int = 1) -> int:
    """Return the workspace bytes of ``measure_sums``."""
    _check_shape(count, threads, channels, inner)
    size_bytes: int = _native.sums_workspace_bytes(count, channels, inner, threads)
    return size_bytes


def measure_ranges(
    source: int,
    element_type: ElementType,
    count: int,
    least: int,
    greatest: int,
    workspace: int,
    threads: int,
    channels: int = 1,
    inner: int = 1,
    strategy: RangeStrategy | None = None,
) -> None:
    """Write the least and the greatest element of each channel, ``channels`` float32 each.

    -0 is less than +0. A channel with a NaN has the canonical NaN for both; an empty one has +inf
    and -inf. ``strategy`` (None: that of ``range_strategy``) does not change the results.
    """
    check_channels(channels, inner)
    places = (least, greatest, workspace)
    for name, address in zip(("least", "greatest", "workspace"), places, strict=True):
        check_pointer(name, address)
    more = (channels, inner, *places, _strategy_number(strategy))
    job = Job(threads, count, element_type, source)
    run(lambda *call: _native.measure_ranges(*call, *more), job, "source")


def measure_sums(
    source: int, element_type: ElementType, count: int, sums: ChannelSums, threads: int
) -> None:
    """Write the sum and the sum of squares of each channel as float64, in the format's order.

    NaN and infinities follow float64 arithmetic; NaN is canonical.
    """
    run(_native.read_blocks, Job(threads, count, element_type, source, sums=sums), "source")


def mean_and_variance(total: float, squares: float, count: int) -> tuple[float, float]:
    """Return mean and (biased) variance of ``count`` numbers from their sum and sum of squares.

    ``variance = max(squares / count - mean², 0)`` in float64. Its relative error is about 2⁻⁵² · (1
    + mean² / variance) times the length of the longest chain of additions. Float32 numbers have 24
    bits, so float64 has bits to spare for the cancellation.

    Raises:
        KernelError: there are no numbers.
    """
    if count < 1:
        raise KernelError(f"asked for the mean of {count} numbers; the least is 1")
    mean = total / count
    return mean, max(squares / count - mean * mean, 0.0)


def _check_shape(count: int, threads: int, channels: int, inner: int) -> None:
    check_call(count, threads)
    check_channels(channels, inner)


def _strategy_number(strategy: RangeStrategy | None) -> int:
    if strategy is None:
        return _BY_THE_RULE
    check_member("strategy", strategy, tuple(RangeStrategy))
    return int(strategy)
