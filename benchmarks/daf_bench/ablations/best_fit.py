"""A store in one contiguous region, whose holes are filled by best fit: no pages, no eviction.

Of the free pieces the smallest that is large enough is cut; pieces that touch are joined. What was
once used stays held, as in an arena.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from contextlib import AbstractContextManager, nullcontext
from typing import Unpack

import torch

from daf.core.code_format import code_bytes, plane_bytes
from daf.core.errors import PoolFullError
from daf.kernels import PageFields
from daf.pool.store import PlaneOptions, Planes
from daf.pool.views import EvictedPlane, PlaneView

REGION_BYTES = 8 * 2**30  # addresses; memory comes as it is written
ALIGNMENT = 64


class BestFitStore:
    """Asks for no memory beyond the highest end of what was ever live: ``live_bytes``."""

    evicted_bytes = 0

    def __init__(self, region_bytes: int = REGION_BYTES) -> None:
        self._region = torch.empty(region_bytes, dtype=torch.uint8)
        self._free = [(region_bytes, 0)]  # (bytes, offset), the smallest first
        self._ends = {0: region_bytes}  # of free pieces by offset
        self._begins = {region_bytes: 0}
        self.live_bytes = 0  # of the region, from its beginning to the highest end so far

    def allocate_planes(self, count: int, bits: int, **options: Unpack[PlaneOptions]) -> Planes:
        """Allocate the bytes of the format; PoolFullError if no hole is large enough."""
        wanted = code_bytes(count, bits, headers=options.get("headers", True))
        size = -(-max(1, wanted) // ALIGNMENT) * ALIGNMENT
        place = bisect_left(self._free, (size, 0))
        if place == len(self._free):
            raise PoolFullError(f"asked for {size} bytes; no hole of the region is that large")
        whole, offset = self._free[place]
        self._take(whole, offset)
        if whole > size:
            self._give(whole - size, offset + size)
        self.live_bytes = max(self.live_bytes, offset + size)
        address = self._region.data_ptr() + offset
        return _Piece(self, size, offset, PageFields.flat(address, count, bits), count)

    def take_evictions(self) -> tuple[tuple[EvictedPlane, ...], int]:
        """Return no evictions."""
        return (), 0

    def give_back(self, nbytes: int) -> int:  # noqa: ARG002
        """Return 0: an arena keeps what it has."""
        return 0

    def free(self, size: int, offset: int) -> None:
        """Take a piece back, and join it with free ones that it touches."""
        if (end := self._ends.get(offset + size)) is not None:
            self._take(end - offset - size, offset + size)
            size = end - offset
        if (begin := self._begins.get(offset)) is not None:
            self._take(offset - begin, begin)
            size, offset = size + offset - begin, begin
        self._give(size, offset)

    def _take(self, size: int, offset: int) -> None:
        del self._free[bisect_left(self._free, (size, offset))]
        del self._ends[offset], self._begins[offset + size]

    def _give(self, size: int, offset: int) -> None:
        insort(self._free, (size, offset))
        self._ends[offset], self._begins[offset + size] = offset + size, offset


class _Piece:
    """Planes one behind the other, in a piece that goes back with the last reference."""

    __slots__ = ("_fields", "_offset", "_store", "nbytes")

    def __init__(
        self, store: BestFitStore, size: int, offset: int, fields: PageFields, count: int
    ) -> None:
        self._store, self.nbytes, self._offset = store, size, offset
        runs = min(count, 1)
        self._fields = fields._replace(page_bytes=plane_bytes(count, 1), runs=runs, full_runs=runs)

    def __del__(self) -> None:
        self._store.free(self.nbytes, self._offset)

    @property
    def view(self) -> PlaneView:
        """Where to write."""
        return PlaneView(self._fields)

    def seal(self) -> None:
        """Do nothing."""

    def pinned(self) -> AbstractContextManager[PlaneView]:
        """Yield the planes."""
        return nullcontext(PlaneView(self._fields))

    filling = pinned
