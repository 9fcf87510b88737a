"""Memory pressure: how long tasks stall for want of memory (the kernel's PSI, accounting/psi.rst).

A trigger wakes the watcher at a threshold where the kernel permits it; else counters are sampled.
"""

import os
from collections import deque
from contextlib import suppress

from daf.budget.cgroups import memory_groups
from daf.budget.system import System

# A person notices a tenth of a second lost per second; unprivileged triggers have windows of 2 s.
STALLED_SHARE = 0.10
WINDOW_S = 1.0
TRIGGER_WINDOW_US = 2_000_000
_MICROSECONDS = 1e6


def pressure_files(system: System) -> tuple[str, ...]:
    """Return the pressure files that concern this process: the machine's and its groups'."""
    groups = (str(each.path / "memory.pressure") for each in memory_groups(system))
    candidates = ("/proc/pressure/memory", *groups)
    return tuple(path for path in candidates if system.read(path) is not None)


def stalled_us(text: str) -> int:
    """Return the microseconds of the ``some`` line: at least one task stalled."""
    for line in text.splitlines():
        kind, *fields = line.split()
        if kind == "some":
            return int(dict(field.split("=") for field in fields)["total"])
    return 0


class PressureSampler:
    """The share of the last second lost to stalls, from sampled counters."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._paths = pressure_files(system)
        self._samples: deque[tuple[float, int]] = deque()

    def share(self, now_s: float) -> float:
        """Return the share (0 … 1) since about a second before ``now_s``; 0 at first."""
        readings = (self._system.read(path) for path in self._paths)
        total = max((stalled_us(text) for text in readings if text), default=0)
        self._samples.append((now_s, total))
        while len(self._samples) > 2 and self._samples[1][0] <= now_s - WINDOW_S:
            self._samples.popleft()
        start_s, before = self._samples[0]
        # A look-back shorter than the window counts as the window.
        return max(0, total - before) / _MICROSECONDS / max(WINDOW_S, now_s - start_s)


def open_triggers(system: System) -> list[int]:
    """Open triggers, signalled by POLLPRI, none if the kernel refuses. The caller closes them."""
    stall_us = int(STALLED_SHARE * TRIGGER_WINDOW_US)
    order = f"some {stall_us} {TRIGGER_WINDOW_US}\0".encode()
    opened = []
    for path in pressure_files(system):
        with suppress(OSError):
            descriptor = os.open(system.place(path), os.O_RDWR | getattr(os, "O_NONBLOCK", 0))
            try:
                os.write(descriptor, order)
            except OSError:
                os.close(descriptor)
            else:
                opened.append(descriptor)
    return opened


class Backoff:
    """The share of a budget ceded under pressure; slow to fall, lest processes chase each other."""

    STEP = 0.05
    MOST = 0.5
    PRESSED_AGAIN_S = 1.0
    QUIET_S = 10.0

    def __init__(self) -> None:
        self.share = 0.0
        self._changed_s = float("-inf")
        self._pressed_s = float("-inf")

    def note(self, pressed: bool, now_s: float) -> float:
        """Record whether memory is under pressure; return the share to cede (0 … 0.5)."""
        if pressed:
            self._pressed_s = now_s
            if now_s - self._changed_s >= self.PRESSED_AGAIN_S:
                self._move(self.STEP, now_s)
        elif self.share and now_s - max(self._changed_s, self._pressed_s) >= self.QUIET_S:
            self._move(-self.STEP, now_s)
        return self.share

    def _move(self, by: float, now_s: float) -> None:
        self.share = round(min(self.MOST, max(0.0, self.share + by)), 6)
        self._changed_s = now_s
