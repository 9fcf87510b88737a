"""Planes that wait on the host, on a device whose streams run late: bounds, order, races."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest
import torch
from direct_copies import DirectCopies
from hypothesis import given, settings
from hypothesis import strategies as st
from late_streams import LateStreams
from torch import Tensor
from writing import writing

from daf.core.code_format import block_count, code_bytes, words_per_plane
from daf.core.units import pinned_bytes
from daf.kernels.triton.planes import DevicePlanes
from daf.pool.host_planes import HostPlanes, HostStore

CPU = torch.device("cpu")
BLOCK_BYTES = 4 * (8 + 1)  # of a plane and its headers, for 256 elements


class Arena:
    """Memory as PyTorch's caching allocator has it: what is freed is used again at once, in the
    order of the stream that it belongs to.
    """

    def __init__(self, streams: LateStreams, home: int, words: int = 4096) -> None:
        self.words = torch.full((words,), -1, dtype=torch.int32)
        self._streams, self._home = streams, home
        self._free = [(0, words)]
        self.refuses_beyond = words

    def empty(self, words: int) -> Tensor:
        taken = self.words.numel() - sum(size for _, size in self._free)
        if taken + words > self.refuses_beyond:
            raise RuntimeError("simulated: out of memory")
        place = next(at for at, (_, size) in enumerate(self._free) if size >= words)
        first, size = self._free.pop(place)
        self._free.insert(place, (first + words, size - words))
        found = self.words[first : first + words]
        weakref.finalize(found, self._freed, first, words)
        return found

    def _freed(self, first: int, words: int) -> None:
        self._free.insert(0, (first, words))
        with self._streams.use(self._home):  # whoever gets it next writes, in home's order
            self._streams.issue(partial(self.fill, (first, words), -2))

    def span(self, part: Tensor) -> tuple[int, int]:
        """(first word, words) of a part, without a reference to it."""
        return (part.data_ptr() - self.words.data_ptr()) // 4, part.numel()

    def at(self, span: tuple[int, int]) -> Tensor:
        return self.words[span[0] : span[0] + span[1]]

    def fill(self, span: tuple[int, int], value: int) -> None:
        self.at(span).fill_(value)


class LateTransfers:
    """On a stream of their own."""

    def __init__(self, streams: LateStreams, side: int, arena: Arena) -> None:
        self._streams, self._side, self._arena = streams, side, arena

    def out(self, source: Tensor) -> tuple[Tensor, int]:
        host, span = torch.full((source.numel(),), -3, dtype=torch.int32), self._arena.span(source)
        return host, self._issue(lambda: host.copy_(self._arena.at(span)))

    def back(self, source: Tensor, target: Tensor) -> int:
        span = self._arena.span(target)
        return self._issue(lambda: self._arena.at(span).copy_(source))

    def _issue(self, work: Callable[[], Any]) -> int:
        self._streams.wait(self._side, self._streams.current())
        with self._streams.use(self._side):
            self._streams.issue(work)
        return len(self._streams.queues[self._side])

    def is_done(self, ticket: int) -> bool:
        return self._streams.done[self._side] >= ticket

    def order(self, ticket: int) -> None:
        self._streams.queues[self._streams.current()].append((self._side, ticket))

    def mark(self) -> Any: ...
    def duration_ms(self, ticket: int) -> float: ...
    def elapsed_ms(self, first: int, last: int) -> float: ...


class Bed:
    """A store on such a device: streams 0 (home), 1 and 2 compute, 3 copies."""

    def __init__(self, staging_bytes: int) -> None:
        self.streams = LateStreams(4)
        self.arena = Arena(self.streams, 0)
        transfers = LateTransfers(self.streams, 3, self.arena)
        self.store = HostStore(CPU, staging_bytes, transfers=transfers, streams=self.streams)
        self.store._empty = self.arena.empty  # type: ignore[method-assign]

    def written(self, name: int, count: int, bits: int) -> HostPlanes:
        planes = self.store.allocate_planes(count, bits)
        with writing(planes) as there:
            for part in parts_of(there):
                self.streams.issue(partial(self.arena.fill, self.arena.span(part), name))
        return planes

    def read(self, planes: HostPlanes, name: int) -> None:
        def check(span: tuple[int, int]) -> None:
            assert set(self.arena.at(span).tolist()) == {name}

        with planes.pinned() as there:
            for part in parts_of(there):
                self.streams.issue(partial(check, self.arena.span(part)))


def parts_of(planes: DevicePlanes) -> Iterator[Tensor]:
    assert planes.headers is not None
    assert planes.table is None
    assert planes.is_whole
    assert planes.region.shape == (planes.bits, words_per_plane(planes.elements))
    assert planes.headers.numel() == block_count(planes.elements)
    yield planes.region
    yield planes.headers


ACTIONS = st.tuples(
    st.sampled_from("wwwrrrfda"), st.integers(0, 2), st.integers(0, 7), st.integers(1, 4)
)


@settings(max_examples=300)
@given(
    st.lists(ACTIONS, min_size=4, max_size=40),
    st.permutations([0, 1, 2, 3]),
    st.integers(0, 12 * BLOCK_BYTES),
)
def test_nothing_is_read_before_it_came_or_after_it_went(steps, order, staging_bytes) -> None:
    """Three streams write, read and free; copies come whenever; memory is soon somebody else's."""
    bed = Bed(staging_bytes)
    living: list[tuple[int, HostPlanes]] = []
    assert bed.store.home.is_current
    for name, (kind, stream, which, amount) in enumerate(steps):
        with bed.streams.use(stream):
            if kind == "w":
                living.append((name, bed.written(name, 256 * amount, 1 + which % 4)))
            elif kind == "r" and living:
                owner, planes = living[which % len(living)]
                bed.read(planes, owner)
                planes = None
            elif kind == "f" and living:
                del living[which % len(living)]
            elif kind == "d":
                bed.store.drop_staged()
            elif kind == "a":
                bed.streams.advance((which + amount) % 4)
        sizes = [planes._record.nbytes for _, planes in living]
        largest = max(sizes, default=0)
        assert bed.store.device_bytes <= max(staging_bytes, largest)
        assert bed.store.stored_bytes == sum(sizes)
        assert bed.store.pinned_bytes == sum(map(pinned_bytes, sizes))
    bed.streams.finish(order)
    living.clear()
    assert (bed.store.device_bytes, bed.store.stored_bytes, bed.store.pinned_bytes) == (0, 0, 0)


def test_the_newest_stay_and_the_rest_come_back_early_in_reverse() -> None:
    one = BLOCK_BYTES
    bed = Bed(3 * one)
    living = [bed.written(name, 256, 1) for name in range(8)]
    assert bed.store.device_bytes == 3 * one
    fetched = []
    for name in reversed(range(8)):
        before = bed.store.fetched_bytes
        bed.read(living.pop(), name)
        gc.collect()
        fetched.append((bed.store.fetched_bytes - before) // one)
    # The last three never left. What is freed makes room for the one before, when the next is read.
    assert fetched == [0, 1, 1, 1, 1, 1, 0, 0]
    assert bed.store.fetched_bytes == 5 * one
    bed.streams.finish([0, 1, 2, 3])


def test_the_host_waits_for_nothing_and_the_device_only_where_room_is_short() -> None:
    bed = Bed(2 * BLOCK_BYTES)
    living = [bed.written(name, 256, 1) for name in range(2)]
    assert not any(isinstance(work, tuple) for work in bed.streams.queues[0])
    living.append(bed.written(2, 256, 1))
    # Home comes after the first copy, which nobody has waited for, and then writes.
    assert [work for work in bed.streams.queues[0] if isinstance(work, tuple)] == [(3, 2)]
    assert bed.streams.done == [0, 0, 0, 0]
    bed.streams.finish([3, 0, 1, 2])
    bed.read(living[0], 0)
    assert len(living) == 3


def read_on_demand(bed: Bed, sizes: list[tuple[int, int]], passes: int) -> list[tuple[int, int]]:
    """(pass, name) of what was not on the device when it was asked for, of codes that stay alive
    while backward passes go through them; sizes are of blocks and bits.
    """
    living = [bed.written(name, 256 * blocks, bits) for name, (blocks, bits) in enumerate(sizes)]
    found = []
    for turn in range(passes):
        for name in reversed(range(len(sizes))):
            if living[name]._record.on_device is None:
                found.append((turn, name))
            bed.read(living[name], name)
            bed.streams.finish([0, 1, 2, 3])
    return found


def test_codes_that_stay_alive_make_room_for_those_before_them() -> None:
    """``retain_graph``: three of eight fit, and the first pass fetches nothing on demand."""
    bed = Bed(3 * BLOCK_BYTES)
    # The second pass begins at what was read longest ago.
    assert read_on_demand(bed, [(1, 1)] * 8, passes=2) == [(1, 7)]
    assert bed.store.fetched_bytes == (5 + 8) * BLOCK_BYTES
    assert bed.store.reads == 16


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3)), min_size=2, max_size=12),
    st.integers(0, 40),
    st.integers(1, 3),
)
def test_nothing_is_fetched_on_demand_where_the_read_before_left_room(sizes, room, passes) -> None:
    staging_bytes = room * BLOCK_BYTES // 2
    on_demand = read_on_demand(Bed(staging_bytes), sizes, passes)
    nbytes = [code_bytes(256 * blocks, bits) for blocks, bits in sizes]
    last = len(sizes) - 1
    for turn, name in on_demand:
        if name == last:  # it stayed after it was written, or nobody could tell that it would come
            assert turn > 0 or nbytes[name] > staging_bytes
        else:
            assert nbytes[name] + nbytes[name + 1] > staging_bytes


def test_a_read_is_late_whose_words_have_not_come() -> None:
    bed = Bed(2 * BLOCK_BYTES)
    living = [bed.written(name, 256, 1) for name in range(4)]
    bed.streams.finish([0, 1, 2, 3])
    bed.read(living[3], 3)  # never left
    assert (bed.store.reads, bed.store.late_reads) == (1, 0)
    del living[3]
    bed.read(living[2], 2)  # never left either; the one before is asked for
    assert (bed.store.reads, bed.store.late_reads) == (2, 0)
    bed.read(living[1], 1)  # on its way
    assert (bed.store.reads, bed.store.late_reads) == (3, 1)
    bed.streams.finish([0, 1, 2, 3])
    bed.read(living[0], 0)  # has come meanwhile
    assert (bed.store.reads, bed.store.late_reads) == (4, 1)
    bed.store.drop_staged()
    bed.read(living[0], 0)  # on demand
    assert (bed.store.reads, bed.store.late_reads) == (5, 2)
    bed.streams.finish([0, 1, 2, 3])


@pytest.mark.parametrize("is_dropped", [False, True])
def test_what_was_fetched_for_nothing_writes_over_nobody(is_dropped: bool) -> None:
    """Its memory goes to another while the copy that fills it is still to come."""
    bed = Bed(3 * BLOCK_BYTES)
    living = [bed.written(name, 256, 1) for name in range(3)]
    bed.streams.finish([0, 1, 2, 3])
    bed.store.drop_staged()
    bed.read(living[2], 2)
    assert bed.store.fetched_bytes == 3 * BLOCK_BYTES
    came = bed.streams.done[3] + 2
    if is_dropped:
        living.clear()
    else:
        bed.store.drop_staged()
    newer = [bed.written(name, 256, 1) for name in (7, 8, 9)]
    while bed.streams.advance(0):
        pass
    while bed.streams.done[3] < came:  # the one copy that home reads
        assert bed.streams.advance(3)
    while bed.streams.advance(0):  # home is as early, and other copies as late as they may
        pass
    bed.streams.finish([0, 1, 2, 3])
    for name in (9, 8, 7):
        bed.read(newer.pop(), name)
    bed.streams.finish([0, 1, 2, 3])


def test_one_read_twice_is_fetched_once_and_the_others_make_room() -> None:
    bed = Bed(2 * BLOCK_BYTES)
    living = [bed.written(name, 256, 1) for name in range(4)]
    bed.read(living[0], 0)
    bed.read(living[0], 0)
    assert bed.store.fetched_bytes == BLOCK_BYTES
    bed.read(living[3], 3)  # stayed: 2 made room, as it would not be wanted before 3
    bed.streams.finish([0, 1, 2, 3])


def test_where_the_device_refuses_all_that_can_be_fetched_goes() -> None:
    bed = Bed(1 << 20)
    bed.arena.refuses_beyond = 4 * BLOCK_BYTES // 4
    living = [bed.written(name, 256, 1) for name in range(4)]
    assert bed.store.device_bytes == 4 * BLOCK_BYTES
    living.append(bed.written(4, 256, 1))
    assert bed.store.device_bytes == BLOCK_BYTES
    bed.arena.refuses_beyond = 0
    with pytest.raises(RuntimeError, match="out of memory"):
        bed.written(5, 256, 1)
    assert bed.store.stored_bytes == 5 * BLOCK_BYTES
    bed.arena.refuses_beyond = 4096
    for name in reversed(range(5)):
        bed.read(living.pop(), name)
    bed.streams.finish([0, 1, 2, 3])


def test_what_a_thread_packs_is_fetched_once_it_is_there_and_waited_for_where_it_must() -> None:
    bed = Bed(1 << 20)
    packing: list[Future[Tensor]] = [Future() for _ in range(3)]
    living = [bed.store.packed_elsewhere(256, 1, each) for each in packing]
    words = BLOCK_BYTES // 4
    packing[2].set_result(torch.full((words,), 2, dtype=torch.int32))
    bed.read(living.pop(), 2)
    assert bed.store.fetched_bytes == BLOCK_BYTES  # nothing ahead of the threads
    packing[0].set_result(torch.full((words,), 0, dtype=torch.int32))
    later = threading.Timer(
        0.05, lambda: packing[1].set_result(torch.full((words,), 1, dtype=torch.int32))
    )
    later.start()
    bed.read(living.pop(), 1)
    assert bed.store.fetched_bytes == 3 * BLOCK_BYTES  # and the one before with it
    bed.read(living.pop(), 0)
    bed.streams.finish([0, 1, 2, 3])
    failed: Future[Tensor] = Future()
    failed.set_exception(OSError("packing failed"))
    broken = bed.store.packed_elsewhere(256, 1, failed)
    with pytest.raises(OSError, match="packing failed"), broken.pinned():
        pass
    bed.read(bed.written(9, 256, 1), 9)  # whose neighbour's failure is not its own
    del broken


def test_any_thread_may_drop_what_is_staged_while_another_reads() -> None:
    store = HostStore(CPU, 1 << 20, transfers=DirectCopies(), streams=None)
    living = [_named(store, name) for name in range(32)]
    stop, problems = threading.Event(), []

    def drop() -> None:
        while not stop.is_set():
            store.drop_staged()

    dropping = threading.Thread(target=drop)
    dropping.start()
    try:
        for _ in range(30):
            for name, planes in reversed(list(enumerate(living))):
                with planes.pinned() as there:
                    if set(there.region.flatten().tolist()) != {name}:
                        problems.append(name)
    finally:
        stop.set()
        dropping.join()
    assert not problems
    living.clear()
    del planes
    assert store.device_bytes == store.stored_bytes == 0


def _named(store: HostStore, name: int) -> HostPlanes:
    planes = store.allocate_planes(512, 2)
    with writing(planes) as there:
        there.region.fill_(name)
    return planes
