"""One pass on routes that were chosen before, and when each piece of its packing was done."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from daf.offload.routing import Route, Routes, ScheduledWork, Sent
from daf.pool.transfers import Transfers


class Given(Routes):
    """Routes that were chosen before."""

    is_watching = False

    def __init__(self, routes: Sequence[Route]) -> None:
        self._routes = iter(routes)

    def begin_pass(self, most_raw_bytes: float) -> None:
        """There is one."""

    def take(self) -> Route:
        """The next."""
        return next(self._routes)

    def note(self, sent: Sent) -> None:
        """Nothing is decided from it."""

    def end_forward(self) -> None:
        """Nor from this."""

    def processor_took(self, raw_bytes: int, taken_ms: float) -> None:
        """Nor from this."""


class Measured(NamedTuple):
    """What a pass came to (ms since it began): its work, and its forward's end on the device."""

    jobs: tuple[ScheduledWork, ...]
    forward_ms: float


class Watched(Given):
    """The same, and what is noted of every tensor becomes jobs like those of ``simulate``.

    The device's clock tells of packing there and of copies, the host's of packing on the
    processor. Both begin when a device that has nothing to do is asked for a mark, so that they
    differ by what that takes.
    """

    is_watching = True

    def __init__(self, routes: Sequence[Route], transfers: Transfers) -> None:
        super().__init__(routes)
        self._transfers = transfers
        self._places = 0
        self._sent: list[tuple[int, Sent]] = []
        self._packed: list[tuple[float, float]] = []  # by the processor, in order
        self._begin: Any = None
        self._end: Any = None
        self._begin_s = 0.0

    def begin_pass(self, most_raw_bytes: float) -> None:  # noqa: ARG002 - the routes are given
        """Now; the device has nothing to do."""
        self._begin_s, self._begin = time.perf_counter(), self._transfers.mark()

    def take(self) -> Route:
        """The next."""
        self._places += 1
        return super().take()

    def note(self, sent: Sent) -> None:
        """Of the tensor whose route was taken last."""
        self._sent.append((self._places - 1, sent))

    def end_forward(self) -> None:
        """On the device: when all that was asked of it so far is done."""
        self._end = self._transfers.mark()

    def processor_took(self, raw_bytes: int, taken_ms: float) -> None:  # noqa: ARG002
        """Until now."""
        end_ms = 1000.0 * (time.perf_counter() - self._begin_s)
        self._packed.append((end_ms - taken_ms, end_ms))

    def measured(self) -> Measured:
        """All of it; the device and the processor are done."""
        packed, jobs = iter(self._packed), list[ScheduledWork]()
        for place, sent in self._sent:
            if sent.route is Route.GPU_PACKS:
                jobs.append(
                    ScheduledWork("gpu", place, self._at(sent.before), self._at(sent.after))
                )
            arrived_ms = self._at(sent.copy)
            begin_ms = arrived_ms - self._transfers.duration_ms(sent.copy)
            jobs.append(ScheduledWork("link", place, begin_ms, arrived_ms))
            if sent.route is Route.CPU_PACKS:
                jobs.append(ScheduledWork("cpu", place, *next(packed)))
        return Measured(tuple(jobs), self._at(self._end))

    def _at(self, ticket: Any) -> float:
        return self._transfers.elapsed_ms(self._begin, ticket)
