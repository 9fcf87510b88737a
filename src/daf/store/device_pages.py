"""Pages of one device region whose frees follow streams.

A page freed while a stream may still read it goes back into use at once on that
stream (work there comes later in order), and on another only when the event
recorded at the free has passed. Nothing waits for the device. Streams are any
objects that compare, events any with ``query()``: PyTorch's, or a model's.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable, Sequence
from typing import Protocol

from daf.errors import KernelError, PoolFullError


class Event(Protocol):
    """What is known of a point in a stream."""

    def query(self) -> bool:
        """Has the device passed it?"""


class Stream(Hashable, Protocol):
    """A queue of device work."""

    def record_event(self) -> Event:
        """A point after all work issued to the stream so far."""


class DevicePages:
    """Numbers of free and used pages; the content lies in the caller's region."""

    def __init__(self, pages: int) -> None:
        """All free. Pages that everyone may take are reused in order of address."""
        if pages < 1:
            raise KernelError(f"asked for a region of {pages} pages; give at least one")
        self._free = list(range(pages))
        self._pending: dict[Stream, deque[tuple[Event, list[int]]]] = {}
        self._used: set[int] = set()

    @property
    def used_pages(self) -> int:
        """Pages that belong to someone."""
        return len(self._used)

    def allocate(self, pages: int, stream: Stream) -> list[int]:
        """Pages for work on ``stream``: those that no stream reads, then its own last frees.

        Raises:
            PoolFullError: so many are not there, or other streams still read them.
        """
        self._collect()
        own = self._pending.get(stream, deque())
        waiting = sum(len(group) for _, group in own)
        if pages > len(self._free) + waiting:
            raise PoolFullError(
                f"asked for {pages} pages on {stream}, found {len(self._free)} free and {waiting} "
                "that it freed itself; give up planes, or wait for the other streams"
            )
        found = [heapq.heappop(self._free) for _ in range(min(pages, len(self._free)))]
        while len(found) < pages:
            group = own[0][1]
            found.append(group.pop(0))
            if not group:
                own.popleft()
        self._used.update(found)
        return found

    def free(self, pages: Sequence[int], streams: Sequence[Stream]) -> None:
        """Give pages back that these streams may still use (none: nobody does).

        Where there are several, the first stream is made to come last by the
        caller (``wait_stream`` on the others), and is the only one given here.

        Raises:
            KernelError: a page is not in use, or is used by several streams.
        """
        strangers = [page for page in pages if page not in self._used]
        if strangers or len(set(pages)) < len(pages):
            raise KernelError(f"asked to free pages {list(pages)}; {strangers} are not in use")
        if len(streams) > 1:
            raise KernelError(
                f"asked to free pages used by {len(streams)} streams; let one wait for the others"
            )
        self._used.difference_update(pages)
        if not streams:
            self._give(pages)
            return
        (stream,) = streams
        entry = (stream.record_event(), sorted(pages))
        self._pending.setdefault(stream, deque()).append(entry)

    def _collect(self) -> None:
        """What streams have passed, everyone may take. Events of a stream pass in order."""
        for stream, groups in list(self._pending.items()):
            while groups and groups[0][0].query():
                self._give(groups.popleft()[1])
            if not groups:
                del self._pending[stream]

    def _give(self, pages: Sequence[int]) -> None:
        for page in pages:
            heapq.heappush(self._free, page)
