"""A made-up GPU: the process's own account stands for a device's caching allocator.

A model on the processor then allocates "there". What PyTorch's functions for CUDA promise is kept
(``torch.cuda.memory``): a limit is a share of the device, cached blocks go back before an
allocation is refused, peaks begin anew all at once, and nothing calls back. Times are real, so
``waits`` only counts who waited for the device.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Unpack

from daf.memory.device_memory import DeviceMemory
from daf.memory.recycling_allocator import RecyclingAllocator
from daf.memory.statistics import reset_peaks, stats
from daf.pool.store import PlainStore, PlaneOptions, Planes

NOBODY_S_BYTES = 256 * 2**20


class SimulatedMemory(DeviceMemory):
    """Its allocator refuses in words of its own."""

    def is_refusal(self, error: BaseException, refusals_before: int) -> bool:
        """PyTorch's for the processor."""
        is_theirs = "can't allocate memory" in str(error)
        return is_theirs or super().is_refusal(error, refusals_before)


class SimulatedDevice:
    """What ``torch.cuda`` offers of one device, while it is entered."""

    def __init__(self, total_bytes: int = 8 * 2**30) -> None:
        self.total_bytes = total_bytes
        self.others_bytes = 0  # held by other processes
        self.share = 1.0
        self.shares: list[float] = []
        self.waits = 0
        self.trims = 0
        self._highest_bytes = 0
        self._allocator = RecyclingAllocator()

    def __enter__(self) -> SimulatedDevice:
        self._allocator.__enter__()
        self._allocator.trim()
        found = stats()
        self._before_bytes = found["held_bytes.current"]
        self._live_before_bytes = found["live_bytes.current"] + found["external_bytes.current"]
        self._refusals_before = found["refusals"]
        reset_peaks()
        return self

    def __exit__(self, *_error: object) -> None:
        self._allocator.__exit__(None, None, None)

    @property
    def highest_bytes(self) -> int:
        """The most that was ever reserved."""
        return max(self._highest_bytes, self.max_memory_reserved(None))

    def forget_highest(self) -> None:
        """From now on ``highest_bytes`` is told of."""
        self._highest_bytes = 0
        reset_peaks()

    # --- as in torch.cuda -------------------------------------------------------------------

    def memory_reserved(self, _device: Any) -> int:
        return stats()["held_bytes.current"] - self._before_bytes

    def max_memory_reserved(self, _device: Any) -> int:
        return stats()["held_bytes.peak"] - self._before_bytes

    def memory_allocated(self, _device: Any) -> int:
        found = stats()
        live = found["live_bytes.current"] + found["external_bytes.current"]
        return live - self._live_before_bytes

    def max_memory_allocated(self, _device: Any) -> int:
        found = stats()
        live = found["live_bytes.peak"] + found["external_bytes.peak"]
        return live - self._live_before_bytes

    def memory_stats(self, _device: Any) -> dict[str, Any]:
        return {"num_ooms": stats()["refusals"] - self._refusals_before}

    def reset_peak_memory_stats(self, _device: Any) -> None:
        self._highest_bytes = self.highest_bytes
        reset_peaks()

    def get_per_process_memory_fraction(self, _device: Any) -> float:
        return self.share

    def set_per_process_memory_fraction(self, fraction: float, _device: Any) -> None:
        assert 0 <= fraction <= 1
        self.share = fraction
        self.shares.append(fraction)
        limit_bytes = self._before_bytes + int(fraction * self.total_bytes)
        self._allocator.limit_bytes = None if fraction == 1.0 else limit_bytes

    def empty_cache(self) -> None:
        self.trims += 1
        self._allocator.trim()

    def current_device(self) -> int:
        return 0

    def get_device_properties(self, _device: Any) -> SimpleNamespace:
        return SimpleNamespace(total_memory=self.total_bytes)

    def mem_get_info(self, _device: Any) -> tuple[int, int]:
        """Some of the device is nobody's to take."""
        total = self.total_bytes - NOBODY_S_BYTES
        return total - self.others_bytes - self.memory_reserved(None), total

    def synchronize(self, _device: Any) -> None:
        self.waits += 1


class WatchedStore(PlainStore):
    """A plain store that remembers the most bytes that it held."""

    peak_bytes = 0

    def allocate_planes(self, count: int, bits: int, **options: Unpack[PlaneOptions]) -> Planes:
        planes = super().allocate_planes(count, bits, **options)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return planes
