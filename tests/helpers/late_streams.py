"""Streams of a device that does nothing before it must: who forgets to wait reads garbage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class LateStreams:
    """Work is issued at once and done later, in any order that the waits allow."""

    def __init__(self, count: int) -> None:
        self.queues: list[list[Callable[[], None] | tuple[int, int]]] = [[] for _ in range(count)]
        self.done = [0] * count
        self._current = 0

    def current(self) -> int:
        return self._current

    @contextmanager
    def use(self, stream: int) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def wait(self, waiting: int, for_: int) -> None:
        self.queues[waiting].append((for_, len(self.queues[for_])))

    def issue(self, work: Callable[[], None]) -> None:
        self.queues[self._current].append(work)

    def advance(self, stream: int) -> bool:
        """Do the next thing of a stream, unless it waits or has none."""
        if self.done[stream] == len(self.queues[stream]):
            return False
        work = self.queues[stream][self.done[stream]]
        if callable(work):
            work()
        elif self.done[work[0]] < work[1]:
            return False
        self.done[stream] += 1
        return True

    def finish(self, order: list[int]) -> None:
        """Everything, the streams of ``order`` first each time."""
        moved = True
        while moved:
            moved = False
            for stream in order:
                moved |= self.advance(stream)
        assert self.done == [len(queue) for queue in self.queues], "streams wait in a circle"
