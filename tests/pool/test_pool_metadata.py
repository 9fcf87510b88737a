"""What the pool spends on knowing its pages follows the pages down."""

from __future__ import annotations

from random import Random

import pytest
from daf_bench.pool.plane_addresses import Pages

from daf.pool.paged_pool import PagedStore

RUN = 8 * 512  # elements of a plane's page


def grown(store: PagedStore, pages: int) -> list[object]:
    return [store.allocate_planes(64 * RUN, 4) for _ in range(pages // 256)]


@pytest.mark.parametrize("page_bytes", [512, 4096])
def test_bitmaps_shrink_after_a_large_step_and_grow_again(page_bytes: int) -> None:
    store = PagedStore(page_bytes=page_bytes)
    kept = store.allocate_planes(1000, 2)
    at_first = store.statistics().metadata_bytes
    tensors = grown(store, 60_000)
    large = store.statistics().metadata_bytes
    for tensor in tensors:
        tensor.release()
    store.trim()
    after = store.statistics().metadata_bytes
    # Records stay, some 80 bytes each, and grow by whole pages of the system.
    records = -(-len(tensors) * 150 // 4096) * 4096
    assert at_first <= after <= at_first + records < large - 10_000
    assert store.native.is_sound()
    again = grown(store, 60_000)
    assert store.statistics().metadata_bytes == large
    assert store.native.is_sound()
    del kept, again


def test_a_survivor_high_up_keeps_its_place_while_the_rest_shrinks() -> None:
    store, random = PagedStore(page_bytes=512), Random(0)
    for _ in range(20):
        tensors = grown(store, random.randrange(4_000, 80_000))
        survivor = tensors.pop(random.randrange(len(tensors)))
        address = Pages(survivor.view).planes(0)[0]
        for tensor in tensors:
            tensor.release()
        store.trim()
        assert store.native.is_sound()
        assert Pages(survivor.view).planes(0)[0] == address
        survivor.release()
        store.trim()
        assert store.native.is_sound()
