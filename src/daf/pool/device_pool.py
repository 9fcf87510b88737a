"""The paged pool of a device: numbers and evictions by the native pool, pages on the device.

The native pool counts pages and decides which planes are evicted. PyTorch's caching allocator lends
a block for each evictable plane, and one for all else of a tensor. So freed memory serves gradients
at once, and nothing waits. Kernels find pages through a table on the device, copied once. An
eviction changes only how many planes are read (``docs/pool.md``).
"""

import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import accumulate
from typing import Unpack

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from daf.core.code_format import header_bytes, plane_bytes, words_per_plane
from daf.kernels import PageFields
from daf.kernels.triton.planes import DevicePlanes, paged_planes
from daf.pool.paged_pool import PagedStore, PlaneTensor
from daf.pool.store import PlaneOptions
from daf.pool.views import Evicted, EvictedPlane, PoolStatistics
from daf.torch_compat.stream_order import HomeStream, Streams, streams_of

_REFUSED_ON_PROCESSOR = "DefaultCPUAllocator"  # where a processor stands for a device

Words = npt.NDArray[np.int64]


class DevicePlaneTensor:
    """One tensor's planes (and headers) on a device; sealed, they are evictable unless pinned.

    Their memory, and the table of their pages, are blocks of the current stream.
    """

    def __init__(
        self, store: "DevicePagedStore", numbers: PlaneTensor, stays: int, headers: bool
    ) -> None:
        """Allocate blocks for the numbered pages; the first ``stays`` planes are not evicted."""
        anchor, fields = store.anchor, numbers.view.fields
        words = [_plane_words(fields, plane) for plane in range(fields.kept)]
        words.append(header_bytes(fields.elements) // 4 if headers else 0)
        stay = [*range(min(stays, fields.kept)), fields.kept]  # the last are the headers
        self._stays = _words_on(anchor.device, sum(words[part] for part in stay))
        self._may_go = {
            plane: _words_on(anchor.device, words[plane]) for plane in range(stays, fields.kept)
        }
        starts = {plane: _distance(anchor, block) for plane, block in self._may_go.items()}
        where = _distance(anchor, self._stays)
        before = accumulate((words[part] for part in stay[:-1]), initial=where)
        starts |= dict(zip(stay, before, strict=True))
        self.table = _copied(_table(fields, words, starts), anchor.device)
        self._numbers = numbers
        self._store = store  # last: without it the numbers are the caller's to release

    @property
    def nbytes(self) -> int:
        """Resident bytes on the device, its page table included."""
        # A list, since another thread may be evicting some.
        evictable_bytes = sum(block.nbytes for block in list(self._may_go.values()))
        return self._stays.nbytes + evictable_bytes + self.table.nbytes

    @contextmanager
    def filling(self) -> Iterator[DevicePlanes]:
        """Yield where to write; it stays open for other parts. KernelError if it is sealed."""
        with self._store.home.ordered():
            yield self._planes(self._numbers.view.fields)

    def seal(self) -> None:
        """End writing."""
        self._store.seal(self._numbers)

    @contextmanager
    def pinned(self) -> Iterator[DevicePlanes]:
        """Yield the resident planes to read on the current stream; none is evicted meanwhile."""
        with self._store.pinned(self._numbers) as fields, self._store.home.ordered():
            yield self._planes(fields)

    def drop_planes(self, kept: int) -> None:
        """Return all planes but the first ``kept`` to PyTorch's allocator."""
        for plane in [plane for plane in self._may_go if plane >= kept]:
            del self._may_go[plane]

    def _planes(self, fields: PageFields) -> DevicePlanes:
        return paged_planes(self._store.anchor, self.table, fields)

    def __del__(self) -> None:
        if hasattr(self, "_store"):
            self._store.release(self._numbers, self.table.nbytes)


class DevicePagedStore:
    """Fixed pages on one device, under a cap that any thread may change at any time.

    Evicted memory is freed at once: it belongs to one stream (``stream_order``), so kernels issued
    earlier run before the next owner's.
    """

    def __init__(
        self, device: torch.device, cap_bytes: int | None = None, *, streams: Streams | None = None
    ) -> None:
        self.device = device
        self.home = HomeStream(streams or streams_of(device))
        self._numbers = PagedStore(cap_bytes, page_bytes=None, elsewhere=True)
        self._living = weakref.WeakValueDictionary[int, DevicePlaneTensor]()
        self._table_bytes = 0
        # By handle: how often a tensor is being written or read, and what was asked for meanwhile.
        self._in_use: Counter[int] = Counter()
        self._deferred_bytes = 0
        # Held while numbers and blocks change; reentrant, since finalizers run in between.
        self._lock = threading.RLock()

    @cached_property
    def anchor(self) -> Tensor:
        """What tables count words from; (1,) int32."""
        with self.home.at_home():
            return torch.zeros(1, dtype=torch.int32, device=self.device)

    @property
    def live_bytes(self) -> int:
        """Bytes held: pages, their tables, records."""
        return self._numbers.live_bytes + self._table_bytes

    @property
    def evicted_bytes(self) -> int:
        """Bytes of planes evicted since the pool began."""
        return self._numbers.evicted_bytes

    @property
    def lent_bytes(self) -> int:
        """Bytes borrowed from PyTorch's allocator, without a page's unused end."""
        with self._lock:
            return sum(tensor.nbytes for tensor in self._living.values())

    def statistics(self) -> PoolStatistics:
        """Return the current account of the pages."""
        return self._numbers.statistics()

    def take_evictions(self) -> tuple[tuple[EvictedPlane, ...], int]:
        """Return the evictions, as ``PagedStore.take_evictions`` does."""
        return self._numbers.take_evictions()

    def allocate_planes(
        self, count: int, bits: int, **options: Unpack[PlaneOptions]
    ) -> DevicePlaneTensor:
        """Allocate pages for ``bits`` planes of ``count`` elements, as ``PagedStore`` does.

        If the device refuses memory, the least important planes are evicted, perhaps the new
        ones. PoolFullError: even so no room under the cap; torch.OutOfMemoryError: on the device.
        """
        least, headers = options.get("minimum_bits"), options.get("headers", True)
        stays = bits if least is None else least
        with self._lock:
            numbers = self._numbers.allocate_planes(count, bits, **options)
            self._free_evicted()  # what made room
            while True:
                try:
                    return self._placed(numbers, stays, headers)
                except RuntimeError as error:
                    is_refusal = isinstance(error, torch.OutOfMemoryError)
                    is_refusal = is_refusal or _REFUSED_ON_PROCESSOR in str(error)
                    if not is_refusal or not self._evict_for(numbers):
                        numbers.release()
                        raise

    def _evict_for(self, newcomer: PlaneTensor) -> bool:
        wanted_bytes = plane_bytes(newcomer.view.fields.elements, 1)
        newcomer.seal()
        given = self._numbers.evict(wanted_bytes)
        newcomer.reopen()
        self._free_evicted()
        return given.pages > 0

    def _placed(self, numbers: PlaneTensor, stays: int, headers: bool) -> DevicePlaneTensor:
        with self.home.at_home():
            tensor = DevicePlaneTensor(self, numbers, stays, headers)
        self._table_bytes += tensor.table.nbytes
        self._living[numbers.handle] = tensor
        self._in_use[numbers.handle] += 1
        return tensor

    def seal(self, numbers: PlaneTensor) -> None:
        """End a tensor's writing; its planes may be evicted from now on."""
        with self._lock:
            numbers.seal()
            self._no_longer_in_use(numbers.handle, 1)

    @contextmanager
    def pinned(self, numbers: PlaneTensor) -> Iterator[PageFields]:
        """Pin a tensor: none of its planes is evicted meanwhile."""
        with self._lock:
            self._in_use[numbers.handle] += 1
        try:
            with numbers.pinned() as view:
                yield view.fields
        finally:
            with self._lock:
                self._no_longer_in_use(numbers.handle, 1)

    def release(self, numbers: PlaneTensor, table_bytes: int) -> None:
        """Forget a tensor that is gone."""
        with self._lock:
            numbers.release()
            self._table_bytes -= table_bytes
            self._no_longer_in_use(numbers.handle, self._in_use[numbers.handle])

    def _no_longer_in_use(self, handle: int, times: int) -> None:
        self._in_use[handle] -= times
        if not self._in_use[handle]:
            del self._in_use[handle]
        self._free_evicted()
        if self._deferred_bytes:
            left_bytes = self._deferred_bytes - self._given_back(self._deferred_bytes)
            self._deferred_bytes = max(0, left_bytes) if self._in_use else 0

    def set_cap(self, cap_bytes: int | None) -> Evicted:
        """Set the cap at once and evict what is above it.

        It bounds pages and records, not page tables (a few thousandths); None: no cap.
        """
        with self._lock:
            given = self._numbers.set_cap(cap_bytes)
            self._free_evicted()
            return given

    def give_back(self, nbytes: int) -> int:
        """Evict planes, least important first, until PyTorch's allocator has ``nbytes`` back.

        Planes being written or read follow later. Returns the bytes freed; fewer if no more may go.
        """
        with self._lock:
            returned = self._given_back(nbytes)
            self._deferred_bytes = max(0, nbytes - returned) if self._in_use else 0
            return returned

    def _given_back(self, nbytes: int) -> int:
        before, returned = self.lent_bytes, 0
        while returned < nbytes and self._numbers.evict(nbytes - returned).pages:
            self._free_evicted()
            returned = before - self.lent_bytes
        return returned

    def _free_evicted(self) -> None:
        for handle, kept in self._numbers.take_lost():
            if (tensor := self._living.get(handle)) is not None:
                tensor.drop_planes(kept)


class DeviceStores:
    """The pools of all devices, made with the first code of each; all have the same cap."""

    def __init__(self, cap_bytes: int | None = None) -> None:
        self._cap_bytes = cap_bytes
        self._stores: dict[torch.device, DevicePagedStore] = {}
        self._lock = threading.Lock()  # guards the dictionary: other threads set caps

    def on(self, device: torch.device) -> DevicePagedStore:
        """Return the pool of one device."""
        with self._lock:
            if (found := self._stores.get(device)) is None:
                found = self._stores[device] = DevicePagedStore(device, self._cap_bytes)
            return found

    @property
    def live_bytes(self) -> int:
        """Bytes held now."""
        return sum(store.live_bytes for store in self.all())

    def set_cap(self, cap_bytes: int | None) -> None:
        """Set the cap of each pool at once, and of pools to come."""
        with self._lock:
            self._cap_bytes = cap_bytes
        for store in self.all():
            store.set_cap(cap_bytes)

    def give_back(self, nbytes: int) -> int:
        """Return memory to PyTorch's allocator, from one pool after the other; returns bytes."""
        returned = 0
        for store in self.all():
            if returned < nbytes:
                returned += store.give_back(nbytes - returned)
        return returned

    def all(self) -> list[DevicePagedStore]:
        """Return the pools made so far."""
        with self._lock:
            return list(self._stores.values())


def _plane_words(fields: PageFields, plane: int) -> int:
    runs = fields.runs if plane < fields.kept - 1 else fields.full_runs
    return min(words_per_plane(fields.elements), runs * (fields.page_bytes // 4))


def _table(fields: PageFields, words: Sequence[int], starts: dict[int, int]) -> Words:
    """Return where each page of each part begins; entries of missing pages are never read."""
    page_words = fields.page_bytes // 4
    pages = [-(-each // page_words) for each in words]
    table = np.zeros(max(1, fields.bits * fields.runs + pages[-1]), np.int64)
    for part, start in starts.items():
        first = (fields.bits if part == fields.kept else part) * fields.runs
        table[first : first + pages[part]] = start + page_words * np.arange(pages[part])
    return table


def _words_on(device: torch.device, words: int) -> Tensor:
    return torch.empty(words, dtype=torch.int32, device=device)


def _distance(anchor: Tensor, block: Tensor) -> int:
    return (block.data_ptr() - anchor.data_ptr()) // 4


def _copied(table: Words, device: torch.device) -> Tensor:
    """Copy a table from pinned memory, so that nobody waits for it."""
    here = torch.from_numpy(table)
    return here if device.type == "cpu" else here.pin_memory().to(device, non_blocking=True)
