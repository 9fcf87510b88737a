"""A store that drops records anywhere, without a wait: the lock's next holder forgets them."""

import threading
from abc import ABC, abstractmethod
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class RecordStore(ABC, Generic[T]):
    """The lock, the bytes and the ends of records that the stores on disk and on the host share."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._dropped: deque[T] = deque()
        self._stored_bytes, self.stored_peak_bytes = 0, 0
        self.taken_bytes = 0  # in total

    @property
    def stored_bytes(self) -> int:
        """Bytes of live records, on the disk or the host (or on their way to the host)."""
        with self._lock:
            self._drain()
            return self._stored_bytes

    def reset_peak(self) -> None:
        """Restart the peak from what is stored now."""
        self.stored_peak_bytes = self.stored_bytes

    def _store(self, nbytes: int) -> None:
        self._stored_bytes += nbytes
        self.stored_peak_bytes = max(self.stored_peak_bytes, self._stored_bytes)

    def drop(self, record: T) -> None:
        """Queue a record that nobody holds any more; never waits."""
        self._dropped.append(record)
        if self._lock.acquire(blocking=False):
            try:
                self._drain()
            finally:
                self._lock.release()

    def _drain(self) -> None:
        """Forget the dropped records; the caller has the lock."""
        while self._dropped:
            self._forget(self._dropped.popleft())

    @abstractmethod
    def _forget(self, record: T) -> None:
        """Stop counting a record; the caller has the lock."""
