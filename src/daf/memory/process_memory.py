"""The memory of this process, now and at its peak (design, section 1).

On Linux ``VmRSS`` and ``VmHWM`` of ``/proc/self/status``, reset through ``/proc/self/clear_refs``,
and ``VmSwap``: swapped bytes still count (boards compress them in their memory, as zram). Elsewhere
psutil's resident size and its largest sample, which misses what is between (``peak_is_exact``).
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Self

import psutil
import torch

from daf._native import allocator

CPU = torch.device("cpu")
_STATUS = Path("/proc/self/status")
_HAS_STATUS = _STATUS.exists()
_CLEAR_REFERENCES = Path("/proc/self/clear_refs")
_MOST_READ = 1 << 14
_RESET_PEAK_COMMAND = b"5"  # proc(5): reset the peak resident set size


def field_bytes(content: bytes, field: str, path: Path) -> int:
    """Return a field of a file of ``/proc`` that counts KiB; OSError if it lacks."""
    start = content.find(f"\n{field}:".encode())  # the first line is no field of bytes
    if start < 0:
        raise OSError(f"{path} has no field {field}")
    return int(content[start + len(field) + 2 : content.index(b"kB", start)]) * 1024


@lru_cache(maxsize=1)
def _open_status(_process: int) -> int:
    """Return a descriptor of this process's own status: to open it costs five times a reading."""
    return os.open(_STATUS, os.O_RDONLY)


def _own_bytes(*fields: str) -> list[int]:
    try:
        content = os.pread(_open_status(os.getpid()), _MOST_READ, 0)
        return [field_bytes(content, field, _STATUS) for field in fields]
    except OSError:
        content = _STATUS.read_bytes()
        found = [field_bytes(content, field, _STATUS) for field in fields]  # raises again if none
        _open_status.cache_clear()  # else somebody closed all descriptors
        return found


def resident_bytes() -> int:
    """Return this process's resident bytes."""
    return _own_bytes("VmRSS")[0] if _HAS_STATUS else int(psutil.Process().memory_info().rss)


def taken_bytes() -> int:
    """Return the resident and the swapped bytes: what a budget bounds."""
    return sum(_with_swapped("VmRSS")) if _HAS_STATUS else resident_bytes()


def mapped_bytes() -> int:
    """Return the resident bytes of mapped files, libraries' code above all; 0 if unknown."""
    with suppress(OSError):
        return _own_bytes("RssFile")[0] if _HAS_STATUS else 0
    return 0


def drop_code() -> None:
    """Give back libraries' code and constants, in some ms; what is used again is read again."""
    allocator.drop_library_pages()


def peak_is_exact() -> bool:
    """True if the operating system keeps a high-water mark that can be reset."""
    return _HAS_STATUS and _CLEAR_REFERENCES.exists()


def peak_bytes() -> int:
    """Return the most bytes held since ``reset_peak`` (Linux); elsewhere the resident bytes.

    What is swapped out now is added: it was part of no resident peak for certain.
    """
    return peak_and_swapped_bytes()[0]


def peak_and_swapped_bytes() -> tuple[int, int]:
    """Return ``peak_bytes``, and how much the system has swapped out; 0 where it does not say."""
    if not _HAS_STATUS:
        return resident_bytes(), 0
    peak, swapped = _with_swapped("VmHWM")
    return peak + swapped, swapped


def _with_swapped(field: str) -> list[int]:
    try:
        return _own_bytes(field, "VmSwap")
    except OSError:  # the system does not report what it swaps
        return [*_own_bytes(field), 0]


def reset_peak() -> bool:
    """Start a new high-water mark; False where the system does not permit that."""
    try:  # opened anew: a kept descriptor may be somebody else's file by now
        _CLEAR_REFERENCES.write_bytes(_RESET_PEAK_COMMAND)
    except OSError:
        return False
    return True


def soft_limit_bytes(name: str) -> int | None:
    """Return this process's soft limit of ``name`` (``"RLIMIT_AS"``: ``ulimit -v``); None: none."""
    if sys.platform == "win32":
        return None
    import resource  # Unix only

    soft, _ = resource.getrlimit(getattr(resource, name))
    return None if soft == resource.RLIM_INFINITY else soft


def warm_up(device: torch.device = CPU) -> None:
    """Run the floor's operations (design, section 1), which load torch's threads and libraries."""
    images = torch.ones(2, 8, 16, 16, requires_grad=True, device=device)
    weight = torch.ones(8, 8, 3, 3, requires_grad=True, device=device)
    convolved = torch.nn.functional.conv2d(images, weight, padding=1)
    factor = torch.ones(8 * 16 * 16, 4, device=device)
    (convolved.flatten(1) @ factor).sum().backward()  # type: ignore[no-untyped-call]


class MemoryTimeline:
    """Samples the resident size, or ``held_bytes``, on a thread while it is entered."""

    def __init__(
        self, interval_ms: float = 50.0, held_bytes: Callable[[], int] = resident_bytes
    ) -> None:
        self._held_bytes = held_bytes
        self.samples: list[tuple[float, int]] = []  # (seconds since entry, bytes)
        self.marks: list[tuple[float, str]] = []  # (seconds, label) that the caller set
        self._interval_s = interval_ms / 1000.0
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self.start_s = 0.0  # the ``perf_counter`` time of entry

    def __enter__(self) -> Self:
        self.start_s = time.perf_counter()
        self._stopped.clear()
        self._thread = threading.Thread(target=self._sample, name="daf-memory", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
        self._record()

    def mark(self, label: str) -> None:
        """Set a label at this moment."""
        self.marks.append((time.perf_counter() - self.start_s, label))

    def _record(self) -> None:
        self.samples.append((time.perf_counter() - self.start_s, self._held_bytes()))

    def _sample(self) -> None:
        while not self._stopped.wait(self._interval_s):
            self._record()
