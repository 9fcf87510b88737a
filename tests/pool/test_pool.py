"""The pool's Python face: where bytes lie, what is given up, and every misuse as an error."""

from __future__ import annotations

import ctypes
import gc
import math
import sys
from itertools import pairwise

import numpy as np
import pytest
from daf_bench.pool.plane_addresses import Pages

from daf import _native
from daf.core.code_format import header_bytes, plane_bytes
from daf.core.code_tables import rotated_error
from daf.core.errors import DafError, KernelError, PoolFullError
from daf.pool.page_size import choose_page_bytes
from daf.pool.paged_pool import PagedStore, PlaneTensor, plane_importance
from daf.pool.store import Store
from daf.pool.views import PlaneView

PAGE = 4096
RUN = 8 * PAGE
ALL = 2**60


def paged(store: PagedStore, runs: int = 4, bits: int = 4, **options: object) -> PlaneTensor:
    """A sealed tensor of whole runs, one plane of which always stays."""
    tensor = store.allocate_planes(runs * RUN, bits, **{"minimum_bits": 1, **options})
    tensor.seal()
    return tensor


def kept(tensor: PlaneTensor) -> list[int]:
    with tensor.pinned() as view:
        return [Pages(view).kept_bits(run) for run in range(Pages(view).runs)]


def read(address: int, nbytes: int) -> bytes:
    return ctypes.string_at(address, nbytes)


# --- where bytes lie --------------------------------------------------------------------------


def test_every_page_and_header_has_a_place_of_its_own() -> None:
    store = PagedStore()
    tensors = [store.allocate_planes(5 * RUN + 1000, 3) for _ in range(4)]
    pieces = []
    for tensor in tensors:
        view = tensor.view
        assert Pages(view).runs == 6
        assert Pages(view).run_elements == RUN
        for run in range(Pages(view).runs):
            assert len(Pages(view).planes(run)) == 3
            pieces += [(address, PAGE) for address in Pages(view).planes(run)]
            pieces.append((Pages(view).headers(run), PAGE // 8))
    pieces.sort()
    for (first, size), (second, _) in pairwise(pieces):
        assert first + size <= second
    for index, (address, size) in enumerate(pieces):
        ctypes.memset(address, index % 251, size)
    for index, (address, size) in enumerate(pieces):
        assert read(address, size) == bytes([index % 251]) * size


def test_headers_of_consecutive_runs_are_one_array() -> None:
    tensor = PagedStore().allocate_planes(8 * RUN, 1)
    view = tensor.view
    starts = [Pages(view).headers(run) for run in range(8)]
    assert np.diff(starts).tolist() == [RUN // 256 * 4] * 7


@pytest.mark.parametrize("page_bytes", [32, 64, 512, 4096, 65536])
def test_account_of_one_tensor(page_bytes: int) -> None:
    store = PagedStore(page_bytes=page_bytes)
    count, bits = 70_001, 3
    tensor = store.allocate_planes(count, bits)
    now = store.statistics()
    assert now.payload_bytes == plane_bytes(count, bits) + header_bytes(count)
    plane_pages = math.ceil(plane_bytes(count, 1) / page_bytes)
    header_pages = math.ceil(header_bytes(count) / page_bytes)
    assert now.live_pages == bits * plane_pages + header_pages
    assert now.wasted_bytes == now.live_pages * page_bytes - now.payload_bytes
    assert tensor.nbytes == now.live_pages * page_bytes
    assert now.held_bytes == store.live_bytes == now.held_peak_bytes
    assert now.held_bytes >= now.live_bytes + 4 * now.live_pages  # a page table entry each
    del tensor
    assert store.statistics().live_pages == 0


def test_memory_arrives_when_it_is_written_and_leaves_when_it_is_free() -> None:
    store = PagedStore()
    tensor = store.allocate_planes(64 * RUN, 1, headers=False)
    assert store.native.resident_bytes() == 0
    for run in range(64):
        ctypes.memset(Pages(tensor.view).planes(run)[0], 1, PAGE)
    assert store.native.resident_bytes() == 64 * PAGE
    tensor.release()
    assert store.native.resident_bytes() <= store.statistics().free_bytes <= 4 * PAGE
    store.trim()
    assert store.native.resident_bytes() == store.statistics().free_bytes == 0


def test_pool_is_a_store() -> None:
    store: Store = PagedStore(poison=True)
    planes = [store.allocate_planes(count, 1, headers=False) for count in (1, RUN + 1, 0)]
    assert [each.nbytes for each in planes] == [PAGE, 2 * PAGE, 0]
    held = store.live_bytes
    assert held >= 3 * PAGE
    del planes
    assert store.live_bytes < held


def test_freed_pages_are_poisoned_under_test() -> None:
    store = PagedStore(poison=True, increment_bytes=10**6)
    tensor = store.allocate_planes(RUN, 1, headers=False)
    address = Pages(tensor.view).planes(0)[0]
    ctypes.memset(address, 7, PAGE)
    tensor.release()
    assert read(address, PAGE) == b"\xdb" * PAGE


# --- what is given up -------------------------------------------------------------------------


def test_the_least_important_plane_goes_first_page_by_page() -> None:
    store = PagedStore()
    dear = paged(store, importance=[8.0, 4.0, 2.0, 1.0])
    cheap = paged(store, importance=[0.8, 0.4, 3.0, 0.5])
    assert store.evict(1).pages == 1
    assert kept(cheap) == [4, 4, 4, 3]
    store.evict(4 * PAGE)
    assert kept(cheap) == [3, 3, 3, 3]
    assert kept(dear) == [4, 4, 4, 3]
    store.evict(5 * PAGE)
    assert kept(dear) == [3, 3, 2, 2]  # 2.0 is now less than cheap's 3.0
    assert kept(cheap) == [3, 3, 3, 3]
    store.evict(ALL)
    assert kept(dear) == kept(cheap) == [1, 1, 1, 1]
    assert store.evict(PAGE).pages == 0


def test_equal_importance_goes_in_the_order_of_sealing() -> None:
    store = PagedStore()
    tensors = [paged(store, importance=[1.0] * 4, tag=tag) for tag in range(3)]
    store.evict(12 * PAGE)
    assert [entry.tag for entry in store.take_evictions()[0]] == [0, 1, 2]
    assert [kept(tensor) for tensor in tensors] == [[3] * 4] * 3


def test_evictions_are_told_once() -> None:
    store = PagedStore()
    tensor = paged(store, importance=[4.0, 3.0, 2.0, 1.0], tag=2**63 + 5)
    store.evict(6 * PAGE)
    entries, lost = store.take_evictions()
    assert lost == 0
    handle = tensor.handle
    assert entries == ((2**63 + 5, handle, 3, 4, 4 * PAGE), (2**63 + 5, handle, 2, 2, 2 * PAGE))
    assert store.take_evictions() == ((), 0)


def test_entries_beyond_the_log_are_counted() -> None:
    store = PagedStore()
    tensors = [paged(store, runs=1, bits=2) for _ in range(260)]
    store.evict(ALL)
    entries, lost = store.take_evictions()
    assert (len(entries), lost) == (256, 4)
    assert store.statistics().evicted_pages == len(tensors)


def test_new_tensors_push_out_the_least_important_planes_but_no_more_than_needed() -> None:
    store = PagedStore(cap_bytes=1_000_000)
    tensors = []
    while store.statistics().evicted_pages == 0:
        tensors.append(paged(store, importance=[999.0, 998.0, 997.0, float(len(tensors))]))
    now = store.statistics()
    assert now.held_bytes <= 1_000_000 < now.held_bytes + PAGE
    assert kept(tensors[0])[-1] == 3
    assert kept(tensors[-1]) == [4] * 4


def test_a_newcomer_that_is_least_important_begins_with_fewer_planes() -> None:
    store = PagedStore(cap_bytes=400_000)
    dear = paged(store, runs=16, importance=[9.0] * 4)
    newcomer = store.allocate_planes(16 * RUN, 4, minimum_bits=1, importance=[8.0] * 4, tag=7)
    widths = [Pages(newcomer.view).kept_bits(run) for run in range(16)]
    missing = sum(4 - width for width in widths)
    assert kept(dear) == [4] * 16
    assert widths == sorted(widths, reverse=True)
    assert 0 < missing < 48
    now = store.statistics()
    assert now.held_bytes <= 400_000 < now.held_bytes + 2 * PAGE
    assert (now.evicted_pages, now.evicted_payload_bytes) == (missing, missing * PAGE)
    entries, lost = store.take_evictions()
    assert lost == 0
    assert {entry.tag for entry in entries} == {7}
    assert [entry.plane for entry in entries] == sorted((e.plane for e in entries), reverse=True)
    assert sum(entry.pages for entry in entries) == missing
    newcomer.seal()
    assert store.native.is_sound()


def test_even_a_newcomer_s_least_planes_push_out_what_is_less_important() -> None:
    store = PagedStore(cap_bytes=400_000)
    cheap = paged(store, runs=16, importance=[1.0] * 4)
    newcomer = paged(store, runs=16, importance=[2.0] * 4)
    assert set(kept(cheap)) == {1, 2}
    assert kept(newcomer) == [4] * 16
    with pytest.raises(PoolFullError):
        paged(store, runs=16 * 4, importance=[3.0] * 4, minimum_bits=3)


def test_lowering_the_cap_evicts_at_once_and_says_what_went() -> None:
    store = PagedStore()
    tensors = [paged(store, runs=16) for _ in range(10)]
    before = store.statistics()
    given = store.set_cap(before.held_bytes // 2)
    after = store.statistics()
    assert after.held_bytes <= before.held_bytes // 2 < after.held_bytes + PAGE
    assert given.pages == before.live_pages - after.live_pages
    assert given.payload_bytes == before.payload_bytes - after.payload_bytes
    assert given.returned_bytes == after.returned_bytes > 0
    assert given.over_bytes == 0
    assert all(min(kept(tensor)) >= 1 for tensor in tensors)


def test_pinned_planes_stay_and_go_when_unpinned() -> None:
    store = PagedStore()
    tensor = paged(store, runs=16)
    with tensor.pinned() as view:
        given = store.set_cap(store.live_bytes // 2)
        assert given.pages == 0
        assert given.over_bytes > 0
        assert {Pages(view).kept_bits(run) for run in range(16)} == {4}
    assert store.statistics().held_bytes <= store.statistics().cap_bytes
    assert min(kept(tensor)) < 4


def test_planes_being_written_stay() -> None:
    store = PagedStore()
    tensor = store.allocate_planes(4 * RUN, 4, minimum_bits=1)
    assert store.evict(ALL).pages == 0
    tensor.seal()
    assert store.evict(ALL).pages == 12


def test_headers_and_minimum_planes_are_never_given_up() -> None:
    store = PagedStore()
    tensor = store.allocate_planes(4 * RUN, 4, minimum_bits=2)
    for run in range(4):
        ctypes.memset(Pages(tensor.view).headers(run), run + 1, RUN // 64)
    tensor.seal()
    store.set_cap(0)
    assert kept(tensor) == [2] * 4
    with tensor.pinned() as view:
        assert [read(Pages(view).headers(run), RUN // 64)[-1] for run in range(4)] == [1, 2, 3, 4]
    assert store.statistics().live_pages == 2 * 4 + 1


def test_default_importance_prefers_what_removes_little_error() -> None:
    values = plane_importance(2**20, 4, weight=3.0)
    errors = [1.0] + [rotated_error(4, bits) for bits in (1, 2, 3, 4)]
    assert values == pytest.approx([3.0 * (high - low) / 2**17 for high, low in pairwise(errors)])
    assert sorted(values[1:], reverse=True) == values[1:]
    assert errors[1:] == pytest.approx([0.567, 0.131, 0.035, 0.0094], rel=0.12)


# --- growth -----------------------------------------------------------------------------------


def test_the_fixed_increment_takes_whole_steps_and_refuses_less() -> None:
    increment = 256 * PAGE
    store = PagedStore(increment_bytes=increment)
    tensor = paged(store, runs=1)
    assert store.statistics().grown_bytes == increment
    more = paged(store, runs=100)
    assert store.statistics().grown_bytes == 2 * increment
    assert (tensor.nbytes, more.nbytes) == (5 * PAGE, (400 + 13) * PAGE)
    tight = PagedStore(increment_bytes=increment, cap_bytes=2 * increment - PAGE)
    with pytest.raises(PoolFullError):
        paged(tight, runs=100, minimum_bits=4)


def test_adaptive_growth_holds_little_more_than_it_uses() -> None:
    store, tensors = PagedStore(), []
    for _ in range(200):
        tensors.append(paged(store, runs=16))
        now = store.statistics()
        assert now.free_bytes <= max(now.live_bytes // 128, 4 * PAGE)
    while tensors:
        tensors.pop()
        now = store.statistics()
        assert now.free_bytes <= max(now.live_bytes // 128, 4 * PAGE)


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [([(2**20, 4)] * 3, 16384), ([(40_000, 2)], 256), ([], 4096), ([(2**26, 2)], 65536)],
)
def test_page_size_fits_the_tensors(tensors: list[tuple[int, int]], expected: int) -> None:
    chosen = choose_page_bytes(tensors)
    assert chosen == expected
    store = PagedStore(page_bytes=chosen)
    held = [store.allocate_planes(count, bits) for count, bits in tensors]
    now = store.statistics()
    if len(held) > 1:
        assert now.wasted_bytes + 4 * now.live_pages <= 0.01 * now.payload_bytes


# --- misuse -----------------------------------------------------------------------------------


def test_what_cannot_fit_is_refused_and_nothing_is_given_up() -> None:
    store = PagedStore(cap_bytes=600_000)
    tensor = paged(store, runs=16)
    with pytest.raises(PoolFullError, match=r"asked for 1\d{6} bytes.*cap 600000.*raise the cap"):
        store.allocate_planes(64 * RUN, 4)
    with pytest.raises(MemoryError):
        store.allocate_planes(64 * RUN, 4)
    assert kept(tensor) == [4] * 16
    assert issubclass(PoolFullError, DafError)


def test_double_free_and_use_after_free() -> None:
    store = PagedStore()
    tensor = paged(store)
    tensor.release()
    for misuse in (tensor.release, lambda: tensor.nbytes, lambda: tensor.pinned().__enter__()):
        with pytest.raises((KernelError, _native.pool.MisuseError), match="not alive here"):
            misuse()


def test_a_handle_reused_slot_does_not_revive_an_old_handle() -> None:
    store = PagedStore()
    old = paged(store)
    old.release()
    new = paged(store)
    assert old.handle != new.handle
    with pytest.raises(KernelError):
        old.release()
    assert kept(new) == [4] * 4


def test_foreign_and_invented_handles() -> None:
    mine, other = PagedStore(), PagedStore()
    tensor, twin = paged(mine), paged(other)
    assert tensor.handle % 2**24 == twin.handle % 2**24  # the same slot in both pools
    for handle in (tensor.handle, 0, 1, 2**64 - 1):
        for name in ("release", "pin", "unpin", "live_bytes"):
            with pytest.raises(_native.pool.MisuseError, match="not alive here"):
                getattr(other.native, name)(handle)
    assert other.native.is_sound()


def test_views_end_with_their_pin() -> None:
    store = PagedStore()
    tensor = store.allocate_planes(RUN, 2)
    view = tensor.view
    tensor.seal()
    with tensor.pinned() as second:
        assert Pages(second).planes(0)
    for ended in (view, second):
        with pytest.raises(KernelError, match="no longer pinned"):
            Pages(ended).planes(0)
    with pytest.raises(KernelError, match="sealed"):
        _ = tensor.view


def test_release_while_somebody_reads_is_refused() -> None:
    tensor = paged(PagedStore())
    with tensor.pinned() as view:
        with pytest.raises(KernelError, match="pinned"):
            tensor.release()
        assert Pages(view).planes(0)
    tensor.release()


def test_runs_that_do_not_exist() -> None:
    tensor = PagedStore().allocate_planes(RUN, 2)
    view = tensor.view
    for run in (-1, 1):
        with pytest.raises(KernelError, match="has 1"):
            Pages(view).planes(run)
        with pytest.raises(KernelError, match="has 1"):
            Pages(view).headers(run)


@pytest.mark.parametrize(
    "options",
    [
        {"bits": 0},
        {"bits": 65},
        {"bits": 4, "minimum_bits": 0},
        {"bits": 4, "minimum_bits": 5},
        {"bits": 2, "importance": [1.0]},
        {"bits": 2, "importance": [1.0, math.nan]},
        {"bits": 2, "importance": [1.0, math.inf]},
        {"bits": 2, "importance": [1.0, -1.0]},
        {"bits": 2, "tag": -1},
    ],
)
def test_requests_that_mean_nothing(options: dict[str, object]) -> None:
    store = PagedStore()
    bits = options.pop("bits")
    with pytest.raises(KernelError):
        store.allocate_planes(1000, bits, **{"importance": [0.0] * 70, **options})
    assert store.statistics().live_tensors == 0


@pytest.mark.parametrize(
    "options", [{"page_bytes": 48}, {"page_bytes": 16}, {"cap_bytes": -1}, {"increment_bytes": 0}]
)
def test_pools_that_mean_nothing(options: dict[str, int]) -> None:
    with pytest.raises(KernelError, match="asked"):
        PagedStore(**options)


def test_empty_tensors() -> None:
    store = PagedStore()
    tensor = store.allocate_planes(0, 4, minimum_bits=1)
    tensor.seal()
    assert (tensor.nbytes, kept(tensor)) == (0, [])
    assert store.evict(ALL).pages == 0


def test_too_large_to_exist() -> None:
    store = PagedStore()
    with pytest.raises(PoolFullError):
        store.allocate_planes(2**62, 4)
    assert store.native.is_sound()


def test_dropped_references_free_even_after_an_exception() -> None:
    store = PagedStore()

    def fails() -> None:
        tensor = store.allocate_planes(RUN, 2)
        view: PlaneView = tensor.view
        assert Pages(view).runs == 1
        raise ValueError

    with pytest.raises(ValueError):
        fails()
    sys.exc_info()
    gc.collect()
    assert store.statistics().live_tensors == 0
