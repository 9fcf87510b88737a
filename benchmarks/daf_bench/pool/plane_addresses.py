"""Addresses of a pinned tensor's planes and headers, run by run."""

from __future__ import annotations

import ctypes

from daf.core.errors import KernelError
from daf.pool.views import PlaneView


class Pages:
    """The pages of one view; a run is the elements that fill a page with one bit of each."""

    def __init__(self, view: PlaneView) -> None:
        self._view = view

    @property
    def runs(self) -> int:
        """Number of runs; all but the last have ``run_elements`` elements."""
        return self._view.fields.runs

    @property
    def run_elements(self) -> int:
        """Elements of a whole run."""
        return self._view.fields.page_bytes * 8

    def kept_bits(self, run: int) -> int:
        """Return how many planes of a run are resident."""
        fields = self._view.fields
        return fields.kept if self._checked(run) < fields.full_runs else fields.kept - 1

    def planes(self, run: int) -> tuple[int, ...]:
        """Return the addresses of a run's planes, most significant first."""
        return tuple(self._page(plane * self.runs + run) for plane in range(self.kept_bits(run)))

    def headers(self, run: int) -> int:
        """Return the address of a run's first header (only of tensors that have headers)."""
        fields = self._view.fields
        offset = self._checked(run) * fields.page_bytes // 8
        entry = fields.bits * self.runs + offset // fields.page_bytes
        return self._page(entry) + offset % fields.page_bytes

    def _checked(self, run: int) -> int:
        if not 0 <= run < self.runs:
            raise KernelError(f"asked for run {run}; this tensor has {self.runs}")
        return run

    def _page(self, entry: int) -> int:
        fields = self._view.fields
        index: int = ctypes.c_uint32.from_address(fields.table + 4 * entry).value
        return fields.region + fields.page_bytes * index
