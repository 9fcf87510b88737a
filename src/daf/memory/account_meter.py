"""Peaks of live memory between moments of one step.

Exact where PyTorch's allocations pass DAF's allocator. Elsewhere the resident size is sampled at
each moment, and all are raised by what the samples missed of the operating system's peak.
"""

from __future__ import annotations

from collections.abc import Callable

from daf._native import allocator as native
from daf.memory import process_memory
from daf.memory.statistics import reset_peaks


class Meter:
    """Exact peaks of live bytes: ``begin``, then ``take_peak`` after every moment."""

    is_exact = True

    def __init__(self, live_bytes: Callable[[], int], take_peak_bytes: Callable[[], int]) -> None:
        self._live_bytes = live_bytes
        self._take_peak_bytes = take_peak_bytes  # returns the peak and starts a new one
        self._level = 0

    def begin(self) -> None:
        """Take what is live now as the level that peaks are counted from."""
        self._take_peak_bytes()
        self._level = self._live_bytes()

    def take_peak(self) -> int:
        """Return the peak (bytes above the level) since the last call."""
        return self._take_peak_bytes() - self._level

    def finish(self, peaks: list[int]) -> None:
        """Correct the peaks in place, if they are known better now."""


class ResidentMeter(Meter):
    """Samples of the resident size."""

    is_exact = False

    def __init__(self) -> None:
        super().__init__(process_memory.resident_bytes, process_memory.resident_bytes)

    def begin(self) -> None:
        process_memory.reset_peak()
        self._level = self._live_bytes()

    def finish(self, peaks: list[int]) -> None:
        """Raise all peaks by what the samples missed of the highest."""
        missed = process_memory.peak_bytes() - self._level - max(peaks, default=0)
        if missed > 0:
            peaks[:] = [peak + missed for peak in peaks]


def open_meter() -> Meter:
    """Return the best meter available now."""
    if not native.is_installed():
        return ResidentMeter()
    return Meter(lambda: int(native.statistics()["live_bytes.current"]), _take_peak_bytes)


def _take_peak_bytes() -> int:
    peak = int(native.statistics()["live_bytes.peak"])
    reset_peaks()
    return peak
