"""Ctrl-C and SIGTERM between steps instead of within them."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class InterruptWatch:
    """A main-thread context: a first SIGINT or SIGTERM sets ``requested``, a second interrupts."""

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> InterruptWatch:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.requested:
            raise KeyboardInterrupt(signal.Signals(number).name)
        self.requested = True
