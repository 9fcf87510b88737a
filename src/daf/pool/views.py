"""The paged pool's reports: its account, its evictions, where pages are."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from daf.core.code_format import code_bytes, plane_bytes
from daf.core.errors import KernelError
from daf.kernels import PageFields


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """The pool's account (bytes, pages, counts since the pool began)."""

    payload_bytes: int  # resident planes and headers
    wasted_bytes: int  # behind their ends in the last page of a row
    free_bytes: int  # pages that have memory and no content
    metadata_bytes: int  # page tables, records, tree and bitmaps
    cap_bytes: int | None
    live_peak_bytes: int
    held_peak_bytes: int
    evictable_pages: int
    live_pages: int
    live_tensors: int
    evicted_pages: int
    evicted_payload_bytes: int
    grown_bytes: int
    returned_bytes: int

    @property
    def live_bytes(self) -> int:
        """Bytes of pages in use."""
        return self.payload_bytes + self.wasted_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes that the pool holds, which the cap bounds."""
        return self.live_bytes + self.free_bytes + self.metadata_bytes


class Evicted(NamedTuple):
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

    def __init__(self, fields: PageFields) -> None:
        self._fields: PageFields | None = fields

    @property
    def fields(self) -> PageFields:
        """The pages as native kernels take them; KernelError once unpinned."""
        if self._fields is None:
            raise KernelError("asked for pages that are no longer pinned; pin the tensor again")
        return self._fields

    def end(self) -> None:
        """Invalidate the view: the tensor is no longer pinned."""
        self._fields = None


class ZeroView(PlaneView):
    """Zeros in place of all that was evicted; of codes with headers they stand for zeros."""

    def __init__(self, count: int, bits: int) -> None:
        self._zeros = torch.zeros(code_bytes(count, bits), dtype=torch.uint8)
        fields = PageFields.flat(self._zeros.data_ptr(), count, bits)
        runs, page_bytes = min(count, 1), plane_bytes(count, 1)
        super().__init__(fields._replace(page_bytes=page_bytes, runs=runs, full_runs=runs))
