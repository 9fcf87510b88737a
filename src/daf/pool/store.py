"""Where the bytes of codes live: ask for planes, drop the last reference to give them back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from daf.core.code_format import code_bytes, plane_bytes
from daf.pool.views import EvictedPlane, PlaneView

# Page p of a tensor whose every plane is one page is page p: 64 planes, then the headers.
_IN_ORDER = torch.arange(65, dtype=torch.int32)


class Buffer(Protocol):
    """Bytes that stay at one address until the last reference is dropped."""

    @property
    def pointer(self) -> int:
        """Address of the first byte, a multiple of 4."""

    @property
    def nbytes(self) -> int:
        """How many bytes there are."""


class Planes(Protocol):
    """The planes and headers of one tensor, until the last reference is dropped.

    They are written through ``view``, sealed, and from then on read inside
    ``pinned``; in between, a store may give up what it was allowed to.
    """

    @property
    def nbytes(self) -> int:
        """Bytes that they take now."""

    @property
    def view(self) -> PlaneView:
        """Where to write; gone once sealed."""

    def filling(self) -> AbstractContextManager[PlaneView]:
        """The same, for as long as inside."""

    def seal(self) -> None:
        """Writing is done."""

    def pinned(self) -> AbstractContextManager[PlaneView]:
        """What is there to read; nothing of it goes while inside."""


class Store(Protocol):
    """Gives out buffers and planes, and knows how many bytes of them are alive."""

    @property
    def live_bytes(self) -> int:
        """Bytes held now."""

    @property
    def peak_bytes(self) -> int:
        """The most held since the last ``reset_peak``."""

    @property
    def evicted_bytes(self) -> int:
        """Bytes of planes given up since the store began."""

    def reset_peak(self) -> None:
        """Start the peak anew from what is alive now."""

    def allocate(self, nbytes: int) -> Buffer:
        """A buffer of at least ``nbytes`` bytes, content undefined."""

    def allocate_planes(
        self,
        count: int,
        bits: int,
        *,
        minimum_bits: int | None = None,
        importance: Sequence[float] | None = None,
        headers: bool = True,
        tag: int = 0,
    ) -> Planes:
        """Room for ``bits`` planes of ``count`` elements, content undefined.

        All but ``minimum_bits`` of them (None: none) may be given up, least
        ``importance`` first; ``tag`` names the tensor in ``take_evictions``.
        """

    def take_evictions(self) -> tuple[tuple[EvictedPlane, ...], int]:
        """Planes given up since the last call, and how many more were not listed."""

    def give_back(self, nbytes: int) -> int:
        """Return memory to the system, at least this much if that can be; returns how much."""


class PlainStore:
    """Every buffer is a tensor of its own; nothing is ever given up."""

    evicted_bytes = 0

    def __init__(self) -> None:
        self.live_bytes = 0
        self.peak_bytes = 0

    def allocate(self, nbytes: int) -> Buffer:
        """A buffer of exactly ``nbytes`` bytes, content undefined."""
        buffer = _TensorBuffer(self, nbytes)
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return buffer

    def allocate_planes(
        self,
        count: int,
        bits: int,
        *,
        minimum_bits: int | None = None,  # noqa: ARG002 - all of them stay
        importance: Sequence[float] | None = None,  # noqa: ARG002
        headers: bool = True,
        tag: int = 0,  # noqa: ARG002
    ) -> Planes:
        """Exactly the bytes that the format takes, headers behind the planes."""
        size = code_bytes(count, bits, headers=headers)
        return _WholePlanes(self.allocate(size), count, bits)

    def take_evictions(self) -> tuple[tuple[EvictedPlane, ...], int]:
        """None, ever."""
        return (), 0

    def give_back(self, nbytes: int) -> int:  # noqa: ARG002
        """Nothing: freed buffers are the allocator's already."""
        return 0

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


class _WholePlanes:
    """Planes one behind the other: to kernels, a single run in pages of a plane each."""

    __slots__ = ("_buffer", "_fields", "nbytes")

    def __init__(self, buffer: Buffer, count: int, bits: int) -> None:
        self._buffer = buffer
        self.nbytes = buffer.nbytes
        runs, table = min(count, 1), _IN_ORDER.data_ptr()
        page_bytes = plane_bytes(count, 1)
        self._fields = (buffer.pointer, page_bytes, table, count, runs, runs, bits, bits)

    @property
    def view(self) -> PlaneView:
        """Where to write."""
        return PlaneView(self._fields)

    def seal(self) -> None:
        """Nothing changes."""

    @contextmanager
    def pinned(self) -> Iterator[PlaneView]:
        """The same as ``view``."""
        yield PlaneView(self._fields)

    filling = pinned
