"""The order of a device's work that is issued to several streams."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

Stream = Any  # compares; PyTorch's, or a test's


class Streams:
    """The queues of one device; these of a processor, which is done when a call returns."""

    def current(self) -> Stream:
        """Return the stream that this thread issues work to."""
        return None

    def use(self, stream: Stream) -> AbstractContextManager[object]:  # noqa: ARG002
        """Make a stream current inside."""
        return nullcontext()

    def wait(self, waiting: Stream, for_: Stream) -> None:
        """Run what ``waiting`` is given from now on after all that ``for_`` has been given."""


class DeviceStreams(Streams):
    """The streams of a GPU; the host waits for none."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def current(self) -> Stream:
        return torch.cuda.current_stream(self._device)

    def use(self, stream: Stream) -> AbstractContextManager[object]:
        return torch.cuda.stream(stream)

    def wait(self, waiting: Stream, for_: Stream) -> None:
        waiting.wait_stream(for_)


class HomeStream:
    """Memory of one stream, as PyTorch's caching allocator means it, used on all streams.

    Home is the stream that was current at first use. Other streams' work is ordered between home's
    earlier and later work, so that freed memory may be reused at once in home's order.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._home: Stream | None = None
        self._is_known = False

    @property
    def is_current(self) -> bool:
        """True if the current stream is home."""
        return bool(self._find() == self._streams.current())

    def at_home(self) -> AbstractContextManager[object]:
        """Make home current inside."""
        home, current = self._find(), self._streams.current()
        return nullcontext() if current == home else self._streams.use(home)

    @contextmanager
    def ordered(self) -> Iterator[None]:
        """Let the current stream use the memory inside."""
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
    """Return a device's streams."""
    return Streams() if device.type == "cpu" else DeviceStreams(device)
