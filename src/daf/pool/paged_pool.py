"""The paged pool: planes in fixed pages under one cap, evicted by least importance first.

``csrc/pool/pool.h`` does the work; ``docs/pool.md`` explains and draws it. Kernels read and write
pages directly (``daf.kernels.cpu.codecs``), without copies.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import Any, Unpack

import daf._native as _native
from daf.core.code_format import code_bytes, plane_bytes
from daf.core.code_tables import rotated_error
from daf.core.errors import KernelError, PoolFullError
from daf.core.units import parse_optional_bytes
from daf.kernels import PageFields
from daf.memory.process_memory import soft_limit_bytes
from daf.pool.page_size import DEFAULT_PAGE_BYTES, DEVICE_ENTRY_BYTES, TABLE_ENTRY_BYTES, PageFitter
from daf.pool.store import PlainStore, PlaneOptions, PoolOptions, Store
from daf.pool.views import Evicted, EvictedPlane, PlaneView, PoolStatistics, ZeroView

_ADDRESS_SPACE_BYTES = 2**38


class PlaneTensor:
    """One tensor's planes (and headers) in the pool, until the last reference is dropped.

    It begins open, for a kernel to fill; once sealed, it is evictable outside :meth:`pinned`.
    """

    def __init__(self, store: "PagedStore", handle: int) -> None:
        self._store, self.handle = store, handle
        self._released = False
        self._open_view: PlaneView | None = PlaneView(PageFields(*store.native.pin(handle)))
        store.native.unpin(handle)  # allocation pinned it once

    @property
    def view(self) -> PlaneView:
        """Where to write; KernelError once sealed."""
        if self._open_view is None:
            raise KernelError("asked to write into a sealed tensor; allocate another one")
        return self._open_view

    def filling(self) -> AbstractContextManager[PlaneView]:
        """Yield where to write."""
        return nullcontext(self.view)

    @property
    def nbytes(self) -> int:
        """Bytes of its resident pages."""
        return int(_call(self._store.native.live_bytes, self.handle))

    def seal(self) -> None:
        """End writing; planes may be evicted from now on."""
        self.view.end()
        self._open_view = None
        _call(self._store.native.unpin, self.handle)

    def reopen(self) -> None:
        """Open what is left for writing again."""
        self._open_view = PlaneView(PageFields(*_call(self._store.native.pin, self.handle)))

    @contextmanager
    def pinned(self) -> Iterator[PlaneView]:
        """Yield the resident planes for reading; none is evicted meanwhile."""
        fields = PageFields(*_call(self._store.native.pin, self.handle))
        view = PlaneView(fields) if fields.kept else ZeroView(fields.elements, fields.bits)
        try:
            yield view
        finally:
            view.end()
            _call(self._store.native.unpin, self.handle)

    def release(self) -> None:
        """Free the pages now; KernelError if they were freed before, or somebody reads them."""
        if self._open_view is not None:
            self.seal()
        _call(self._store.native.release, self.handle)
        self._released = True

    def __del__(self) -> None:
        if not getattr(self, "_released", True):  # nobody reads it, but an interrupt may have left
            _call(self._store.native.release, self.handle, True)  # a pin


class PagedStore:
    """A store of fixed pages in one contiguous region, under a cap that may change at any time."""

    def __init__(
        self,
        cap_bytes: int | None = None,
        *,
        page_bytes: int | None = DEFAULT_PAGE_BYTES,
        increment_bytes: int | None = None,
        poison: bool = False,
        charged: bool = False,
        elsewhere: bool = False,
        whole: bool = False,
    ) -> None:
        """Reserve addresses; memory follows on demand.

        Args:
            cap_bytes: the most to hold, page tables and records included; None: no cap.
            page_bytes: a power of two from 32 up; None: fitted, whenever the pool is empty, to the
                tensors that lived last (``daf.pool.page_size``).
            increment_bytes: grow by whole steps of this size, as the paper does; None: by demand,
                fragmentation and headroom.
            poison: fill freed pages with 0xDB, for tests.
            charged: count the memory in the process's account and obey its limit
                (``memory.recycling_allocator``). What the limit refuses is asked of the account's
                reclaim hook, then of the pool's own planes, before the allocation fails.
            elsewhere: pages lie on a device (``device_pool``) and are only numbered and counted
                here; planes are evicted whole.
            whole: evict all planes of a tensor at once, by its ``weight`` per byte (DAF, arXiv
                2507.07149); zeros are read in their place. Without a weight it stays.

        KernelError: invalid page size or increment. PoolFullError: no addresses are granted.
        """
        _check_bytes("cap", cap_bytes)
        if increment_bytes is not None and increment_bytes < 1:
            raise KernelError(f"asked to grow by {increment_bytes} bytes; give at least one page")
        entry_bytes = TABLE_ENTRY_BYTES + (DEVICE_ENTRY_BYTES if elsewhere else 0)
        self._fitter = PageFitter(entry_bytes) if page_bytes is None else None
        self._fitting = threading.RLock()  # a collection in between may allocate too
        page_bytes = DEFAULT_PAGE_BYTES if page_bytes is None else page_bytes
        sizes = (_ADDRESS_SPACE_BYTES, page_bytes, cap_bytes, increment_bytes or 0)
        self._whole = whole
        self.native = _call(_native.pool.Pool, *sizes, poison, charged, elsewhere, whole)

    @property
    def page_bytes(self) -> int:
        """Current bytes of a page."""
        return int(self.native.page_bytes())

    @property
    def cap_bytes(self) -> int | None:
        """The most to hold; None: no cap."""
        return self.statistics().cap_bytes

    @property
    def live_bytes(self) -> int:
        """Bytes held: pages with and without content, page tables, records."""
        return int(self.native.held_bytes())

    @property
    def evicted_bytes(self) -> int:
        """Bytes of planes evicted since the pool began."""
        return self.statistics().evicted_payload_bytes

    def allocate_planes(
        self, count: int, bits: int, **options: Unpack[PlaneOptions]
    ) -> PlaneTensor:
        """Allocate pages for ``bits`` (1 to 64) planes of ``count`` elements, open for writing.

        KernelError: a number is out of its range. PoolFullError: no room, even if all evictable
        planes went; none is evicted then.
        """
        _check_bytes("tensor", count)
        page_bytes = self._fit(count, bits)
        if (values := options.get("importance")) is None:
            values = plane_importance(count, bits) if bits <= 4 else [0.0] * bits
        least, headers = options.get("minimum_bits"), options.get("headers", True)
        if self._whole:
            weight, size = options.get("weight"), max(1, code_bytes(count, bits))
            least, values = bits if weight is None else 0, [(weight or 0.0) / size] * bits
        request = (count, bits, bits if least is None else least, headers, list(values))
        tag = options.get("tag", 0)
        return PlaneTensor(self, _call(self.native.allocate, *request, tag, page_bytes))

    def _fit(self, count: int, bits: int) -> int:
        """Return the bytes of a page if the pool is empty when the tensor comes; 0: as they are."""
        if self._fitter is None:
            return 0
        with self._fitting:
            is_empty = self.native.live_tensors() == 0
            page_bytes = self._fitter.choose(count, bits) if is_empty else 0
            self._fitter.note(count, bits)
        return page_bytes

    def take_evictions(self) -> tuple[tuple[EvictedPlane, ...], int]:
        """Return up to 256 planes evicted since the last call, oldest first; and how many more."""
        entries, lost = self.native.take_evictions()
        return tuple(EvictedPlane(*each) for each in entries), lost

    def set_cap(self, cap_bytes: int | None) -> Evicted:
        """Set the cap at once and evict what is above it."""
        _check_bytes("cap", cap_bytes)
        return Evicted(*_call(self.native.set_cap, cap_bytes))

    def evict(self, nbytes: int) -> Evicted:
        """Evict at least ``nbytes`` bytes of pages, or all that may be."""
        _check_bytes("room", nbytes)
        return Evicted(*_call(self.native.evict, nbytes))

    def give_back(self, nbytes: int) -> int:
        """Return ``nbytes`` to the system, evicting planes if need be; returns how many."""
        returned = self.trim()
        while returned < nbytes:
            given = self.evict(nbytes - returned)
            returned += given.returned_bytes + self.trim()
            if given.pages == 0:
                break
        return returned

    def take_lost(self) -> list[tuple[int, int]]:
        """Return (handle, planes left) of the tensors that lost planes since the last call."""
        return list(self.native.take_lost())

    def trim(self) -> int:
        """Return all free pages to the system; returns bytes."""
        return int(self.native.trim())

    def statistics(self) -> PoolStatistics:
        """Return the current account."""
        return PoolStatistics(*self.native.statistics())


def make_store(asked: PoolOptions | str | int | None = None) -> Store:
    """Return the paged pool; plain buffers where addresses are short and nothing was asked for.

    UnitError: a size cannot be read; OptionError: as ``PoolOptions``; PoolFullError: something was
    asked for, and the system grants no addresses.
    """
    options = PoolOptions.of(asked)
    if options == PoolOptions() and soft_limit_bytes("RLIMIT_AS") is not None:
        return PlainStore()  # the range that the pool reserves would be missing elsewhere
    try:
        return PagedStore(
            parse_optional_bytes(options.cap_bytes),
            page_bytes=None,
            increment_bytes=parse_optional_bytes(options.growth_bytes),
            charged=True,
            whole=options.evicts == "activations",
        )
    except PoolFullError:
        if options != PoolOptions():
            raise
        return PlainStore()


def plane_importance(count: int, bits: int, weight: float = 1.0) -> list[float]:
    """Return the harm per byte of losing each plane of a ``rotated`` code, most significant first.

    It is ``weight`` (how much relative error at the site harms the gradient) times the relative
    mean-square error that the plane removes, over its bytes (design, section 6). A code without its
    first plane is worth its mean: error 1.
    """
    errors = [1.0, *(rotated_error(bits, kept) for kept in range(1, bits + 1))]
    size = max(1, plane_bytes(count, 1))
    return [weight * max(0.0, before - after) / size for before, after in pairwise(errors)]


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except _native.pool.FullError as error:
        raise PoolFullError(
            f"{error}; raise the cap, let more planes be evicted, or use a smaller micro-batch"
        ) from error
    except MemoryError as error:
        raise PoolFullError(
            "asked the system for memory or addresses for the pool, and it refused; "
            "lower the cap, or free memory"
        ) from error
    except (_native.pool.MisuseError, TypeError) as error:
        raise KernelError(str(error)) from error


def _check_bytes(what: str, value: int | None) -> None:
    if value is not None and not 0 <= value < 2**63:
        raise KernelError(f"asked for a {what} of {value}; sizes are 0 or more")
