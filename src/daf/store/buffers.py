"""Where the bytes of codes live: ask for a buffer, drop the last reference to give it back."""

from __future__ import annotations

from typing import Protocol

import torch


class Buffer(Protocol):
    """Bytes that stay at one address until the last reference is dropped."""

    @property
    def pointer(self) -> int:
        """Address of the first byte, a multiple of 4."""

    @property
    def nbytes(self) -> int:
        """How many bytes there are."""


class Store(Protocol):
    """Gives out buffers and knows how many bytes of them are alive."""

    @property
    def live_bytes(self) -> int:
        """Bytes held for buffers now."""

    @property
    def peak_bytes(self) -> int:
        """The most held since the last ``reset_peak``."""

    def allocate(self, nbytes: int) -> Buffer:
        """A buffer of at least ``nbytes`` bytes, content undefined."""

    def reset_peak(self) -> None:
        """Start the peak anew from what is alive now."""


class PlainStore:
    """Every buffer is a tensor of its own."""

    def __init__(self) -> None:
        self.live_bytes = 0
        self.peak_bytes = 0

    def allocate(self, nbytes: int) -> Buffer:
        """A buffer of exactly ``nbytes`` bytes, content undefined."""
        buffer = _TensorBuffer(self, nbytes)
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return buffer

    def reset_peak(self) -> None:
        """Start the peak anew from what is alive now."""
        self.peak_bytes = self.live_bytes


class _TensorBuffer:
    __slots__ = ("_bytes", "_store", "nbytes", "pointer")

    def __init__(self, store: PlainStore, nbytes: int) -> None:
        self._store = store
        self.nbytes = 0  # until there are any: the allocation may be refused
        self._bytes = torch.empty(nbytes, dtype=torch.uint8)
        self.nbytes = nbytes
        self.pointer = self._bytes.data_ptr()

    def __del__(self) -> None:
        self._store.live_bytes -= self.nbytes
