"""The paged pool's reports: its account, its evictions, where pages are."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import NamedTuple

from daf.core.errors import KernelError
from daf.kernels import PageFields

_BITS_PER_BYTE = 8


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """The pool's account (bytes, pages, counts since the pool began).

    ``payload``: resident planes and headers. ``wasted``: behind their ends in the last page of a
    row. ``free``: pages that have memory and no content. ``metadata``: page tables, records, tree
    and bitmaps.
    """

    payload_bytes: int
    wasted_bytes: int
    free_bytes: int
    metadata_bytes: int
    cap_bytes: int | None
    live_peak_bytes: int
    held_peak_bytes: int
    evictable_pages: int
    live_pages: int
    live_tensors: int
    evicted_pages: int
    evicted_payload_bytes: int
    grown_bytes: int
    growths: int
    returned_bytes: int

    @property
    def live_bytes(self) -> int:
        """Bytes of pages in use."""
        return self.payload_bytes + self.wasted_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes that the pool holds, which the cap bounds."""
        return self.live_bytes + self.free_bytes + self.metadata_bytes


class GivenUp(NamedTuple):
    """What a lowered cap or a demand for room evicted; ``over_bytes`` are still above the cap."""

    pages: int
    payload_bytes: int
    returned_bytes: int
    over_bytes: int


class EvictedPlane(NamedTuple):
    """The evicted ``pages`` of one plane (0: most significant) of tensor ``tag``."""

    tag: int
    handle: int
    plane: int
    pages: int
    nbytes: int


class PlaneView:
    """Where a pinned tensor's pages are; valid until it is unpinned."""

    def __init__(self, fields: tuple[int, ...]) -> None:
        self._fields: PageFields | None = PageFields(*fields)

    @property
    def fields(self) -> PageFields:
        """The pages as native kernels take them.

        Raises:
            KernelError: the tensor is no longer pinned.
        """
        if self._fields is None:
            raise KernelError("asked for pages that are no longer pinned; pin the tensor again")
        return self._fields

    @property
    def runs(self) -> int:
        """Number of runs; all but the last have ``run_elements`` elements."""
        return self.fields.runs

    @property
    def run_elements(self) -> int:
        """Elements of a whole run: one bit of each fills a page."""
        return self.fields.page_bytes * _BITS_PER_BYTE

    def kept_bits(self, run: int) -> int:
        """Return how many planes of a run are resident."""
        fields = self.fields
        return fields.kept if self._checked(run) < fields.full_runs else fields.kept - 1

    def planes(self, run: int) -> tuple[int, ...]:
        """Return the addresses of a run's planes, most significant first."""
        return tuple(self._page(plane * self.runs + run) for plane in range(self.kept_bits(run)))

    def headers(self, run: int) -> int:
        """Return the address of a run's first header (only of tensors that have headers)."""
        fields = self.fields
        offset = self._checked(run) * fields.page_bytes // 8
        entry = fields.bits * self.runs + offset // fields.page_bytes
        return self._page(entry) + offset % fields.page_bytes

    def _checked(self, run: int) -> int:
        if not 0 <= run < self.runs:
            raise KernelError(f"asked for run {run}; this tensor has {self.runs}")
        return run

    def _page(self, entry: int) -> int:
        fields = self.fields
        index: int = ctypes.c_uint32.from_address(fields.table + 4 * entry).value
        return fields.region + fields.page_bytes * index

    def end(self) -> None:
        """Invalidate the view: the tensor is no longer pinned."""
        self._fields = None
