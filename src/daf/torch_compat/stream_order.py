"""Who waits for whom, where a device's work is issued to several streams."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch

Stream = Any  # compares; PyTorch's, or a test's


class Streams(Protocol):
    """The queues of one device."""

    def current(self) -> Stream:
        """That work is issued to now, on this thread."""

    def use(self, stream: Stream) -> AbstractContextManager[object]:
        """Inside, this one is current."""

    def wait(self, waiting: Stream, for_: Stream) -> None:
        """What is issued to the one from now on comes after all that the other has by now."""


class DeviceStreams:
    """A GPU's. The host waits for none of them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def current(self) -> Stream:
        """PyTorch's current stream of the device."""
        return torch.cuda.current_stream(self._device)

    def use(self, stream: Stream) -> AbstractContextManager[object]:
        """PyTorch's context."""
        return torch.cuda.stream(stream)

    def wait(self, waiting: Stream, for_: Stream) -> None:
        """By an event, on the device."""
        waiting.wait_stream(for_)


class NoStreams:
    """A processor's: it is done with everything when a call returns."""

    def current(self) -> Stream:
        """The only one."""
        return None

    def use(self, stream: Stream) -> AbstractContextManager[object]:  # noqa: ARG002
        """Nothing to change."""
        return nullcontext()

    def wait(self, waiting: Stream, for_: Stream) -> None:
        """Nothing to wait for."""


class HomeStream:
    """Memory that belongs to one stream, as PyTorch's caching allocator means it, for use on all.

    Home is the stream that was current at first use. What other streams do with the memory
    comes after all that home was given before, and before all that home is given after: so
    whatever is freed may be used again at once, in home's order.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._home: Stream | None = None
        self._is_known = False

    @property
    def is_current(self) -> bool:
        """Is the current stream home?"""
        return bool(self._find() == self._streams.current())

    def at_home(self) -> AbstractContextManager[object]:
        """Inside, memory is allocated for home, and work is given to it."""
        home, current = self._find(), self._streams.current()
        return nullcontext() if current == home else self._streams.use(home)

    @contextmanager
    def ordered(self) -> Iterator[None]:
        """Inside, the current stream may use the memory."""
        home, current = self._find(), self._streams.current()
        if current == home:
            yield
            return
        self._streams.wait(current, home)
        try:
            yield
        finally:
            self._streams.wait(home, current)

    def _find(self) -> Stream:
        if not self._is_known:
            self._home, self._is_known = self._streams.current(), True
        return self._home


def streams_of(device: torch.device) -> Streams:
    """Of a device: PyTorch's, or none."""
    return NoStreams() if device.type == "cpu" else DeviceStreams(device)
