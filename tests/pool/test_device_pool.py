"""A device's pool, on a device made up of closures that run late: nothing is read after it went."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from late_streams import LateStreams
from writing import writing

from daf.core.code_format import header_bytes, plane_bytes
from daf.core.errors import KernelError, PoolFullError
from daf.kernels.triton.planes import DevicePlanes
from daf.pool import device_pool
from daf.pool.device_pool import DevicePagedStore, DevicePlaneTensor, DeviceStores

CPU = torch.device("cpu")
IMPORTANCE = {bits: [4.0, 3.0, 2.0, 1.0][:bits] for bits in (1, 2, 3, 4)}


def places(planes: DevicePlanes) -> list[int]:
    """Where each page that is there begins (headers' too), in bytes, by the table alone."""
    assert planes.table is not None
    table = planes.table.numpy().tolist()
    present = (planes.kept - 1) * planes.runs + planes.full_runs
    entries = table[:present] + table[planes.bits * planes.runs :]
    return [planes.region.data_ptr() + 4 * entry for entry in entries]


def used_spans(planes: DevicePlanes, headers: bool) -> list[tuple[int, int]]:
    """(first, last) address of what lies in each page, as kernels count."""
    page_bytes = 4 * planes.page_words

    def cut(nbytes: int) -> list[int]:
        return [min(page_bytes, nbytes - first) for first in range(0, nbytes, page_bytes)]

    sizes = cut(plane_bytes(planes.elements, 1)) * planes.kept
    sizes = sizes[: (planes.kept - 1) * planes.runs + planes.full_runs]
    sizes += cut(header_bytes(planes.elements)) if headers else []
    return [(place, place + size) for place, size in zip(places(planes), sizes, strict=True)]


def held(store: DevicePagedStore, count: int, bits: int, **options: Any) -> DevicePlaneTensor:
    """Planes that have been written, of which all but the first may go."""
    options = {"minimum_bits": 1, "importance": IMPORTANCE[bits]} | options
    tensor = store.allocate_planes(count, bits, **options)
    with writing(tensor):
        pass
    return tensor


def kept_bits(tensor: DevicePlaneTensor) -> int:
    with tensor.pinned() as planes:
        return planes.kept


# --- streams --------------------------------------------------------------------------------


ACTIONS = st.tuples(
    st.sampled_from("wwwrrrfegac"), st.integers(0, 2), st.integers(0, 7), st.integers(1, 4)
)


@given(st.lists(ACTIONS, min_size=4, max_size=40), st.permutations([0, 1, 2]))
def test_no_stream_reads_what_another_has_overwritten(steps, order) -> None:
    """Three streams write, read, free, evict; memory that is freed is soon somebody else's."""
    streams, memory = LateStreams(3), {}
    store = DevicePagedStore(CPU, streams=streams)
    living: list[tuple[int, DevicePlaneTensor]] = []

    def write(name: int, addresses: list[int]) -> None:
        memory.update(dict.fromkeys(addresses, name))

    def read(name: int, addresses: list[int]) -> None:
        assert {memory[address] for address in addresses} <= {name}

    for name, (kind, stream, which, amount) in enumerate(steps):
        with streams.use(stream):
            if kind == "w":
                # Whether or not malloc does, PyTorch's allocator uses memory again in home's order.
                tensor = store.allocate_planes(
                    amount * 5000, amount, minimum_bits=1, importance=IMPORTANCE[amount]
                )
                with writing(tensor) as planes:
                    streams.issue(partial(write, name, places(planes)))
                living.append((name, tensor))
            elif kind == "r" and living:
                owner, tensor = living[which % len(living)]
                with tensor.pinned() as planes:
                    streams.issue(partial(read, owner, places(planes)))
            elif kind == "f" and living:
                del living[which % len(living)]
            elif kind == "e":
                store.give_back(which * 1000)
            elif kind == "c":
                store.set_cap([None, 10_000][which % 2])
                store.set_cap(None)
            elif kind == "a":
                streams.advance(which % 3)
            tensor = None
    streams.finish(order)


def test_the_stream_that_came_first_waits_for_nobody() -> None:
    streams = LateStreams(2)
    store = DevicePagedStore(CPU, streams=streams)
    tensor = held(store, 5000, 2)
    kept_bits(tensor)
    assert streams.queues == [[], []]
    with streams.use(1):
        kept_bits(tensor)
    assert streams.queues == [[(1, 1)], [(0, 0)]]


# --- pages ----------------------------------------------------------------------------------


@given(st.data())
def test_pages_lie_in_memory_that_is_their_tensor_s_and_apart(data) -> None:
    store = DevicePagedStore(CPU)
    living: list[tuple[DevicePlaneTensor, bool]] = []
    for _ in range(data.draw(st.integers(1, 10))):
        if living and data.draw(st.booleans()):
            living.pop(data.draw(st.integers(0, len(living) - 1)))
        count, bits = data.draw(st.integers(1, 90_000)), data.draw(st.integers(1, 4))
        headers = data.draw(st.booleans())
        living.append((held(store, count, bits, headers=headers), headers))
        store.give_back(data.draw(st.sampled_from([0, 0, 1, 20_000])))
        all_spans = []
        for tensor, has_headers in living:
            blocks = [tensor._stays, *tensor._may_go.values()]
            owned = [(block.data_ptr(), block.data_ptr() + block.nbytes) for block in blocks]
            with tensor.pinned() as planes:
                spans = used_spans(planes, has_headers)
            assert all(any(a <= first < last <= b for a, b in owned) for first, last in spans)
            all_spans += spans
        all_spans.sort()
        assert all(last <= first for (_, last), (first, _) in pairwise(all_spans))
        payload = store.statistics().payload_bytes
        tables = sum(tensor.table.nbytes for tensor, _ in living)
        assert store.lent_bytes == payload + tables <= store.live_bytes
    living.clear()
    del tensor
    assert (store.lent_bytes, store.statistics().live_bytes) == (0, 0)


# --- giving up ------------------------------------------------------------------------------


def test_the_least_important_plane_goes_as_a_whole_and_its_memory_with_it() -> None:
    store = DevicePagedStore(CPU)
    tensors = [
        held(store, 100_000, 3, importance=[9.0, 5.0, 1.0], tag=7),
        held(store, 50_000, 3, importance=[9.0, 4.0, 2.0], tag=8),
    ]
    before = [tensor.nbytes for tensor in tensors]
    planes = [plane_bytes(100_000, 1), plane_bytes(50_000, 1)]
    assert store.give_back(1) == planes[0]
    assert [kept_bits(tensor) for tensor in tensors] == [2, 3]
    assert store.give_back(planes[1] + 1) == planes[1] + planes[1]
    assert [kept_bits(tensor) for tensor in tensors] == [2, 1]
    assert store.give_back(10**9) == planes[0]
    assert [kept_bits(tensor) for tensor in tensors] == [1, 1]
    assert store.give_back(10**9) == 0
    assert [tensor.nbytes for tensor in tensors] == [
        total - 2 * plane for total, plane in zip(before, planes, strict=True)
    ]
    assert store.evicted_bytes == 2 * sum(planes)
    entries, unlisted = store.take_evictions()
    assert [(entry.tag, entry.plane) for entry in entries] == [(7, 2), (8, 2), (8, 1), (7, 1)]
    assert unlisted == 0


def test_memory_goes_back_when_the_last_reference_does() -> None:
    store = DevicePagedStore(CPU)
    tensor = held(store, 100_000, 2)
    blocks = [weakref.ref(tensor._stays), weakref.ref(tensor._may_go[1])]
    assert all(block() is not None for block in blocks)
    store.give_back(1)
    assert blocks[1]() is None
    assert blocks[0]() is not None
    del tensor
    assert blocks[0]() is None
    assert store.statistics().live_tensors == 0


def test_what_is_read_or_written_stays_until_then() -> None:
    store = DevicePagedStore(CPU)
    tensor = store.allocate_planes(100_000, 3, minimum_bits=1, importance=IMPORTANCE[3])
    with writing(tensor):
        pass
    with writing(store.allocate_planes(10_000, 2, minimum_bits=1, importance=[2.0, 1.0])):
        assert store.set_cap(1).payload_bytes == 2 * plane_bytes(100_000, 1)
    store.set_cap(None)
    tensor = store.allocate_planes(100_000, 3, minimum_bits=1, importance=IMPORTANCE[3])
    with writing(tensor):
        assert store.set_cap(1).pages == 0
    assert not tensor._may_go
    store.set_cap(None)
    tensor = held(store, 100_000, 3)
    with tensor.pinned():
        assert store.set_cap(1).pages == 0
        assert set(tensor._may_go) == {1, 2}
    assert not tensor._may_go
    assert kept_bits(tensor) == 1
    with pytest.raises(KernelError, match="sealed"), writing(tensor):
        pass


def test_what_was_asked_for_while_it_was_in_use_follows_when_it_is_not() -> None:
    plane = plane_bytes(100_000, 1)
    store = DevicePagedStore(CPU)
    written = store.allocate_planes(100_000, 3, minimum_bits=1, importance=IMPORTANCE[3])
    with writing(written) as planes:
        assert store.give_back(plane) == 0
        assert planes.kept == 3
    assert kept_bits(written) == 2  # as much as was asked for
    read = held(store, 100_000, 4)
    with read.pinned() as planes, read.pinned():
        assert store.give_back(3 * plane) == plane  # the other tensor's
        assert (planes.kept, kept_bits(written)) == (4, 1)
    assert kept_bits(read) == 2
    with read.pinned():
        pass
    assert kept_bits(read) == 2


@pytest.mark.parametrize("ends", ["is freed", "fails"])
def test_nothing_is_owed_any_more_when_what_was_in_use_is_gone(ends: str) -> None:
    store = DevicePagedStore(CPU)
    passing = store.allocate_planes(100_000, 1)
    if ends == "fails":
        with pytest.raises(RuntimeError, match="a kernel"), writing(passing):
            raise RuntimeError("a kernel")
    assert store.give_back(10**9) == 0
    del passing
    gc.collect()
    later = held(store, 100_000, 3)
    with later.pinned():
        pass
    assert kept_bits(later) == 3


def test_what_makes_room_for_a_newcomer_under_the_cap_is_gone_when_it_is_there() -> None:
    store = DevicePagedStore(CPU)
    first = held(store, 100_000, 3, importance=[9.0, 1.0, 1.0])
    store.set_cap(store.statistics().held_bytes + plane_bytes(100_000, 1))
    newcomer = store.allocate_planes(100_000, 2, importance=[9.0, 9.0])
    assert not first._may_go
    with writing(newcomer) as planes:
        assert planes.is_whole


def test_a_newcomer_that_is_least_important_begins_with_fewer_planes() -> None:
    store = DevicePagedStore(CPU)
    first = held(store, 100_000, 2, importance=[9.0, 8.0])
    store.set_cap(store.statistics().held_bytes + 3 * plane_bytes(100_000, 1))
    newcomer = held(store, 100_000, 4, importance=[9.0, 3.0, 2.0, 1.0])
    with newcomer.pinned() as planes:
        runs = (planes.kept - 1) * planes.runs + planes.full_runs
        assert planes.runs < runs < 4 * planes.runs
        assert len(set(places(planes))) == len(places(planes))
    assert kept_bits(first) == 2
    whole = 4 * plane_bytes(100_000, 1) + header_bytes(100_000)
    assert plane_bytes(100_000, 1) + header_bytes(100_000) < newcomer.nbytes < whole
    tables = sum(tensor.table.nbytes for tensor in (first, newcomer))
    assert store.lent_bytes == store.statistics().payload_bytes + tables
    with pytest.raises(PoolFullError, match="cap"):
        held(store, 10**7, 2)


# --- memory that is not there ---------------------------------------------------------------


class Short:
    """Memory of a device that has so many bytes."""

    def __init__(
        self, limit_bytes: int, error: type[RuntimeError] = torch.OutOfMemoryError
    ) -> None:
        self.limit_bytes = limit_bytes
        self.error = error
        self.asked = 0
        self._alive: list[weakref.ref[torch.Tensor]] = []

    def words_on(self, device: torch.device, words: int) -> torch.Tensor:
        self._alive = [each for each in self._alive if each() is not None]
        taken = sum(each().nbytes for each in self._alive)  # type: ignore[union-attr]
        if taken + 4 * words > self.limit_bytes:
            raise self.error("no memory")
        found = torch.empty(words, dtype=torch.int32, device=device)
        self._alive.append(weakref.ref(found))
        return found


def test_where_the_device_refuses_planes_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    size = plane_bytes(100_000, 3) + header_bytes(100_000)
    short = Short(int(2.2 * size))
    monkeypatch.setattr(device_pool, "_words_on", short.words_on)
    store = DevicePagedStore(CPU)
    tensors = [held(store, 100_000, 3) for _ in range(4)]
    assert sum(kept_bits(tensor) for tensor in tensors) < 12
    assert sum(tensor.nbytes for tensor in tensors) < 1.05 * short.limit_bytes
    while True:  # until all but the first planes went
        try:
            tensors.append(held(store, 100_000, 3))
        except torch.OutOfMemoryError:
            break
    assert {kept_bits(tensor) for tensor in tensors} == {1}
    account = store.statistics()
    assert account.live_tensors == len(tensors)
    assert store.lent_bytes == sum(tensor.nbytes for tensor in tensors)
    del tensors[0]
    tensors.append(held(store, 40_000, 1))


def test_a_newcomer_makes_room_for_itself_where_others_are_worth_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plane, headers = plane_bytes(100_000, 1), header_bytes(100_000)
    short = Short(5 * plane + 2 * headers)
    monkeypatch.setattr(device_pool, "_words_on", short.words_on)
    store = DevicePagedStore(CPU)
    first = held(store, 100_000, 3, importance=[9.0, 8.0, 7.0])
    newcomer = held(store, 100_000, 4, importance=[9.0, 0.3, 0.2, 0.1], tag=5)
    assert (kept_bits(first), kept_bits(newcomer)) == (3, 2)
    entries, _ = store.take_evictions()
    assert [(entry.tag, entry.plane) for entry in entries] == [(5, 3), (5, 2)]
    assert store.evicted_bytes == 2 * plane
    assert newcomer.nbytes == 2 * plane + headers + newcomer.table.nbytes
    alone = DevicePagedStore(CPU)
    short.limit_bytes += 2 * plane + headers
    assert kept_bits(held(alone, 100_000, 4)) == 2


def test_other_errors_cost_no_planes(monkeypatch: pytest.MonkeyPatch) -> None:
    store = DevicePagedStore(CPU)
    tensor = held(store, 100_000, 3)
    monkeypatch.setattr(device_pool, "_words_on", Short(0, RuntimeError).words_on)
    with pytest.raises(RuntimeError, match="no memory"):
        held(store, 100_000, 3)
    gc.collect()
    assert kept_bits(tensor) == 3
    assert store.statistics().live_tensors == 1


# --- threads --------------------------------------------------------------------------------


def test_another_thread_may_give_up_at_any_moment() -> None:
    """While this one allocates, reads and frees, as a budget that falls in mid-step does."""
    store, stop, given = DevicePagedStore(CPU), threading.Event(), []

    def take() -> None:
        while not stop.is_set():
            given.append(store.give_back(20_000))
            assert store.lent_bytes >= 0
            time.sleep(0.0005)

    thread = threading.Thread(target=take)
    thread.start()
    living: list[DevicePlaneTensor] = []
    try:
        for turn in range(200):
            living.append(held(store, 20_000 + turn, 3))
            if turn % 8:
                living.pop(turn % len(living))
            for tensor in living[-3:]:
                with tensor.pinned() as planes:
                    present = set(tensor._may_go)
                    assert present >= set(range(1, planes.kept))
                    assert len(set(places(planes))) == len(places(planes))
            assert all(tensor.nbytes > 0 for tensor in living)
    finally:
        stop.set()
        thread.join()
    assert sum(given) > 0
    assert store.lent_bytes == sum(tensor.nbytes for tensor in living)
    living.clear()
    del tensor
    assert (store.lent_bytes, store.statistics().live_pages) == (0, 0)


def test_bytes_may_be_asked_for_while_a_plane_goes() -> None:
    """Between two blocks that are counted, as if another thread came in there."""
    tensor = held(DevicePagedStore(CPU), 100_000, 4)
    drop_planes = weakref.WeakMethod(tensor.drop_planes)

    class Going:
        @property
        def nbytes(self) -> int:
            drop = drop_planes()
            assert drop is not None
            drop(2)
            return 1

    tensor._may_go[1] = Going()  # type: ignore[assignment]
    assert tensor.nbytes > 0
    assert set(tensor._may_go) == {1}


# --- several devices ------------------------------------------------------------------------


def test_all_devices_are_one_to_who_asks() -> None:
    stores = DeviceStores(10**6)
    ours, other = stores.on(CPU), stores.on(torch.device("cpu", 0))
    assert stores.on(CPU) is ours is not other
    first, second = held(ours, 100_000, 3, tag=1), held(other, 100_000, 3, tag=2)
    assert stores.live_bytes == ours.live_bytes + other.live_bytes
    plane = plane_bytes(100_000, 1)
    assert stores.give_back(2 * plane + 1) == 3 * plane
    assert (kept_bits(first), kept_bits(second)) == (1, 2)
    assert sum(each.evicted_bytes for each in stores.all()) == 3 * plane
    taken = [each.take_evictions() for each in stores.all()]
    assert [[entry.tag for entry in entries] for entries, _ in taken] == [[1, 1], [2]]
    assert [unlisted for _, unlisted in taken] == [0, 0]
    stores.set_cap(1)
    assert kept_bits(second) == 1
    assert stores.on(torch.device("cpu", 1)).statistics().cap_bytes == 1
