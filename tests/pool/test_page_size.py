"""Pages fit the tensors at hand: chosen while nothing lives, by what lived last."""

from __future__ import annotations

import pytest

from daf import _native
from daf.core.errors import KernelError
from daf.pool.page_size import DEFAULT_PAGE_BYTES, PageFitter, choose_page_bytes
from daf.pool.paged_pool import PagedStore

LARGE, SMALL = 2**23, 5000


def live(store: PagedStore, counts: list[int]) -> float:
    """Share of the pages that is wasted, with tensors of so many elements alive."""
    tensors = [store.allocate_planes(count, 2, minimum_bits=1) for count in counts]
    now = store.statistics()
    assert now.live_tensors >= len(tensors)
    return now.wasted_bytes / now.payload_bytes


def test_the_first_guess_leaves_room_for_smaller_tensors() -> None:
    fitter = PageFitter()
    assert fitter.choose(LARGE, 2) == DEFAULT_PAGE_BYTES
    assert PageFitter().choose(SMALL, 2) < 512


def test_pages_follow_what_lived_last() -> None:
    fitter = PageFitter()
    for tensors in ([(LARGE, 2)] * 3, [(SMALL, 3)] * 5, [(LARGE, 2)]):
        for tensor in tensors:
            fitter.note(*tensor)
        assert fitter.choose(1, 1) == choose_page_bytes(tensors, PageFitter.WASTE)


def test_a_fitted_pool_changes_its_pages_only_while_empty() -> None:
    store = PagedStore(page_bytes=None, poison=True)
    first = live(store, [SMALL] * 40)
    small_pages = store.page_bytes
    assert small_pages < 512
    assert first < 0.5
    live(store, [LARGE] * 2)  # fitted to the small ones before it
    assert store.page_bytes <= small_pages
    keeper = store.allocate_planes(LARGE, 2)
    pages = store.page_bytes
    assert pages > DEFAULT_PAGE_BYTES
    live(store, [SMALL] * 40)
    assert store.page_bytes == pages
    del keeper
    live(store, [SMALL])
    assert store.native.is_sound()


def test_pages_cannot_change_under_a_living_tensor() -> None:
    store = PagedStore()
    tensor, in_pages_of_512 = store.allocate_planes(LARGE, 1), (LARGE, 1, 1, True, [0.0], 0, 512)
    store.native.release(store.native.allocate(*in_pages_of_512), True)
    assert store.page_bytes == DEFAULT_PAGE_BYTES
    tensor.release()
    handle = store.native.allocate(*in_pages_of_512)
    assert store.page_bytes == 512
    assert store.statistics().live_pages == LARGE // 8 // 512 + LARGE // 256 * 4 // 512
    assert store.native.live_bytes(handle) == 512 * store.statistics().live_pages
    assert store.native.is_sound()


def test_sizes_that_are_no_pages_are_refused() -> None:
    store = PagedStore()
    with pytest.raises(_native.pool.MisuseError, match="power of two"):
        store.native.allocate(LARGE, 1, 1, True, [0.0], 0, 48)
    with pytest.raises(KernelError):
        PagedStore(page_bytes=48)


def test_what_went_is_told_in_the_bytes_of_its_own_pages() -> None:
    """Though pages have another size by the time somebody asks."""
    store = PagedStore(page_bytes=None)
    sizes = []
    for count in (LARGE, LARGE, SMALL, SMALL):
        held = store.allocate_planes(count, 3, minimum_bits=1)
        held.seal()
        sizes.append(store.page_bytes)
        store.evict(1)
        del held
    entries, _ = store.take_evictions()
    assert len(set(sizes)) > 1
    assert [entry.nbytes for entry in entries] == [
        entry.pages * size for entry, size in zip(entries, sizes, strict=True)
    ]
