"""Several threads at once: nobody ever sees a page that belongs to somebody else."""

from __future__ import annotations

import ctypes
import itertools
import threading
from random import Random

from daf_bench.pool.plane_addresses import Pages

from daf.pool.paged_pool import PagedStore, PlaneTensor

PAGE = 4096
THREADS = 4
STEPS = 1500
# How often the cap must have moved, however busy the machine is.
MOVES = 100


def mark(address: int, name: int) -> None:
    for offset in (0, PAGE - 8):
        ctypes.c_uint64.from_address(address + offset).value = name


def is_marked(address: int, name: int) -> bool:
    places = (address, address + PAGE - 8)
    return all(ctypes.c_uint64.from_address(place).value == name for place in places)


def page_name(tag: int, plane: int, run: int) -> int:
    return tag << 24 | plane << 16 | run


def write(store: PagedStore, tag: int, runs: int, bits: int) -> PlaneTensor:
    importance = [float(tag % 17 + plane) for plane in range(bits, 0, -1)]
    tensor = store.allocate_planes(
        runs * PAGE * 8, bits, minimum_bits=1, importance=importance, headers=False, tag=tag
    )
    for run in range(runs):
        for plane, address in enumerate(Pages(tensor.view).planes(run)):
            mark(address, page_name(tag, plane, run))
    tensor.seal()
    return tensor


def check(tensor: PlaneTensor, tag: int) -> None:
    with tensor.pinned() as view:
        for run in range(Pages(view).runs):
            for plane, address in enumerate(Pages(view).planes(run)):
                assert is_marked(address, page_name(tag, plane, run))


def work(
    store: PagedStore, seed: int, moved: threading.Event, problems: list[BaseException]
) -> None:
    random, mine = Random(seed), {}
    try:
        for step in itertools.count():
            if step >= STEPS and moved.is_set():
                break
            tag = seed << 20 | step
            mine[tag] = write(store, tag, random.randint(1, 6), random.randint(1, 4))
            victim = random.choice(list(mine))
            check(mine[victim], victim)
            if len(mine) > 12:
                mine.pop(victim).release()
    except BaseException as problem:  # the main thread looks at it
        problems.append(problem)


def move_cap(store: PagedStore, moved: threading.Event, stop: threading.Event) -> None:
    random = Random(0)
    for moves in itertools.count():
        if stop.wait(0.0005):
            break
        if moves == MOVES:
            moved.set()
        store.set_cap(random.randint(1_200_000, 3_000_000))
        store.evict(random.randrange(40 * PAGE))
        store.trim()
        store.statistics()
    store.set_cap(None)


def test_threads_share_a_pool_under_a_moving_cap() -> None:
    store, problems = PagedStore(poison=True), []
    moved, stop = threading.Event(), threading.Event()
    workers = [
        threading.Thread(target=work, args=(store, n, moved, problems))
        for n in range(1, THREADS + 1)
    ]
    mover = threading.Thread(target=move_cap, args=(store, moved, stop))
    for thread in (*workers, mover):
        thread.start()
    for thread in workers:
        thread.join()
    stop.set()
    mover.join()
    assert problems == []
    assert store.statistics().evicted_pages > 1000
    assert store.native.is_sound()
    assert store.statistics().live_tensors == 0
