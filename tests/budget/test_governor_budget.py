"""What was asked and what the limits leave become one budget, never above any limit."""

from __future__ import annotations

import itertools
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up import MB, Tree

from daf.budget.governor import (
    AHEAD_READINGS,
    AHEAD_S,
    AUTO_RESERVE_BYTES,
    MOST_AHEAD_S,
    MOST_BYTES,
    RESERVE_BYTES,
    RISE_AFTER_S,
    Governor,
    Growth,
    goal_of,
    reserve_bytes,
    step_bytes,
)
from daf.budget.limits import Bound
from daf.budget.request import Request, parse_budget
from daf.core.errors import UnitError
from daf.memory.owners import account_lock


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def govern(tree: Tree, clock: Clock) -> Callable[[Any], Governor]:
    return lambda asked: Governor(asked, tree.system(), clock)


# --- reading --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("700MB", Request(nbytes=700 * MB)),
        (700_000_000, Request(nbytes=700 * MB)),
        ("1.5GB", Request(nbytes=1500 * MB)),
        ("0.5", Request(fraction=0.5)),
        (" 50% ", Request(fraction=0.5)),
        (0.25, Request(fraction=0.25)),
        (1.0, Request(fraction=1.0)),
        ("auto", Request()),
        ("AUTO", Request()),
        (None, None),
    ],
)
def test_every_way_to_ask(value: Any, expected: Request | None) -> None:
    assert parse_budget(value) == expected


@pytest.mark.parametrize("value", [0, 0.0, -0.5, 1.5, "0%", "150%", "much", "", True, "5.5XB", []])
def test_what_is_no_budget_is_refused(value: Any) -> None:
    with pytest.raises(UnitError):
        parse_budget(value)


# --- one reading ----------------------------------------------------------------------------


def test_a_budget_in_bytes_is_in_force_as_asked_where_there_is_room(govern: Any) -> None:
    assert govern("700MB").reading == (700 * MB, "as asked")


def test_a_group_s_limit_comes_before_what_was_asked(tree: Tree, govern: Any) -> None:
    tree.enter_v2("/app")
    tree.v2_group("/app", used_mb=100, maximum_mb=640)
    budget_bytes, reason = govern("700MB").reading
    assert budget_bytes == 640 * MB
    assert reason == "the limit /sys/fs/cgroup/app/memory.max"


def test_alone_in_its_group_a_process_may_have_all_of_it(tree: Tree, govern: Any) -> None:
    tree.enter_v2("/app")
    tree.v2_group("/app", used_mb=299, maximum_mb=640)
    assert govern("640MB").reading == (640 * MB, "as asked")


def test_neighbours_in_the_group_leave_less(tree: Tree, govern: Any) -> None:
    tree.enter_v2("/app")
    tree.v2_group("/app", used_mb=500, maximum_mb=640)  # 200 MB of them are somebody else's
    budget_bytes, reason = govern("600MB").reading
    assert 440 * MB - RESERVE_BYTES - step_bytes(440 * MB) < budget_bytes
    assert budget_bytes <= 440 * MB - RESERVE_BYTES
    assert "memory.max less 16.8 MB left to others" in reason


def test_a_fraction_is_of_the_machine_or_of_the_tightest_limit(tree: Tree, govern: Any) -> None:
    assert govern("25%").reading.budget_bytes == pytest.approx(2000 * MB, abs=1024)
    tree.enter_v1("/app")
    tree.v1_group("/app", used_mb=300, limit_mb=1000)
    assert govern(0.5).reading == (500 * MB, "as asked")


def test_auto_takes_what_is_free_less_a_reserve(tree: Tree, govern: Any) -> None:
    spare = 4300 * MB - 400 * MB  # a twentieth of the machine's 8 GB stays free
    found = govern("auto").reading.budget_bytes
    assert spare - step_bytes(spare) - 2048 < found <= spare
    tree.enter_v2("/app")
    tree.v2_group("/app", used_mb=300, maximum_mb=1000)
    spare = 1000 * MB - AUTO_RESERVE_BYTES
    assert spare - step_bytes(spare) < govern("auto").reading.budget_bytes <= spare


def test_no_budget_reads_no_limit(tree: Tree, govern: Any) -> None:
    (tree.root / "proc/meminfo").unlink()
    assert govern(None).reading.budget_bytes is None


BOUNDS = st.lists(
    st.builds(Bound, st.just("b"), st.integers(1, 2**40), st.integers(-(2**34), 2**41)),
    min_size=1,
    max_size=6,
).map(tuple)
REQUESTS = st.one_of(
    st.builds(Request, nbytes=st.integers(1, 2**41)),
    st.builds(Request, fraction=st.floats(0.001, 1.0)),
    st.just(Request()),
)


@given(request=REQUESTS, bounds=BOUNDS, backoff=st.floats(0, 0.5))
def test_no_budget_is_above_any_limit(
    request: Request, bounds: tuple[Bound, ...], backoff: float
) -> None:
    found = goal_of(request, bounds, backoff).budget_bytes
    assert found >= 1
    for bound in bounds:
        assert found <= bound.ceiling_bytes
        assert found <= max(1, bound.most_bytes - reserve_bytes(request, bound))
    if request.nbytes is not None:
        assert found <= request.nbytes


@given(more=st.integers(0, 2**34), bounds=BOUNDS, request=REQUESTS)
def test_more_room_never_means_a_smaller_budget(
    more: int, bounds: tuple[Bound, ...], request: Request
) -> None:
    roomier = tuple(Bound(b.name, b.ceiling_bytes, b.most_bytes + more) for b in bounds)
    assert goal_of(request, roomier).budget_bytes >= goal_of(request, bounds).budget_bytes


# --- over time ------------------------------------------------------------------------------


def test_a_squeeze_is_followed_at_once_and_its_end_after_a_while(
    tree: Tree, clock: Clock, govern: Any
) -> None:
    tree.enter_v2("/app")
    tree.v2_group("/app", used_mb=300, maximum_mb=1000)
    governor = govern("900MB")
    seen = []
    for neighbour_mb in range(0, 500, 25):
        tree.v2_group("/app", used_mb=300 + neighbour_mb, maximum_mb=1000)
        clock.now_s += 0.5
        seen.append(governor.refresh().budget_bytes)
        assert seen[-1] <= (1000 - neighbour_mb) * MB - RESERVE_BYTES or neighbour_mb <= 75
    assert seen == sorted(seen, reverse=True)
    assert seen[0] == 900 * MB
    assert seen[-1] < 520 * MB
    tree.v2_group("/app", used_mb=300, maximum_mb=1000)
    assert governor.refresh().budget_bytes == seen[-1]
    clock.now_s += RISE_AFTER_S / 2
    assert governor.refresh().budget_bytes == seen[-1]
    clock.now_s += RISE_AFTER_S / 2
    assert governor.refresh() == (900 * MB, "as asked")


def test_what_grows_fast_is_left_what_it_takes_until_the_budget_is_felt(
    tree: Tree, clock: Clock, govern: Any
) -> None:
    tree.enter_v2("/app")
    tree.v2_group("/app", used_mb=370, maximum_mb=1000)
    governor = govern("900MB")
    for taken_mb in (80, 90, 100):  # 10 MB in 20 ms
        tree.v2_group("/app", used_mb=300 + taken_mb, maximum_mb=1000)
        clock.now_s += 0.02
        governor.refresh()
    left = 900 * MB - 30 * MB
    assert left - step_bytes(left) < governor.reading.budget_bytes <= left
    assert "less 30.0 MB left to others" in governor.reading.reason
    tree.v2_group("/app", used_mb=360, maximum_mb=1000)  # it shrinks, and then stands still
    for _ in range(2):
        clock.now_s += RISE_AFTER_S
        governor.refresh()
    assert governor.reading == (900 * MB, "as asked")


def test_growth_is_a_rate_of_readings_far_enough_apart_and_bounded() -> None:
    growth, bound = Growth(), Bound("group", 1000 * MB, 900 * MB)
    growth.note((bound,), 1.0)
    assert growth.ahead_bytes(bound) == 0
    growth.note((replace(bound, most_bytes=890 * MB),), 1.001)  # 10 GB/s, or chance
    assert growth.ahead_bytes(bound) == 0
    growth.note((replace(bound, most_bytes=895 * MB),), 1.015)
    assert growth.ahead_bytes(bound) == pytest.approx(5 * MB * AHEAD_S / 0.015, rel=1e-6)
    growth.note((replace(bound, most_bytes=885 * MB),), 1.065)  # readings come late
    assert growth.ahead_bytes(bound) == pytest.approx(10 * MB * AHEAD_READINGS, rel=1e-6)
    growth.note((replace(bound, most_bytes=785 * MB),), 2.065)
    assert growth.ahead_bytes(bound) == pytest.approx(100 * MB * MOST_AHEAD_S, rel=1e-6)
    growth.note((replace(bound, most_bytes=100 * MB),), 2.165)
    assert growth.ahead_bytes(bound) == MOST_BYTES
    # Somebody lowered the limit; nobody grew.
    growth.note((Bound("group", 500 * MB, -400 * MB),), 2.265)
    assert growth.ahead_bytes(bound) == 0


@given(
    noise_mb=st.lists(st.floats(-3.0, 3.0), min_size=5, max_size=40), free_mb=st.floats(500, 4000)
)
def test_limits_that_only_tremble_do_not_move_the_budget_for_long(
    noise_mb: list[float], free_mb: float
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        tree, clock = Tree(Path(folder)), Clock()
        tree.machine(8000, int(free_mb))
        governor = Governor("auto", tree.system(), clock)
        budgets = [governor.reading.budget_bytes]
        for noise in noise_mb:
            clock.now_s += 1.0
            tree.write("/proc/meminfo", meminfo(free_mb + noise))
            budgets.append(governor.refresh().budget_bytes)
    moves = sum(before != after for before, after in itertools.pairwise(budgets))
    # A fall of a step or two to below what trembles, and never up again.
    assert moves <= 2
    assert budgets == sorted(budgets, reverse=True)


def meminfo(available_mb: float) -> str:
    kilobytes = int(available_mb * MB / 1024)
    return f"MemTotal: 7812500 kB\nMemAvailable: {kilobytes} kB\n"


def test_asking_acts_at_once_both_ways(govern: Any) -> None:
    governor = govern("700MB")
    assert governor.ask("300MB").budget_bytes == 300 * MB
    assert governor.ask("900MB").budget_bytes == 900 * MB
    assert governor.ask(None).budget_bytes is None
    assert governor.ask("0.1").budget_bytes == pytest.approx(800 * MB, abs=1024)


def test_a_budget_that_cannot_be_read_changes_nothing(govern: Any) -> None:
    governor = govern("700MB")
    with pytest.raises(UnitError):
        governor.ask("many")
    assert governor.asked == "700MB"
    assert governor.refresh().budget_bytes == 700 * MB


def test_a_function_is_asked_every_time(govern: Any) -> None:
    values: list[Any] = ["700MB", "700MB", 300 * MB, "0.05", "auto", None]
    governor = govern(lambda: values.pop(0))
    assert governor.reading.budget_bytes == 700 * MB
    assert governor.refresh().budget_bytes == 700 * MB
    assert governor.refresh().budget_bytes == 300 * MB
    assert governor.refresh().budget_bytes == pytest.approx(400 * MB, abs=1024)
    assert governor.refresh().budget_bytes > 3000 * MB
    assert governor.refresh().budget_bytes is None


def test_what_a_function_raises_reaches_the_asker_and_the_budget_stays(govern: Any) -> None:
    trouble = False

    def budget() -> str:
        if trouble:
            raise ZeroDivisionError("the user's own")
        return "700MB"

    governor = govern(budget)
    trouble = True
    with pytest.raises(ZeroDivisionError):
        governor.refresh()
    assert governor.reading.budget_bytes == 700 * MB


def test_being_moved_to_another_group_is_noticed(tree: Tree, clock: Clock, govern: Any) -> None:
    governor = govern("700MB")
    tree.enter_v2("/small")
    tree.v2_group("/small", used_mb=299, maximum_mb=500)
    clock.now_s += 1.0
    assert governor.refresh().budget_bytes == 500 * MB


def test_a_budget_asked_while_a_function_is_read_stays(govern: Any) -> None:
    """Watchers refresh on threads of their own: what they began to read must not come last."""

    def slow() -> str:
        if is_watching:
            governor.ask("300MB")
        return "700MB"

    is_watching = False
    governor = govern(slow)
    is_watching = True
    assert governor.refresh().budget_bytes == 300 * MB
    assert governor.reading.budget_bytes == governor.refresh().budget_bytes == 300 * MB


def test_a_budget_asked_while_a_watcher_waits_stays(govern: Any) -> None:
    governor = govern("300MB")
    watcher = threading.Thread(target=governor.refresh)
    with account_lock:
        watcher.start()
        watcher.join(0.05)  # it has begun, and waits
        governor.ask("700MB")
    watcher.join()
    assert governor.reading.budget_bytes == 700 * MB
