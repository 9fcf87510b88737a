"""Copies between a device and pinned host memory that run beside the computation.

:class:`Transfers` is what the collaboration needs of a device; :class:`CudaTransfers`
gives it by a side stream and events, and waits on the host for nothing.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from daf.errors import PlatformError


class Transfers(Protocol):
    """Copies out and in; a ticket tells when one is done."""

    def out(self, source: Tensor) -> tuple[Tensor, Any]:
        """Begin a copy to the host; the copy and its ticket."""

    def back(self, source: Tensor) -> tuple[Tensor, Any]:
        """Begin a copy to the device; the copy and its ticket."""

    def is_done(self, ticket: Any) -> bool:
        """Whether the host may read the copy now."""

    def before_use(self, copy: Tensor, ticket: Any) -> None:
        """Make the device's current stream wait for the copy, and not the host."""

    def mark(self) -> Any:
        """A ticket that is done when all that was asked of the current stream so far is."""


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

    def out(self, source: Tensor) -> tuple[Tensor, Any]:
        """Copy to pinned memory after what the current stream has to do so far."""
        copy = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copy.copy_(source, non_blocking=True)
        source.record_stream(self._stream)  # or its memory is handed out while it is read
        return copy, self._stream.record_event()

    def back(self, source: Tensor) -> tuple[Tensor, Any]:
        """Copy pinned memory to the device; ``source`` must live until the ticket is done."""
        with torch.cuda.stream(self._stream):
            copy = source.to(self._device, non_blocking=True)
        return copy, self._stream.record_event()

    def is_done(self, ticket: Any) -> bool:
        """Whether the event has passed."""
        return bool(ticket.query())

    def before_use(self, copy: Tensor, ticket: Any) -> None:
        """The current stream waits; the copy was allocated on the side stream."""
        current = torch.cuda.current_stream(self._device)
        current.wait_event(ticket)
        copy.record_stream(current)

    def mark(self) -> Any:
        """An event of the current stream."""
        return torch.cuda.current_stream(self._device).record_event()
