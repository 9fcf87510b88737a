"""Memory pressure is read from the kernel's counters and makes an automatic budget give way."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up import MB, Tree

from daf.budget.governor import Governor
from daf.budget.pressure import Backoff, PressureSampler, open_triggers, pressure_files, stalled_us
from daf.budget.system import THIS_SYSTEM, System
from daf.budget.watcher import Watcher

SECOND_US = 1_000_000


def test_the_machine_s_and_every_group_s_stalls_count(tree: Tree) -> None:
    tree.enter_v2("/a/b")
    tree.pressure(5)
    tree.pressure(700, "/sys/fs/cgroup/a/memory.pressure")
    tree.pressure(30, "/sys/fs/cgroup/a/b/memory.pressure")
    assert pressure_files(tree.system()) == (
        "/proc/pressure/memory",
        "/sys/fs/cgroup/a/b/memory.pressure",
        "/sys/fs/cgroup/a/memory.pressure",
    )


def test_a_kernel_without_pressure_information_reports_none(tree: Tree) -> None:
    assert pressure_files(tree.system()) == ()
    assert PressureSampler(tree.system()).share(1.0) == 0
    assert open_triggers(tree.system()) == []


def test_the_counter_is_the_some_line_s_total() -> None:
    text = "some avg10=1.5 avg60=0.1 avg300=0.00 total=1055652\nfull avg10=0 total=7\n"
    assert stalled_us(text) == 1055652
    assert stalled_us("") == 0


def test_the_share_is_over_the_last_second(tree: Tree) -> None:
    tree.pressure(50 * SECOND_US)
    sampler = PressureSampler(tree.system())
    assert sampler.share(10.0) == 0
    tree.pressure(50 * SECOND_US + 200_000)
    assert sampler.share(10.02) == pytest.approx(0.2)  # against a whole second, not 20 ms
    assert sampler.share(10.9) == pytest.approx(0.2)
    assert sampler.share(11.1) == 0


def test_only_auto_gives_way_and_by_a_twentieth_a_second(tree: Tree) -> None:
    now_s = 10.0
    tree.pressure(0)
    governor = Governor("auto", tree.system(), lambda: now_s)
    fixed = Governor("1GB", tree.system(), lambda: now_s)
    before = governor.reading.budget_bytes
    assert before is not None
    budgets = []
    for seconds in range(1, 4):
        now_s = 10.0 + seconds
        tree.pressure(seconds * SECOND_US // 2)
        budgets.append(governor.refresh().budget_bytes)
        assert fixed.refresh().budget_bytes == 10**9
    spare = 3900 * MB
    for budget, share in zip(budgets, (0.05, 0.10, 0.15), strict=True):
        assert budget == pytest.approx(spare * (1 - share), rel=1 / 60)
    assert "under memory pressure" in governor.reading.reason


def test_a_trigger_counts_as_pressure(tree: Tree) -> None:
    tree.pressure(0)
    governor = Governor("auto", tree.system(), lambda: 10.0)
    before = governor.reading.budget_bytes
    assert governor.refresh(urgent=True).budget_bytes < before


@given(st.lists(st.tuples(st.booleans(), st.floats(0.01, 20)), max_size=60))
def test_backing_off_is_bounded_and_ends(moments: list[tuple[bool, float]]) -> None:
    backoff, now_s = Backoff(), 0.0
    for pressed, pause_s in moments:
        before = backoff.share
        now_s += pause_s
        share = backoff.note(pressed, now_s)
        assert 0 <= share <= Backoff.MOST
        assert share >= before if pressed else share <= before
    for _ in range(11):
        now_s += Backoff.QUIET_S
        backoff.note(False, now_s)
    assert backoff.share == 0


def test_pressure_within_a_second_counts_once_and_postpones_the_return() -> None:
    backoff = Backoff()
    assert backoff.note(True, 0.0) == Backoff.STEP
    assert backoff.note(True, 0.5) == Backoff.STEP
    assert backoff.note(False, 10.2) == Backoff.STEP
    assert backoff.note(False, 10.5) == 0


# --- triggers and the thread ----------------------------------------------------------------


def test_a_trigger_is_set_as_the_kernel_s_documentation_says(tree: Tree) -> None:
    tree.pressure(0)
    (descriptor,) = open_triggers(tree.system())
    os.close(descriptor)
    written = (tree.root / "proc/pressure/memory").read_bytes()
    assert written.startswith(b"some 200000 2000000\0")


def test_where_triggers_may_not_be_written_there_are_none(tree: Tree) -> None:
    class Unwritable(System):
        def place(self, path: object) -> Path:
            return tree.root / "proc" if "pressure" in str(path) else tree.root / str(path)[1:]

    assert open_triggers(Unwritable(tree.root)) == []


@pytest.mark.skipif(not os.access("/proc/pressure/memory", os.W_OK), reason="no triggers here")
def test_a_real_kernel_accepts_the_trigger_and_the_watcher_closes_it() -> None:
    triggers = open_triggers(THIS_SYSTEM)
    assert triggers
    looker = Looker()
    watcher = Watcher(looker.look, triggers)
    assert looker.looked.wait(10)
    watcher.close()
    assert not watcher.is_alive
    for descriptor in triggers:
        with pytest.raises(OSError):
            os.fstat(descriptor)


class Looker:
    def __init__(self, wait_s: float = 0.001, enough: int = 3) -> None:
        self.wait_s = wait_s
        self.calls: list[bool] = []
        self.looked = threading.Event()
        self._enough = enough

    def look(self, urgent: bool) -> float:
        self.calls.append(urgent)
        if len(self.calls) >= self._enough:
            self.looked.set()
        return self.wait_s


def test_the_thread_looks_again_and_again_until_closed() -> None:
    looker = Looker()
    watcher = Watcher(looker.look, [])
    assert looker.looked.wait(10)
    watcher.close()
    assert not watcher.is_alive
    assert not any(looker.calls)
    count = len(looker.calls)
    watcher.close()  # a second time does nothing
    assert len(looker.calls) == count


def test_closing_does_not_wait_for_the_next_look() -> None:
    for triggers in ([], [os.open("/dev/null", os.O_RDONLY)]):
        looker = Looker(wait_s=3600, enough=1)
        watcher = Watcher(looker.look, triggers)
        assert looker.looked.wait(10)
        watcher.close()
        assert not watcher.is_alive


def test_the_thread_ends_when_nobody_holds_its_owner() -> None:
    looker = Looker()
    watcher = Watcher(looker.look, [])
    assert looker.looked.wait(10)
    thread = watcher._thread
    del looker
    thread.join(10)
    assert not watcher.is_alive
    watcher.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_no_thread_and_knows_it() -> None:
    looker = Looker()
    watcher = Watcher(looker.look, [])
    assert looker.looked.wait(10)
    child = os.fork()
    if child == 0:
        alive = watcher.is_alive
        watcher.close()
        os._exit(int(alive))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert watcher.is_alive
    watcher.close()
