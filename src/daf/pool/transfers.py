"""Copies between a device and pinned host memory that run beside the computation."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from daf.core.errors import PlatformError


class Ticket(NamedTuple):
    """Events before and after a copy; a mark has the same one twice."""

    begin: Any
    end: Any


class Transfers:
    """Copies of one CUDA (or ROCm) device, one after the other, each with a ticket of its end.

    Free a copy's device memory only when the ticket is done, or when the stream that owns the
    memory has been ordered after it (``order``).
    """

    def __init__(self, device: torch.device) -> None:
        """Make a side stream; PlatformError if there is no such device."""
        if device.type != "cuda" or not torch.cuda.is_available():
            raise PlatformError(
                f"asked for transfers beside {device}, found no CUDA device; use a CPU session"
            )
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def out(self, source: Tensor) -> tuple[Tensor, Ticket]:
        """Begin to copy ``source``, as the current stream leaves it, to pinned memory."""
        copy = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        return copy, self.back(source, copy)

    def back(self, source: Tensor, target: Tensor) -> Ticket:
        """Begin to fill ``target`` after the current stream's work; free pinned sources at will."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            begin = _event(self._stream)
            target.copy_(source, non_blocking=True)
            return Ticket(begin, _event(self._stream))

    def is_done(self, ticket: Ticket) -> bool:
        """True if the host may read the copy."""
        return bool(ticket.end.query())

    def order(self, ticket: Ticket) -> None:
        """Make the current stream wait for the copy; the host does not wait."""
        torch.cuda.current_stream(self._device).wait_event(ticket.end)

    def mark(self) -> Ticket:
        """Return a ticket of the current stream's work so far."""
        event = _event(torch.cuda.current_stream(self._device))
        return Ticket(event, event)

    def duration_ms(self, ticket: Ticket) -> float:
        """Return the duration of a finished copy, by the device's clock."""
        return float(ticket.begin.elapsed_time(ticket.end))

    def elapsed_ms(self, first: Ticket, last: Ticket) -> float:
        """Return the time between the ends of two finished tickets, by the device's clock."""
        return float(first.end.elapsed_time(last.end))


def _event(stream: Any) -> Any:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event
