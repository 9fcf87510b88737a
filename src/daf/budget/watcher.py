"""The thread that reads the limits while a step runs."""

import os
import select
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

Look = Callable[[bool], float]  # takes whether a trigger woke it; returns seconds to the next


class Watcher:
    """A daemon thread that calls a bound method until closed or until its owner is gone.

    ``look`` is held weakly. POLLPRI on a descriptor in ``triggers``, closed at the end, wakes it.
    """

    def __init__(self, look: Look, triggers: list[int]) -> None:
        self._look: Any = weakref.WeakMethod(look)
        self._stopped = threading.Event()
        self._process = os.getpid()
        self._descriptors = ExitStack()
        for descriptor in triggers:
            self._descriptors.callback(os.close, descriptor)
        self._wake: Callable[[], object] = self._stopped.set
        self._wait = self._waiter(triggers)
        self._thread = threading.Thread(target=self._run, name="daf-governor", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """True if the thread runs in this process; a fork does not copy threads."""
        return self._process == os.getpid() and self._thread.is_alive()

    def close(self) -> None:
        """End the thread and wait for it."""
        self._stopped.set()
        if self.is_alive:
            self._wake()
            if threading.current_thread() is not self._thread:
                self._thread.join()
        self._descriptors.close()

    def _run(self) -> None:
        wait_s, woken = 0.0, False
        while not self._stopped.is_set():
            if (look := self._look()) is None:
                return
            wait_s = look(woken)
            del look  # while waiting, the thread must not keep its owner alive
            woken = self._wait(wait_s)

    def _waiter(self, triggers: list[int]) -> Callable[[float], bool]:
        if not triggers:
            return self._stopped.wait  # True once closed, when nobody looks any more
        poll = select.poll()
        ear, mouth = os.pipe()
        self._descriptors.callback(os.close, ear)
        self._descriptors.callback(os.close, mouth)
        self._wake = lambda: os.write(mouth, b"\0")
        poll.register(ear, select.POLLIN)
        for descriptor in triggers:
            poll.register(descriptor, select.POLLPRI)

        def wait(seconds: float) -> bool:
            urgent = False
            for descriptor, event in poll.poll(1000 * seconds):
                if not event & (select.POLLPRI | select.POLLIN):
                    poll.unregister(descriptor)  # its group is gone: it would stay readable
                urgent |= bool(event & select.POLLPRI)
            return urgent

        return wait
