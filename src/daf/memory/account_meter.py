"""Peaks of live memory between moments of one step.

Exact where PyTorch's allocations pass DAF's allocator. Elsewhere the resident size is sampled at
each moment, and all are raised by what the samples missed of the operating system's peak.
"""

from __future__ import annotations

from typing import Protocol

from daf._native import allocator as native
from daf.memory import process_memory


class Meter(Protocol):
    """Measures peaks: ``begin``, ``take_peak`` at the end of every moment, ``finish``."""

    @property
    def is_exact(self) -> bool:
        """True if peaks are counted, not sampled."""

    def begin(self) -> None:
        """Take what is live now as the level that peaks are counted from."""

    def take_peak(self) -> int:
        """Return the peak (bytes above that level) since the last call."""

    def finish(self, peaks: list[int]) -> None:
        """Correct the peaks in place, if they are known better now."""


class AccountMeter:
    """Peaks of the allocator's account."""

    is_exact = True

    def __init__(self) -> None:
        self._level = 0

    def begin(self) -> None:
        """Take what is live now as the level."""
        self._level = int(native.statistics()["live_bytes.current"])
        native.reset_peaks()

    def take_peak(self) -> int:
        """Return the exact peak (bytes above the level) since the last call."""
        peak = int(native.statistics()["live_bytes.peak"])
        native.reset_peaks()
        return peak - self._level

    def finish(self, peaks: list[int]) -> None:
        """Do nothing: the peaks are exact."""


class ResidentMeter:
    """Samples of the resident size."""

    is_exact = False

    def __init__(self) -> None:
        self._level = 0

    def begin(self) -> None:
        """Take what is resident now as the level."""
        process_memory.reset_peak()
        self._level = process_memory.resident_bytes()

    def take_peak(self) -> int:
        """Return what is resident now (bytes above the level)."""
        return process_memory.resident_bytes() - self._level

    def finish(self, peaks: list[int]) -> None:
        """Raise all peaks by what the samples missed of the highest."""
        missed = process_memory.peak_bytes() - self._level - max(peaks, default=0)
        if missed > 0:
            peaks[:] = [peak + missed for peak in peaks]


def open_meter() -> Meter:
    """Return the best meter available now."""
    return AccountMeter() if native.is_installed() else ResidentMeter()
