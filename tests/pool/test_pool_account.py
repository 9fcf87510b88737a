"""The pool in the process's account: charged as it grows, refused at the limit, giving way."""

from __future__ import annotations

import gc

import pytest
import torch

from daf.core.errors import PoolFullError
from daf.memory.recycling_allocator import RecyclingAllocator, unsupported_reason
from daf.memory.statistics import stats
from daf.pool.paged_pool import PagedStore, PlaneTensor, make_store
from daf.pool.store import PlainStore

PAGE = 4096
RUN = 8 * PAGE
MIB = 2**20

pytestmark = pytest.mark.skipif(unsupported_reason() is not None, reason=str(unsupported_reason()))


@pytest.fixture
def external() -> int:
    """Bytes charged by what other tests left alive."""
    gc.collect()
    return stats()["external_bytes.current"]


def charged_now(before: int) -> int:
    return stats()["external_bytes.current"] - before


def filled(store: PagedStore, pages: int, bits: int = 4) -> PlaneTensor:
    """A sealed tensor of so many pages a plane, one plane of which stays."""
    tensor = store.allocate_planes(pages * RUN, bits, minimum_bits=1, headers=False)
    tensor.seal()
    return tensor


def backed_bytes(store: PagedStore) -> int:
    now = store.statistics()
    return now.live_bytes + now.free_bytes


def test_what_has_memory_is_charged_and_what_has_none_is_not(external: int) -> None:
    store = PagedStore(charged=True)
    assert charged_now(external) == 0
    tensors = [filled(store, 100) for _ in range(3)]
    assert charged_now(external) == backed_bytes(store) >= 1200 * PAGE
    store.evict(300 * PAGE)
    store.trim()
    assert charged_now(external) == backed_bytes(store) == 900 * PAGE
    del tensors
    store.trim()
    assert charged_now(external) == 0
    tensor = filled(store, 10)
    assert charged_now(external) > 0
    tensor.release()
    del store, tensor
    assert charged_now(external) == 0


def test_other_pools_are_nobody_s_business(external: int) -> None:
    tensor = filled(PagedStore(), 100)
    assert tensor.nbytes > 0
    assert charged_now(external) == 0


def test_at_the_limit_the_pool_gives_up_planes_of_its_own(external: int) -> None:
    store = PagedStore(charged=True)
    with RecyclingAllocator(limit_bytes=stats()["held_bytes.current"] + 4 * MIB):
        first = filled(store, 200)  # 3.3 MB
        second = filled(store, 200)
        assert charged_now(external) <= 4 * MIB
    assert first.nbytes < 800 * PAGE
    assert second.nbytes == 800 * PAGE
    assert store.evicted_bytes == 1600 * PAGE - first.nbytes - second.nbytes


def test_what_cannot_fit_the_limit_is_refused_and_counted(external: int) -> None:
    store = PagedStore(charged=True)
    with RecyclingAllocator(limit_bytes=stats()["held_bytes.current"] + 2 * MIB):
        refusals = stats()["refusals"]
        with pytest.raises(PoolFullError, match="limit leaves no room"):
            store.allocate_planes(600 * RUN, 1)
        assert stats()["refusals"] == refusals + 1
    assert charged_now(external) == backed_bytes(store) == 0
    assert filled(store, 600, 1).nbytes == 600 * PAGE
    assert store.native.is_sound()


def test_at_the_limit_a_newcomer_may_begin_with_fewer_planes() -> None:
    store = PagedStore(charged=True)
    with RecyclingAllocator(limit_bytes=stats()["held_bytes.current"] + 2 * MIB):
        refusals = stats()["refusals"]
        newcomer = filled(store, 200)
        assert stats()["refusals"] == refusals
    assert newcomer.nbytes == 2 * 200 * PAGE
    assert store.evicted_bytes == 2 * 200 * PAGE


def test_the_reclaim_hook_is_asked_before_planes_go() -> None:
    store, asked = PagedStore(charged=True), []
    with RecyclingAllocator(limit_bytes=stats()["held_bytes.current"] + 2 * MIB) as allocator:

        def raise_limit(missing: int) -> int:
            asked.append(missing)
            allocator.limit_bytes = None
            return missing

        tensor = filled(store, 100)
        with RecyclingAllocator(reclaim=raise_limit):
            other = filled(store, 200)
    assert len(asked) == 1
    assert asked[0] == 800 * PAGE
    assert store.evicted_bytes == 0
    assert (tensor.nbytes, other.nbytes) == (400 * PAGE, 800 * PAGE)


def test_a_tensor_that_finds_no_room_takes_it_from_the_pool() -> None:
    store = PagedStore(charged=True)
    limit = stats()["held_bytes.current"] + 6 * MIB
    with RecyclingAllocator(limit_bytes=limit, reclaim=store.give_back):
        codes = filled(store, 300)  # 4.9 MB
        tensor = torch.zeros(3 * MIB, dtype=torch.uint8)
        assert stats()["held_bytes.current"] <= limit
        with pytest.raises(RuntimeError, match="allocate memory"):
            torch.zeros(6 * MIB, dtype=torch.uint8)
    assert int(tensor.sum()) == 0
    assert codes.nbytes == 300 * PAGE  # the failing one cost all that may go


def test_giving_back_takes_free_pages_first_and_says_what_it_returned() -> None:
    store = PagedStore(increment_bytes=1000 * PAGE)  # whole steps, so that much lies free
    tensor = filled(store, 100)
    assert store.give_back(500 * PAGE) == 600 * PAGE
    assert tensor.nbytes == 400 * PAGE
    assert store.give_back(50 * PAGE) == 50 * PAGE
    assert tensor.nbytes == 350 * PAGE
    assert store.give_back(2**40) == 250 * PAGE
    assert store.give_back(1) == 0
    small = PagedStore(page_bytes=512)
    tensors = [filled(small, 7) for _ in range(5)]
    before = sum(each.nbytes for each in tensors)
    assert small.give_back(2 * PAGE) >= 2 * PAGE
    assert sum(each.nbytes for each in tensors) <= before - 2 * PAGE


def test_the_default_store_is_the_pool_where_addresses_are_plenty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert isinstance(make_store(), PagedStore)
    assert make_store(10**6).cap_bytes == 10**6  # type: ignore[attr-defined]
    monkeypatch.setattr("daf.pool.paged_pool.soft_limit_bytes", lambda _: 2**33)
    assert isinstance(make_store(), PlainStore)
    assert isinstance(make_store(10**6), PagedStore)


def test_where_the_pool_cannot_be_plain_buffers_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PoolFullError("no addresses")

    monkeypatch.setattr("daf.pool.paged_pool.PagedStore", refuse)
    assert isinstance(make_store(), PlainStore)
    with pytest.raises(PoolFullError):
        make_store(10**6)
