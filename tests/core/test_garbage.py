"""Collections of what one piece of work leaves."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator

import pytest

from daf.core.garbage import _Frozen, newer_garbage_collected


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
