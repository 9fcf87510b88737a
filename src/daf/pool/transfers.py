"""Copies between a device and pinned host memory that run beside the computation.

:class:`Transfers` is what codes that wait on the host need of a device; :class:`CudaTransfers`
gives it by a side stream and events, and waits on the host for nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from daf.core.errors import PlatformError


class Transfers(Protocol):
    """Copies out and back, one after the other; a ticket tells when one is done.

    Whoever asks for a copy lets go of the device's memory of it only when the ticket is done, or
    when the stream that the memory belongs to was told to come after it (``order``).
    """

    def out(self, source: Tensor) -> tuple[Tensor, Any]:
        """Begin a copy to the host, of what the current stream makes of ``source`` by now."""

    def back(self, source: Tensor, target: Tensor) -> Any:
        """Begin to fill ``target``, after all that the current stream does with it by now."""

    def is_done(self, ticket: Any) -> bool:
        """Whether the host may read the copy now."""

    def order(self, ticket: Any) -> None:
        """The current stream goes on only after the copy; the host does not wait."""

    def mark(self) -> Any:
        """A ticket that is done when all that was asked of the current stream so far is."""

    def duration_ms(self, ticket: Any) -> float:
        """How long a copy took that is done."""

    def elapsed_ms(self, first: Any, last: Any) -> float:
        """From one ticket's end to another's; both are done."""


class Ticket(NamedTuple):
    """Events before and after a copy; a mark's are one."""

    begin: Any
    end: Any


class CudaTransfers:
    """On one CUDA (or ROCm) device, through PyTorch's streams and its pinned allocator."""

    def __init__(self, device: torch.device) -> None:
        """A side stream of its own.

        Raises:
            PlatformError: there is no such device.
        """
        if device.type != "cuda" or not torch.cuda.is_available():
            raise PlatformError(
                f"asked for transfers beside {device}, found no CUDA device; use a CPU session"
            )
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def out(self, source: Tensor) -> tuple[Tensor, Ticket]:
        """Into pinned memory, which PyTorch's allocator rounds up to a power of two."""
        copy = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        return copy, self._copied(source, copy)

    def back(self, source: Tensor, target: Tensor) -> Ticket:
        """From pinned memory, which may be let go of at once."""
        return self._copied(source, target)

    def _copied(self, source: Tensor, target: Tensor) -> Ticket:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            begin = _event(self._stream)
            target.copy_(source, non_blocking=True)
            return Ticket(begin, _event(self._stream))

    def is_done(self, ticket: Ticket) -> bool:
        """Whether the event has passed."""
        return bool(ticket.end.query())

    def order(self, ticket: Ticket) -> None:
        """By the event, on the device."""
        torch.cuda.current_stream(self._device).wait_event(ticket.end)

    def mark(self) -> Ticket:
        """An event of the current stream."""
        event = _event(torch.cuda.current_stream(self._device))
        return Ticket(event, event)

    def duration_ms(self, ticket: Ticket) -> float:
        """By the device's clock."""
        return float(ticket.begin.elapsed_time(ticket.end))

    def elapsed_ms(self, first: Ticket, last: Ticket) -> float:
        """By the device's clock."""
        return float(first.end.elapsed_time(last.end))


def _event(stream: Any) -> Any:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event
