"""Who packs what in a session, from events: when it looks, what it makes of them, what it skips."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest

from daf.core.code_format import code_bytes
from daf.core.policy import Method, Treatment
from daf.offload import routing
from daf.offload.routing import Rates, Route, Routes, Sent, processor_rate, split

TWO_BITS = Treatment(Method.ROTATED, 2)
ELEMENTS = 1 << 20
RAW, CODED = 4 * ELEMENTS, code_bytes(ELEMENTS, 2)


@dataclass(frozen=True)
class At:
    """A ticket of a clock that the test sets (ms)."""

    begin_ms: float
    end_ms: float


class Clock:
    """A device that takes as long as it is told to, a link and a processor beside it."""

    def __init__(self, pack_ms: float, raw_ms: float, cpu_ms: float = 8.0) -> None:
        self.now_ms, self.link_ms = 0.0, 0.0
        self.pack_ms, self.raw_ms, self.cpu_ms = pack_ms, raw_ms, cpu_ms
        self.is_late = False

    def mark(self) -> At:
        return At(self.now_ms, self.now_ms)

    def is_done(self, _ticket: At) -> bool:
        return not self.is_late

    def duration_ms(self, ticket: At) -> float:
        return ticket.end_ms - ticket.begin_ms

    def elapsed_ms(self, first: At, last: At) -> float:
        return last.end_ms - first.end_ms

    def sent(self, route: Route) -> Sent:
        """One tensor, by a route."""
        before = self.mark()
        moved = RAW
        if route is Route.GPU_PACKS:
            self.now_ms, moved = self.now_ms + self.pack_ms, CODED
        begin = max(self.now_ms, self.link_ms)
        self.link_ms = begin + self.raw_ms * moved / RAW
        copy = At(begin, self.link_ms)
        return Sent(route, ELEMENTS, RAW, TWO_BITS, before, self.mark(), copy)


def run_pass(
    routes: Routes,
    clock: Clock,
    layer_ms: float = 10.0,
    layers: int = 6,
    most_raw_bytes: float = math.inf,
) -> Any:
    """A forward pass of some layers, each of which saves one tensor at its end."""
    routes.begin_pass(most_raw_bytes)
    watched, taken = routes.is_watching, []
    for _ in range(layers):
        clock.now_ms += layer_ms
        taken.append(routes.take())
        sent = clock.sent(taken[-1])
        if routes.is_watching:
            routes.note(sent)
        if taken[-1] is Route.CPU_PACKS:
            routes.processor_took(RAW, clock.cpu_ms)
    routes.end_forward()
    clock.now_ms += 50.0
    routes.end_forward()  # every read of backward says so
    return watched, tuple(taken)


@pytest.fixture(autouse=True)
def a_processor_of_known_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "processor_rate", lambda _treatment: RAW / 8.0)


def test_it_looks_at_some_passes_and_never_at_the_first() -> None:
    clock = Clock(1.0, 4.0)
    routes = Routes(clock)
    watched = [run_pass(routes, clock)[0] for _ in range(200)]
    assert [n + 1 for n, each in enumerate(watched) if each] == [2, 4, 8, 16, 32, 64, 128, 192]


def test_the_split_is_the_best_by_what_events_told() -> None:
    clock = Clock(pack_ms=3.0, raw_ms=4.0)
    routes = Routes(clock)
    run_pass(routes, clock)
    _, first = run_pass(routes, clock)
    assert set(first) == {Route.GPU_PACKS}
    _, found = run_pass(routes, clock)
    rates = Rates(gpu_pack=RAW / 3.0, cpu_pack=RAW / 8.0, link=RAW / 4.0)
    assert routes.rates is not None
    assert routes.seen is not None
    for name in ("gpu_pack", "cpu_pack", "link"):
        assert getattr(routes.rates, name) == pytest.approx(getattr(rates, name))
    # What packing stole is not the pass's own time.
    assert routes.seen.forward_ms == pytest.approx(60.0)
    assert [each.ready_ms for each in routes.seen.saved] == pytest.approx(
        [10.0 * place for place in range(1, 7)]
    )
    expected = split(routes.seen.saved, rates, 60.0)
    assert found == expected.routes
    assert set(found) == set(Route)  # neither side alone


def test_it_follows_a_link_that_becomes_slow_and_a_processor_that_is_busy() -> None:
    clock = Clock(pack_ms=3.0, raw_ms=4.0)
    routes = Routes(clock)
    taken = [run_pass(routes, clock)[1] for _ in range(3)]
    assert Route.CPU_PACKS in taken[-1]
    assert routes.rates is not None
    before = routes.rates.cpu_pack
    routes.processor_took(RAW, 800.0)
    assert routes.rates.cpu_pack == pytest.approx(before + 0.25 * (RAW / 800.0 - before))
    clock.raw_ms = 400.0
    taken = [run_pass(routes, clock)[1] for _ in range(7)]
    assert set(taken[-1]) == {Route.GPU_PACKS}
    assert routes.rates.link == pytest.approx(RAW / 400.0)
    fresh = Routes(clock)
    fresh.processor_took(RAW, 800.0)
    assert fresh.rates is None  # nothing to draw from yet


def passes_until(routes: Routes, clock: Clock, wanted: set[Route]) -> int:
    """Until every way is one of these, and each of these is some tensor's; at most a thousand."""
    for count in range(1000):
        if set(routes.ways) == wanted:
            return count
        run_pass(routes, clock)
    raise AssertionError(f"after a thousand passes the ways are still {routes.ways}")


def test_a_processor_that_is_free_again_packs_again() -> None:
    clock = Clock(pack_ms=3.0, raw_ms=4.0)
    routes = Routes(clock)
    passes_until(routes, clock, {*Route})
    clock.cpu_ms = 800.0
    passes_until(routes, clock, {Route.GPU_PACKS})
    for _ in range(130):  # one tensor of every watched pass tells that it is still busy
        watched, taken = run_pass(routes, clock)
        assert taken.count(Route.CPU_PACKS) == watched
    assert routes.ways == (Route.GPU_PACKS,) * 6
    assert routes.rates is not None
    assert routes.rates.cpu_pack == pytest.approx(RAW / 800.0)
    clock.cpu_ms = 8.0
    assert passes_until(routes, clock, {*Route}) <= 65
    assert routes.rates.cpu_pack == pytest.approx(RAW / 8.0)


def test_a_device_that_is_free_again_packs_again() -> None:
    clock = Clock(pack_ms=3.0, raw_ms=4.0)
    routes = Routes(clock)
    passes_until(routes, clock, {*Route})
    clock.pack_ms = 800.0
    passes_until(routes, clock, {Route.CPU_PACKS})
    for _ in range(130):
        watched, taken = run_pass(routes, clock)
        assert taken.count(Route.GPU_PACKS) == watched
    assert routes.ways == (Route.CPU_PACKS,) * 6
    assert routes.rates is not None
    assert routes.rates.gpu_pack == pytest.approx(RAW / 800.0)
    clock.pack_ms = 3.0
    assert passes_until(routes, clock, {*Route}) <= 65
    assert routes.rates.gpu_pack == pytest.approx(RAW / 3.0)


def test_what_is_not_past_is_asked_again_and_never_waited_for() -> None:
    clock = Clock(pack_ms=3.0, raw_ms=4.0)
    routes = Routes(clock)
    run_pass(routes, clock)
    run_pass(routes, clock)
    clock.is_late = True
    watched = [run_pass(routes, clock)[0] for _ in range(3)]
    assert routes.seen is None
    assert not any(watched)
    clock.is_late = False
    _, found = run_pass(routes, clock)
    assert routes.seen is not None
    assert Route.CPU_PACKS in found


def test_a_pass_that_is_given_up_is_forgotten_and_it_looks_again() -> None:
    """Its memory was refused, say: nothing of it was read."""
    clock = Clock(pack_ms=3.0, raw_ms=4.0)
    routes = Routes(clock)
    run_pass(routes, clock)
    routes.begin_pass(math.inf)
    assert routes.is_watching
    routes.note(clock.sent(routes.take()))
    watched = [run_pass(routes, clock)[0] for _ in range(3)]
    assert watched == [False, True, False]
    assert routes.seen is not None
    assert len(routes.seen.saved) == 6


def test_what_is_too_large_to_go_as_it_is_is_packed_there() -> None:
    clock = Clock(pack_ms=3.0, raw_ms=4.0)
    routes = Routes(clock)
    taken = [run_pass(routes, clock, most_raw_bytes=RAW - 1)[1] for _ in range(4)]
    assert set(taken[-1]) == {Route.GPU_PACKS}
    assert routes.seen is not None


def test_tensors_beyond_those_seen_are_packed_there() -> None:
    clock = Clock(pack_ms=3.0, raw_ms=4.0)
    routes = Routes(clock)
    for _ in range(3):
        run_pass(routes, clock)
    _, longer = run_pass(routes, clock, layers=9)
    assert longer[:6] == routes.ways
    assert set(longer[6:]) == {Route.GPU_PACKS}


def test_a_pass_that_packs_nothing_decides_nothing() -> None:
    clock = Clock(1.0, 1.0)
    routes = Routes(clock)
    for _ in range(5):
        run_pass(routes, clock, layers=0)
    assert routes.seen is None
    assert routes.ways == ()
    assert run_pass(routes, clock)[0] is False
    assert [run_pass(routes, clock)[0] for _ in range(2)] == [False, True]


def test_the_processor_s_rate_is_measured() -> None:
    assert 0 < processor_rate(TWO_BITS) < 1e9
