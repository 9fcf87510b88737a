"""Random operations on a pool and its model side by side; every number compared at every step."""

from __future__ import annotations

import mmap
from dataclasses import asdict
from random import Random
from typing import Any

from pool_model import ModelTensor, PoolModel, ceil_divide

from daf import _native
from daf.pool.views import PoolStatistics

SYSTEM_PAGE = mmap.PAGESIZE
ADDRESSES = 2**34


class Machine:
    """One method for each operation; each checks the whole account."""

    def __init__(self, page_bytes: int = SYSTEM_PAGE, cap: int | None = None) -> None:
        self.page_bytes = page_bytes
        self.group_bytes = max(page_bytes, SYSTEM_PAGE)
        self.cap = cap
        self.pool = _native.pool.Pool(ADDRESSES, page_bytes, cap, 0, True)
        self.model = PoolModel(page_bytes)
        self.refusals = 0
        self.account = self.statistics()

    def statistics(self) -> dict[str, Any]:
        return asdict(PoolStatistics(*self.pool.statistics()))

    @property
    def tensors(self) -> dict[int, ModelTensor]:
        return self.model.tensors

    # --- operations -------------------------------------------------------------------------

    def allocate(
        self, count: int, bits: int, minimum: int, headers: bool, importance: list[float]
    ) -> int | None:
        tensor = ModelTensor(count, bits, minimum, headers, importance, self.page_bytes, pins=0)
        tensor.is_new = True
        try:
            handle: int = self.pool.allocate(count, bits, minimum, headers, importance, count)
        except _native.pool.FullError:
            self.check_refusal(tensor.pages - tensor.spare, 8 * bits + 4 * tensor.pages)
            return None
        self.model.add(handle, tensor)  # as one that may lose planes before it is there
        evicted = self.follow_evictions()
        self.model.pin(handle)
        tensor.is_new = False
        self.compare()
        assert not evicted or self.is_tight()
        return handle

    def release(self, handle: int) -> None:
        while handle in self.tensors and self.tensors[handle].pins:
            self.unpin(handle)
        self.pool.release(handle)
        self.model.remove(handle)
        self.follow_evictions()
        self.compare()
        self.check_surplus()

    def pin(self, handle: int) -> None:
        fields = self.pool.pin(handle)
        self.model.pin(handle)
        _, _, _, count, runs, full_runs, bits, kept = fields
        tensor = self.tensors[handle]
        assert (count, bits, runs) == (tensor.count, tensor.bits, len(tensor.kept_by_run))
        assert [kept - (run >= full_runs) for run in range(runs)] == tensor.kept_by_run
        self.compare()

    def unpin(self, handle: int) -> None:
        self.pool.unpin(handle)
        self.model.unpin(handle)
        self.follow_evictions()
        self.compare()

    def evict(self, nbytes: int) -> None:
        expected = min(ceil_divide(nbytes, self.page_bytes), self.model.spare)
        pages, payload, *_ = self.pool.evict(nbytes)
        assert pages == expected
        before = self.model.evicted_payload
        self.follow_evictions()
        assert payload == self.model.evicted_payload - before
        self.compare()
        self.check_surplus()

    def set_cap(self, cap: int | None) -> None:
        self.cap = cap
        held_before = self.held
        _, _, _, over = self.pool.set_cap(cap)
        evicted = self.follow_evictions()
        self.compare()
        assert over == (0 if cap is None else max(0, self.held - cap))
        assert not evicted or over or cap is None or held_before > cap
        assert not evicted or over or self.is_tight()

    def trim(self) -> None:
        self.pool.trim()
        self.compare()
        assert self.page_bytes < SYSTEM_PAGE or self.account["free_bytes"] == 0

    # --- checks -----------------------------------------------------------------------------

    @property
    def held(self) -> int:
        names = ("payload_bytes", "wasted_bytes", "free_bytes", "metadata_bytes")
        return sum(self.account[name] for name in names)

    def follow_evictions(self) -> int:
        """The model gives up as many pages, and it must hit the same tensors."""
        now = self.statistics()
        pages: int = now["evicted_pages"] - self.account["evicted_pages"]
        self.account = now
        for handle in self.model.evict(pages):
            expected = self.tensors[handle].pages * self.page_bytes
            assert self.pool.live_bytes(handle) == expected
        return pages

    def compare(self) -> None:
        model, now = self.model, self.statistics()
        self.account = now
        assert now["payload_bytes"] == model.payload
        assert now["live_pages"] == model.live_pages
        assert now["wasted_bytes"] == model.live_pages * self.page_bytes - model.payload
        assert now["evictable_pages"] == model.spare
        assert now["evicted_pages"] == model.evicted_pages
        assert now["evicted_payload_bytes"] == model.evicted_payload
        assert now["live_tensors"] == len(model.tensors)
        backed = now["grown_bytes"] - now["returned_bytes"]
        assert backed == now["free_bytes"] + model.live_pages * self.page_bytes
        assert now["held_peak_bytes"] >= self.held
        assert self.cap is None or self.held <= self.cap or model.spare == 0

    def is_tight(self) -> bool:
        """Not a page more went than was needed (where each page is memory of its own)."""
        if self.page_bytes < SYSTEM_PAGE:
            return True
        bitmaps = 4096  # what their next step takes, and more
        assert self.cap is not None
        room = self.cap - self.held + self.account["free_bytes"]
        return room < self.page_bytes + bitmaps

    def check_refusal(self, pages: int, table_bytes: int) -> None:
        """It really would not have fit, and nothing was given up."""
        self.refusals += 1
        if self.page_bytes < SYSTEM_PAGE:
            # Pages smaller than the system's may lie so that giving up some frees no memory.
            self.follow_evictions()
        now = self.statistics()
        assert now["evicted_pages"] == self.model.evicted_pages
        self.account = now
        least = (self.model.live_pages - self.model.spare + pages) * self.page_bytes
        records = 2 * SYSTEM_PAGE
        assert self.cap is not None
        if self.page_bytes >= SYSTEM_PAGE:
            needed = least + now["metadata_bytes"] + table_bytes + records + self.group_bytes
            assert needed > self.cap
        self.compare()

    def check_surplus(self) -> None:
        """No more than a 128th of what lives is kept empty."""
        if self.page_bytes >= SYSTEM_PAGE:
            live = self.model.live_pages
            assert self.account["free_bytes"] <= max(live // 128, 4) * self.page_bytes

    def check_deeply(self) -> None:
        assert self.pool.is_sound()
        region = self.held - self.account["metadata_bytes"]
        assert self.pool.resident_bytes() <= region


def random_importance(random: Random, bits: int) -> list[float]:
    """Few values, so that ties are many."""
    return [random.choice((0.0, 0.5, 1.0, random.random())) for _ in range(bits)]


def random_cap(machine: Machine, random: Random, base: int) -> int | None:
    """Room for a quarter of ``base`` bytes of pages, or up to twice ``base``; sometimes no cap."""
    pages = int(base * 4 ** random.uniform(-1, 0.5))
    return None if random.random() < 0.1 else machine.account["metadata_bytes"] + pages


def random_step(machine: Machine, random: Random, tensors: int, largest: int) -> None:
    """One operation; ``tensors`` of up to ``largest`` elements live in the long run."""
    handles = list(machine.tensors)
    choice = random.random()
    if not handles or choice < 0.25 * (len(handles) < 2 * tensors):
        bits = random.randint(1, 8)
        count = int(largest ** random.random())
        minimum = random.randint(1, bits)
        importance = random_importance(random, bits)
        machine.allocate(count, bits, minimum, random.random() < 0.7, importance)
        return
    handle = random.choice(handles)
    tensor = machine.tensors[handle]
    if choice < 0.5:
        machine.unpin(handle) if tensor.pins else machine.pin(handle)
    elif choice < 0.62:
        machine.unpin(handle) if tensor.pins else machine.release(handle)
    elif choice < 0.66 or len(handles) >= 2 * tensors:
        machine.release(handle)
    elif choice < 0.86:
        machine.evict(random.randrange(8 * machine.page_bytes))
    elif choice < 0.93:
        machine.set_cap(random_cap(machine, random, max(32_000, tensors * largest // 10)))
    elif choice < 0.94:
        machine.trim()
