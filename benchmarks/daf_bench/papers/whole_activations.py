"""A store that evicts activations as a whole, as DAF's paper (arXiv 2507.07149) also offers.

Above its cap the code goes that harms the gradient least per byte, with all its planes and headers;
backward reads zeros in its place. Which may go is as in the paged pool: ``rotated`` codes only.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Unpack

import torch

from daf.core.code_format import code_bytes, plane_bytes
from daf.kernels import PageFields
from daf.pool.paged_pool import PagedStore, PlaneTensor
from daf.pool.store import PlaneOptions
from daf.pool.views import EvictedPlane, PlaneView


class WholeStore:
    """Codes in the paged pool, of which whole ones go; ``cap_bytes`` holds once each is sealed."""

    def __init__(self, cap_bytes: int) -> None:
        self._cap_bytes = cap_bytes
        self._pool = PagedStore(page_bytes=None)
        self._evictable = weakref.WeakValueDictionary[int, _Activation]()
        self.evicted_bytes = 0

    @property
    def live_bytes(self) -> int:
        """Bytes held now."""
        return self._pool.live_bytes

    def allocate_planes(
        self, count: int, bits: int, **options: Unpack[PlaneOptions]
    ) -> _Activation:
        """Allocate planes that go together or stay."""
        least, values = options.pop("minimum_bits", None), options.get("importance")
        may_go = least is not None and least < bits and values is not None
        harm = sum(values) / bits if may_go and values else None
        return _Activation(
            self, self._pool.allocate_planes(count, bits, **options), count, bits, harm
        )

    def take_evictions(self) -> tuple[tuple[EvictedPlane, ...], int]:
        """None are listed plane by plane."""
        return (), 0

    def give_back(self, nbytes: int) -> int:
        """Return free pages; nothing is evicted for that."""
        return self._pool.give_back(nbytes)

    def sealed(self, activation: _Activation) -> None:
        """Take in what may go from now on, and evict what is above the cap."""
        if activation.harm is not None:
            self._evictable[id(activation)] = activation
        while self._pool.live_bytes > self._cap_bytes and self._evictable:
            least = min(self._evictable.values(), key=lambda each: each.harm or 0.0)
            self.evicted_bytes += least.nbytes
            least.evict()
            self._pool.trim()

    def forget(self, activation: _Activation) -> None:
        """Let go of one that is read or evicted."""
        self._evictable.pop(id(activation), None)


class _Activation:
    """One code's planes, until they go; then zeros."""

    def __init__(
        self, store: WholeStore, planes: PlaneTensor, count: int, bits: int, harm: float | None
    ) -> None:
        self._store, self._planes = store, planes
        self._count, self._bits, self.harm = count, bits, harm
        self.is_evicted = False

    @property
    def nbytes(self) -> int:
        """Bytes that the planes take now."""
        return 0 if self.is_evicted else self._planes.nbytes

    @property
    def view(self) -> PlaneView:
        """Where to write."""
        return self._planes.view

    def filling(self) -> AbstractContextManager[PlaneView]:
        """Yield where to write."""
        return self._planes.filling()

    def seal(self) -> None:
        """End writing."""
        self._planes.seal()
        self._store.sealed(self)

    def evict(self) -> None:
        """Free everything."""
        self._store.forget(self)
        self._planes.release()
        self.is_evicted = True

    @contextmanager
    def pinned(self) -> Iterator[PlaneView]:
        """Yield the planes, or zeros: a code of zeros stands for zeros."""
        if not self.is_evicted:
            self._store.forget(self)  # it is read once, and stays until it is freed
            with self._planes.pinned() as view:
                yield view
            return
        zeros = torch.zeros(code_bytes(self._count, self._bits), dtype=torch.uint8)
        fields, runs = PageFields.flat(zeros.data_ptr(), self._count, self._bits), 1
        page_bytes = plane_bytes(self._count, 1)
        yield PlaneView(fields._replace(page_bytes=page_bytes, runs=runs, full_runs=runs))
