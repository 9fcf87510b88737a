"""Ranges of channels, by the native kernels, and the workspaces of theirs and of sums.

Element ``i`` in memory order is of channel ``(i // inner) % channels``; a whole tensor is one.
Addresses, ``threads`` and KernelError are as in ``kernels.cpu.codecs``. Bytes follow section 8 of
``docs/format.md``, whatever the threads, instructions or strategy. A workspace may hold anything.
"""

from torch import Tensor

import daf._native as _native
from daf.kernels import RangeStrategy
from daf.kernels.cpu import checks
from daf.kernels.cpu.job import Job, run


def range_strategy(count: int, threads: int, channels: int = 1, inner: int = 1) -> RangeStrategy:
    """Return the strategy of least predicted time for ``measure_ranges``."""
    _check_shape(count, threads, channels, inner)
    return RangeStrategy(_native.range_strategy(count, channels, inner, threads))


def ranges_workspace_bytes(
    count: int, threads: int, channels: int, inner: int, strategy: RangeStrategy
) -> int:
    """Return the workspace bytes of ``measure_ranges``."""
    _check_shape(count, threads, channels, inner)
    checks.check_member("strategy", strategy, tuple(RangeStrategy))
    return int(_native.ranges_workspace_bytes(count, channels, inner, threads, int(strategy)))


def sums_workspace_bytes(count: int, threads: int, channels: int = 1, inner: int = 1) -> int:
    """Return the workspace bytes of a job with ``sums``."""
    _check_shape(count, threads, channels, inner)
    return int(_native.sums_workspace_bytes(count, channels, inner, threads))


def measure_ranges(job: Job, least: Tensor, greatest: Tensor, strategy: RangeStrategy) -> None:
    """Write the least and the greatest element of each of the job's channels, float32.

    -0 is less than +0. A channel with a NaN has the canonical NaN for both; an empty one has +inf
    and -inf. ``strategy`` does not change the results.
    """
    checks.check_member("strategy", strategy, tuple(RangeStrategy))
    checks.check_places(least=least, greatest=greatest, workspace=job.workspace)
    more = (least.data_ptr(), greatest.data_ptr(), int(strategy))
    run(lambda *call: _native.measure_ranges(*call, *more), job, "source")


def rows_workspace_bytes(count: int, length: int, threads: int) -> int:
    """Return the workspace bytes of backward for ``count`` elements in rows of ``length``."""
    checks.check_call(count, threads)
    checks.check_row_length(count, length)
    return int(_native.rows_workspace_bytes(count, length, threads))


def _check_shape(count: int, threads: int, channels: int, inner: int) -> None:
    checks.check_call(count, threads)
    checks.check_channels(channels, inner)
