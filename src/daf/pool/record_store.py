"""A store whose records anybody may be the last to hold.

The last reference may go anywhere: on any thread, in the garbage collector, also where the
store's own lock is held. So dropping never waits; whoever holds the lock next forgets them.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class RecordStore(ABC, Generic[T]):
    """What the stores of records on disk and on the host have in common: a lock, and ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._dropped: deque[T] = deque()

    def drop(self, record: T) -> None:
        """Nobody holds the record any more. Never waits."""
        self._dropped.append(record)
        if self._lock.acquire(blocking=False):
            try:
                self._drain()
            finally:
                self._lock.release()

    def _drain(self) -> None:
        """Forget those that nobody holds; the caller has the lock."""
        while self._dropped:
            self._forget(self._dropped.popleft())

    @abstractmethod
    def _forget(self, record: T) -> None:
        """Nothing of it is counted from here on; the caller has the lock."""
