"""What the allocator holds and did, like ``torch.cuda.memory_stats`` (docs/allocator.md).

Before an allocator is entered all counts are 0, except those of the pool of codes
(``external_bytes``), which ``held_bytes`` includes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from daf._native import allocator as native
from daf.core.errors import PlatformError
from daf.memory import process_memory

_SMAPS = Path("/proc/self/smaps")
_SMAPS_ROLLUP = Path("/proc/self/smaps_rollup")
_MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) ")


def stats() -> dict[str, int]:
    """Return all counters of the process's account.

    Bytes, with ``.current`` and ``.peak`` (since ``reset_peaks``): ``live_bytes`` (asked for and
    not yet freed), ``held_bytes`` (what the limit bounds: whole pages of large blocks, live and
    recycled, small blocks as glibc rounds them, and ``external_bytes``), ``recycled_bytes``,
    ``small_bytes`` (blocks below 128 KiB), ``external_bytes`` (charged by the pool).

    Counts since the process began: ``allocations``, ``frees`` and ``hits`` of blocks of 128 KiB and
    more, ``assembled`` (from pages of recycled blocks) and ``moved_bytes``, ``resized`` (from a
    recycled block of another size), ``small_allocations``, ``fresh_bytes`` (from the system),
    ``returned_bytes`` and ``returned_blocks`` (to the system), ``emptied_for_limit``, ``reclaims``,
    ``refusals`` (failed allocations), ``overdrafts`` and ``overdraft_bytes`` (served beyond the
    limit: kernels' scratch, whose refusal would be a crash, and small objects).

    ``live_blocks.large`` and ``.small``; ``cap_bytes`` and ``limit_bytes`` if set.
    """
    found: dict[str, int] = dict(native.statistics())
    settings = zip(("cap_bytes", "limit_bytes"), native.settings(), strict=True)
    return found | {name: value for name, value in settings if value is not None}


class PeakWatch:
    """The most bytes live at once while it is entered, whoever restarts the peaks meanwhile."""

    _entered: ClassVar[dict[PeakWatch, None]] = {}

    def __init__(self) -> None:
        self._highest_bytes = 0

    def __enter__(self) -> PeakWatch:
        reset_peaks()
        self._entered[self] = None
        return self

    def __exit__(self, *exception: object) -> None:
        self._entered.pop(self, None)
        self._note()

    @property
    def peak_bytes(self) -> int:
        """The most so far, or until it was left."""
        if self in self._entered:
            self._note()
        return self._highest_bytes

    def _note(self) -> None:
        peak_bytes: int = native.statistics()["live_bytes.peak"]
        self._highest_bytes = max(self._highest_bytes, peak_bytes)


def reset_peaks() -> None:
    """Restart every ``.peak`` from what is held now."""
    for watch in [*PeakWatch._entered]:
        watch._note()
    native.reset_peaks()


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
    """Samples of the resident size: for allocations that do not pass DAF's allocator."""

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


@dataclass(frozen=True, slots=True)
class Audit:
    """The account beside the kernel's figures, in bytes at one moment."""

    resident_bytes: int
    range_resident_bytes: int  # of the allocator's addresses
    held_bytes: int
    large_bytes: int  # resident once all blocks are written

    @property
    def other_bytes(self) -> int:
        """All that is not in the account: interpreter, libraries, data, glibc's free memory."""
        return self.resident_bytes - self.held_bytes

    @property
    def rest_bytes(self) -> int:
        """The same while some blocks are not written yet, and so not resident."""
        outside_range_bytes = self.held_bytes - self.large_bytes
        return self.resident_bytes - self.range_resident_bytes - outside_range_bytes


def audit() -> Audit:
    """Compare the account with ``/proc/self/smaps`` (takes ms); raises PlatformError without it."""
    if not _SMAPS_ROLLUP.exists():
        raise PlatformError(f"asked to audit the account; found no {_SMAPS_ROLLUP}; needs Linux")
    counts = native.statistics()
    held = counts["held_bytes.current"]
    large = held - counts["small_bytes.current"] - counts["external_bytes.current"]
    resident = process_memory.field_bytes(_SMAPS_ROLLUP.read_bytes(), "Rss", _SMAPS_ROLLUP)
    return Audit(resident, _range_bytes(*native.address_range()), held, large)


def _range_bytes(first: int, size: int) -> int:
    total, inside = 0, False
    with _SMAPS.open() as lines:
        for line in lines:
            if mapping := _MAPPING.match(line):
                inside = first <= int(mapping[1], 16) < first + size
            elif inside and line.startswith("Rss:"):
                total += int(line.split()[1]) * 1024
    return total
