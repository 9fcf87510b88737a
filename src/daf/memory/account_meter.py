"""The peak of what is alive between two moments of one step.

Where PyTorch's allocations pass our allocator its account knows that to the
byte. Elsewhere only the resident size is known at each moment, and the highest
of all from the operating system; every moment is then raised by what the
samples missed of it.
"""

from __future__ import annotations

from typing import Protocol

from daf._native import allocator as native
from daf.memory import process_memory


class Meter(Protocol):
    """Begin it, take a peak at the end of every moment, and finish it."""

    @property
    def is_exact(self) -> bool:
        """Are peaks counted, not sampled?"""

    def begin(self) -> None:
        """What is alive now is the level that peaks are counted from."""

    def take_peak(self) -> int:
        """The peak (bytes above that level) since the last call."""

    def finish(self, peaks: list[int]) -> None:
        """Correct the peaks that were taken, in place, if they can be known better now."""


class AccountMeter:
    """Reads the allocator's account."""

    is_exact = True

    def __init__(self) -> None:
        self._level = 0

    def begin(self) -> None:
        """The level is what is alive now."""
        self._level = int(native.statistics()["live_bytes.current"])
        native.reset_peaks()

    def take_peak(self) -> int:
        """Exact."""
        peak = int(native.statistics()["live_bytes.peak"])
        native.reset_peaks()
        return peak - self._level

    def finish(self, peaks: list[int]) -> None:
        """There is nothing to correct."""


class ResidentMeter:
    """Samples the resident size."""

    is_exact = False

    def __init__(self) -> None:
        self._level = 0

    def begin(self) -> None:
        """The level is what is resident now."""
        process_memory.reset_peak()
        self._level = process_memory.resident_bytes()

    def take_peak(self) -> int:
        """What is resident now."""
        return process_memory.resident_bytes() - self._level

    def finish(self, peaks: list[int]) -> None:
        """Raise all by what the samples missed of the highest."""
        missed = process_memory.peak_bytes() - self._level - max(peaks, default=0)
        if missed > 0:
            peaks[:] = [peak + missed for peak in peaks]


def open_meter() -> Meter:
    """The best meter that there is now."""
    return AccountMeter() if native.is_installed() else ResidentMeter()
