"""What is set in the process is what the living owners ask, however they come and go."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

import pytest
import torch
from daf._native import allocator as native
from thoroughness import at_most

from daf.memory import glibc
from daf.memory.allocation_log import track
from daf.memory.owners import Claim, owners
from daf.memory.process_limit import MemoryKeeper
from daf.memory.recycling_allocator import RecyclingAllocator, unsupported_reason
from daf.memory.statistics import stats

MIB = 2**20
pytestmark = [
    pytest.mark.smoke,
    pytest.mark.skipif(unsupported_reason() is not None, reason=str(unsupported_reason())),
]


@pytest.fixture(autouse=True)
def as_found() -> Iterator[None]:
    gc.collect()
    yield
    gc.collect()
    assert owners.living() == []
    assert not native.is_installed()
    assert native.settings() == (None, None)
    assert native.set_reclaim(None) is None
    assert not glibc.returns_freed_blocks()


def held_bytes() -> int:
    return stats()["held_bytes.current"]


def hold(mib: int) -> torch.Tensor:
    return torch.ones(mib * MIB, dtype=torch.uint8)


@pytest.mark.parametrize("first", [0, 1])
def test_the_least_is_in_force_whoever_leaves_first(first: int) -> None:
    claims = [
        Claim(redirects=True, limit_bytes=300 * MIB, cap_bytes=9 * MIB, returns_freed_blocks=True),
        Claim(redirects=True, limit_bytes=200 * MIB, cap_bytes=20 * MIB),
    ]
    for claim in claims:
        owners.enter(claim)
    assert native.settings() == (9 * MIB, 200 * MIB)
    owners.leave(claims[first])
    left = claims[1 - first]
    assert native.settings() == (left.cap_bytes, left.limit_bytes)
    assert native.is_installed()
    assert glibc.returns_freed_blocks() is left.returns_freed_blocks
    owners.leave(left)
    owners.leave(left)


def test_random_owners_come_and_go_as_a_model_says() -> None:
    random = Random(7)
    living: list[RecyclingAllocator] = []
    for _ in range(400):
        choice = random.random()
        if choice < 0.4 and len(living) < 6:
            sizes = [None, *(random.randrange(1, 10**9) for _ in range(3))]
            cap, limit = random.choice(sizes), random.choice(sizes)
            made = RecyclingAllocator(cap_bytes=cap, limit_bytes=limit)
            living.append(made.__enter__())
            del made
        elif choice < 0.6 and living:
            living.pop(random.randrange(len(living))).__exit__()
        elif choice < 0.8 and living:
            living.pop(random.randrange(len(living)))  # forgotten: collected at once
        elif living:
            random.choice(living).limit_bytes = random.randrange(10**9)
        caps = [each.cap_bytes for each in living if each.cap_bytes is not None]
        limits = [each.limit_bytes for each in living if each.limit_bytes is not None]
        assert native.settings() == (min(caps, default=None), min(limits, default=None))
        assert native.is_installed() is bool(living)


def test_owners_of_several_threads_leave_nothing_behind() -> None:
    problems: list[BaseException] = []

    def come_and_go(seed: int) -> None:
        random = Random(seed)
        try:
            for _ in range(150):
                keeper = MemoryKeeper()
                keeper.open()
                keeper.bound(10**12, 10**12)
                with RecyclingAllocator(limit_bytes=random.randrange(10**11, 10**12)):
                    assert native.is_installed()
                    assert native.settings()[1] is not None
                    if random.random() < 0.5:
                        keeper.close()
                del keeper
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=come_and_go, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


@pytest.mark.parametrize("name", ["install", "set_cap", "set_limit", "set_reclaim", "remove"])
def test_an_interrupted_change_is_completed_by_the_next(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt comes before or after any of the calls that change something."""

    def interrupted(*arguments: object) -> object:
        monkeypatch.undo()
        getattr(native, name)(*arguments)
        raise KeyboardInterrupt

    allocator = RecyclingAllocator(cap_bytes=MIB, limit_bytes=100 * MIB)
    if name == "remove":
        allocator.__enter__()
    monkeypatch.setattr("daf.memory.owners.native", _Altered(name, interrupted))
    change = allocator.__exit__ if name == "remove" else allocator.__enter__
    with pytest.raises(KeyboardInterrupt):
        change()
    with RecyclingAllocator(cap_bytes=2 * MIB):
        assert native.is_installed()
        entered = name != "remove"
        assert native.settings() == ((MIB, 100 * MIB) if entered else (2 * MIB, None))
    allocator.__exit__()


class _Altered:
    """The native account with another function in place of one."""

    def __init__(self, name: str, function: object) -> None:
        self._name, self._function = name, function

    def __getattr__(self, name: str) -> object:
        return self._function if name == self._name else getattr(native, name)


@contextmanager
def owning(claim: Claim) -> Iterator[Claim]:
    try:
        owners.enter(claim)
        yield claim
    finally:
        owners.leave(claim)


def test_what_was_expected_goes_first_then_hooks_are_asked_the_youngest_first() -> None:
    asked: list[str] = []

    def hook(name: str, freed: int) -> Claim:
        return Claim(redirects=True, make_room=lambda _: asked.append(name) or freed)

    with owning(hook("old", 0)), owning(hook("young", 0)) as young:
        young.limit_bytes = held_bytes() + 20 * MIB
        young.expected_bytes = held_bytes() + 5 * MIB
        owners.settle()
        assert hold(10).numel() == 10 * MIB
        assert asked == []
        assert native.settings()[1] == young.limit_bytes
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            hold(30)
        assert asked == ["young", "old"]
        assert young.missing_bytes >= 10 * MIB


def test_a_lifted_limit_is_nobody_s_and_what_must_finish_passes_them_all() -> None:
    tight = Claim(redirects=True, limit_bytes=held_bytes() + 4 * MIB)
    wide = Claim(redirects=True, limit_bytes=held_bytes() + 40 * MIB)
    with owning(tight), owning(wide):
        wide.lifted = 1
        owners.settle()
        assert hold(64).numel() == 64 * MIB
        wide.lifted = 0
        owners.settle()
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            hold(8)
        wide.must_finish = True
        assert hold(8).numel() == 8 * MIB
        assert 2 * MIB <= wide.overrun_bytes <= 9 * MIB
        assert tight.overrun_bytes == 0


def test_of_tracks_in_each_other_each_has_its_own_peak() -> None:
    with track() as outer:
        before = stats()["live_bytes.current"]
        hold(40)
        with track(limit="1GB") as inner:
            hold(10)
            assert inner.peak_bytes - before == 10 * MIB
        hold(5)
    assert inner.peak_bytes - before == 10 * MIB
    assert outer.peak_bytes - before == 40 * MIB
    assert outer.statistics["live_bytes.peak"] == outer.peak_bytes


def run_python(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_has_no_limit_and_no_account_until_it_asks_for_its_own() -> None:
    program = """
        import os, threading, torch, traceback
        from daf._native import allocator as native
        from daf.memory.owners import account_lock, owners
        from daf.memory.recycling_allocator import RecyclingAllocator
        from daf.memory.statistics import stats
        MIB = 2**20

        def ones(mib): return torch.ones(mib * MIB, dtype=torch.uint8)

        def child(kept):
            assert native.settings() == (None, None) and not native.is_installed()
            assert owners.living() == []
            assert native.set_reclaim(None) is None
            held = stats()["held_bytes.current"]
            assert ones(200)[-1].item() == 1
            small = [torch.ones(100) for _ in range(100)]
            assert stats()["held_bytes.current"] == held  # no account
            assert kept[-1].item() == 1
            kept.add_(1)
            with RecyclingAllocator(limit_bytes=held + 50 * MIB):
                assert ones(40)[-1].item() == 1
                try: ones(200)
                except RuntimeError: pass
                else: raise AssertionError("not refused")
            del kept, small

        busy, stop = [], threading.Event()
        def hold_the_lock():
            while not stop.is_set():
                with account_lock, owners.turn: ones(1)
        threads = [threading.Thread(target=hold_the_lock) for _ in range(2)]
        for thread in threads:
            thread.daemon = True
            thread.start()
        allocator = RecyclingAllocator(cap_bytes=64 * MIB, reclaim=lambda missing: 0).__enter__()
        kept = ones(20)
        allocator.limit_bytes = stats()["held_bytes.current"] + 60 * MIB
        for _ in range(FORKS):
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    child(kept)
                    with owners.turn: status = 0
                except BaseException: traceback.print_exc()
                finally: os._exit(status)
            assert os.waitpid(pid, 0)[1] == 0
        stop.set()
        for thread in threads: thread.join()
        assert native.settings() == (64 * MIB, allocator.limit_bytes)
        assert kept.min() == kept.max() == 1
        try: ones(200)
        except RuntimeError: print("ok")
    """
    run_python(program.replace("FORKS", str(at_most(20, 8))))
