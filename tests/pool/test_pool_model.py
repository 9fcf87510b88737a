"""The pool against its model: a million random operations, and the order of pages."""

from __future__ import annotations

import ctypes
from random import Random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from pool_machine import ADDRESSES, Machine, random_step
from pool_model import ModelTensor
from thoroughness import at_most

from daf import _native


@pytest.mark.parametrize("page_bytes", [64, 1024, 4096, 16384])
def test_a_million_random_operations(page_bytes: int) -> None:
    random, machine = Random(page_bytes), Machine(page_bytes)
    steps = at_most(250_000, 25_000)
    for step in range(steps):
        random_step(machine, random, tensors=30, largest=30 * page_bytes)
        if step % 5000 == 0:
            machine.check_deeply()
    machine.check_deeply()
    assert machine.account["evicted_pages"] > steps // 25
    assert steps // 250 < machine.refusals < steps // 2
    for handle in list(machine.tensors):
        machine.release(handle)
    assert machine.account["payload_bytes"] == machine.account["live_pages"] == 0
    machine.check_deeply()


IMPORTANCE = st.floats(0, 1e30)


class PoolMachine(RuleBasedStateMachine):
    """The same operations, chosen by hypothesis, which shrinks what fails."""

    def __init__(self) -> None:
        super().__init__()
        self.machine = Machine(4096)

    def some_handle(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.machine.tensors)))

    @rule(
        data=st.data(), count=st.integers(0, 300_000), bits=st.integers(1, 8), headers=st.booleans()
    )
    def allocate(self, data: st.DataObject, count: int, bits: int, headers: bool) -> None:
        minimum = data.draw(st.integers(1, bits))
        importance = data.draw(st.lists(IMPORTANCE, min_size=bits, max_size=bits))
        self.machine.allocate(count, bits, minimum, headers, importance)

    @precondition(lambda self: self.machine.tensors)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.machine.release(self.some_handle(data))

    @precondition(lambda self: self.machine.tensors)
    @rule(data=st.data())
    def pin_or_unpin(self, data: st.DataObject) -> None:
        handle = self.some_handle(data)
        pinned = self.machine.tensors[handle].pins
        self.machine.unpin(handle) if pinned else self.machine.pin(handle)

    @rule(nbytes=st.integers(0, 200_000))
    def evict(self, nbytes: int) -> None:
        self.machine.evict(nbytes)

    @rule(cap=st.none() | st.integers(0, 1_000_000))
    def set_cap(self, cap: int | None) -> None:
        self.machine.set_cap(cap)

    @rule()
    def trim(self) -> None:
        self.machine.trim()

    @invariant()
    def sound(self) -> None:
        self.machine.check_deeply()


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase


def test_pages_are_reused_in_order_of_address() -> None:
    """Where memory stays (one large increment), pages are always the lowest that nobody uses."""
    pool = _native.pool.Pool(ADDRESSES, 4096, None, 64 << 20, True)
    random, live, used = Random(1), {}, set()
    for _ in range(3000):
        if live and random.random() < 0.48:
            handle = random.choice(list(live))
            pool.release(handle)
            used -= live.pop(handle)
            continue
        bits, count = random.randint(1, 4), random.randint(1, 200_000)
        handle = pool.allocate(count, bits, bits, True, [0.0] * bits, 0)
        pages = table(pool, handle)
        wanted = ModelTensor(count, bits, bits, True, [0.0] * bits, 4096).pages
        unused = (page for page in range(len(used) + wanted) if page not in used)
        assert pages == [page for page, _ in zip(unused, range(wanted), strict=False)]
        live[handle] = set(pages)
        used |= live[handle]
        pool.unpin(handle)


def table(pool: Any, handle: int) -> list[int]:
    _, page_bytes, address, count, runs, _, bits, _ = pool.pin(handle)
    pool.unpin(handle)
    headers = -(-4 * -(-count // 256) // page_bytes)
    entries = runs * bits + headers
    return list((ctypes.c_uint32 * entries).from_address(address))
