"""Collections of what one piece of work leaves."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

import daf
from daf.core.garbage import _Frozen, newer_garbage_collected, young_left_alone


class Cycle:
    def __init__(self) -> None:
        self.own = self


@pytest.fixture
def thawed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a program that froze nothing; automatic collections do not come between."""
    count = gc.get_freeze_count()
    monkeypatch.setattr(_Frozen, "by_program", False)
    gc.unfreeze()
    gc.disable()
    yield
    gc.enable()
    if count:
        gc.freeze()


@pytest.mark.usefixtures("thawed")
def test_newer_cycles_are_freed_and_older_ones_are_not_looked_at() -> None:
    older = weakref.ref(Cycle())
    with newer_garbage_collected():
        newer = weakref.ref(Cycle())
    assert newer() is None
    assert older() is not None
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert older() is None


@pytest.mark.usefixtures("thawed")
def test_what_raises_inside_is_raised_and_nothing_stays_frozen() -> None:
    newer: list[weakref.ref[Cycle]] = []

    def fail() -> None:
        newer.append(weakref.ref(Cycle()))
        raise KeyError

    with pytest.raises(KeyError), newer_garbage_collected():
        fail()
    assert newer[0]() is None
    assert gc.get_freeze_count() == 0


FREEZES_ITSELF = """
import gc, weakref
from daf.core.garbage import newer_garbage_collected

class Cycle:
    def __init__(self):
        self.own = self

gc.collect()
gc.disable()
older = weakref.ref(Cycle())
gc.freeze()
frozen = gc.get_freeze_count()
with newer_garbage_collected():
    newer = weakref.ref(Cycle())
assert newer() is None
assert older() is not None
assert gc.get_freeze_count() == frozen
del gc.get_freeze_count  # slow, and known
with newer_garbage_collected():
    pass
"""


def test_what_the_program_froze_stays_frozen() -> None:
    """In a process of its own: here other threads may free what was frozen."""
    done = subprocess.run(
        [sys.executable, "-c", FREEZES_ITSELF], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("thawed")
def test_pieces_of_work_inside_one_another_are_thawed_at_the_end() -> None:
    older = weakref.ref(Cycle())
    with newer_garbage_collected():
        with newer_garbage_collected():
            inner = weakref.ref(Cycle())
        assert inner() is None
        assert gc.get_freeze_count() > 0
        assert not _Frozen.by_program
    assert gc.get_freeze_count() == 0
    assert older() is not None


@pytest.fixture
def usual(request: pytest.FixtureRequest) -> Iterator[tuple[int, ...]]:
    """Thresholds that are nobody's, put back."""
    before = gc.get_threshold()
    gc.set_threshold(*getattr(request, "param", (600, 7, 8)))
    yield gc.get_threshold()
    gc.set_threshold(*before)


def collections_of(make: int, objects: int) -> int:
    """Return how often ``objects`` lists that live were looked through, made ``make`` at a time."""
    before = gc.get_stats()[0]["collections"]
    kept = [[[] for _ in range(make)] for _ in range(objects // make)]
    del kept
    return int(gc.get_stats()[0]["collections"] - before)


def test_what_lives_on_is_seldom_looked_at(usual: tuple[int, ...]) -> None:
    assert collections_of(100, 20_000) > 20
    with young_left_alone():
        with young_left_alone():
            assert collections_of(100, 20_000) <= 1
        assert collections_of(100, 20_000) <= 1
        assert gc.get_threshold()[1:] == usual[1:]
    assert gc.get_threshold() == usual


@pytest.mark.parametrize("usual", [(0, 7, 8), (50_000, 7, 8)], indirect=True)
def test_a_program_that_looks_seldom_or_never_is_left_alone(usual: tuple[int, ...]) -> None:
    with young_left_alone():
        assert gc.get_threshold() == usual
    assert gc.get_threshold() == usual


@pytest.mark.usefixtures("usual")
def test_what_a_program_sets_meanwhile_stays() -> None:
    with young_left_alone():
        gc.set_threshold(123, 4, 5)
    assert gc.get_threshold() == (123, 4, 5)


@pytest.mark.parametrize("fails", [False, True])
def test_passes_and_steps_leave_thresholds_as_they_were(
    usual: tuple[int, ...], *, fails: bool
) -> None:
    forward: list[int] = []
    backward: list[int] = []

    class Watched(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            forward.append(gc.get_threshold()[0])
            if fails:
                raise ZeroDivisionError
            result: torch.Tensor = super().forward(input)
            result.register_hook(lambda _gradient: backward.append(gc.get_threshold()[0]))
            return result

    model = nn.Sequential(Watched(8, 8), nn.Linear(8, 1))
    session = daf.Session(model, torch.optim.SGD(model.parameters(), lr=0.1), budget="8GB")
    batch = torch.randn(4, 8)

    def step() -> None:
        session.step(batch, lambda model, x: model(x).mean())

    def passes() -> None:
        with daf.compress(model, bits=2):
            model(batch).mean().backward()

    for run in (step, passes):
        if fails:
            with pytest.raises(ZeroDivisionError):
                run()
        else:
            run()
        assert fails or forward[-1] > 10_000
        assert fails or run is passes or backward[-1] > 10_000
        assert gc.get_threshold() == usual


@pytest.mark.usefixtures("usual")
def test_cycles_of_one_micro_batch_are_gone_in_a_later_one() -> None:
    """A program's own garbage goes between micro-batches as often as in a plain loop."""
    cycles: list[weakref.ref[Cycle]] = []
    alive: list[int] = []

    class Cycling(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            made = [Cycle() for _ in range(700)]  # more than the threshold, each pass
            cycles.append(weakref.ref(made[0]))
            alive.append(sum(each() is not None for each in cycles))
            return super().forward(input)

    model = nn.Sequential(Cycling(8, 8), nn.Linear(8, 1))
    session = daf.Session(model, torch.optim.SGD(model.parameters(), lr=0.1), budget="8GB")
    batch = torch.randn(64, 8)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).mean()

    plan = session.prepare(batch, loss)
    session.plan = replace(plan, micro_batch=8)
    alive.clear()
    cycles.clear()
    session.step(batch, loss)
    assert len(alive) == 8
    assert max(alive) <= 3
