from __future__ import annotations

import time

import pytest

from daf.core.errors import UnitError
from daf.training.checkpoint_clock import CheckpointClock, read_pace


class Time:
    """A clock that stands still until it is moved."""

    now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> Time:
    found = Time()
    monkeypatch.setattr(time, "monotonic", found.monotonic)
    return found


def write(clock: CheckpointClock, moved: Time, took_s: float) -> None:
    with clock.writing():
        moved.now_s += took_s


def test_by_default_ten_minutes_and_ends_of_epochs(moved: Time) -> None:
    clock = CheckpointClock(None)
    write(clock, moved, 0.0)
    moved.now_s += 599
    assert not clock.is_due(1)
    assert clock.is_due(1, ends_epoch=True)
    moved.now_s += 1
    assert clock.is_due(2)
    write(clock, moved, 1.0)
    assert not clock.is_due(2)


def test_by_default_writing_takes_one_percent_of_the_time_at_most(moved: Time) -> None:
    clock = CheckpointClock(None)
    write(clock, moved, 9.0)
    moved.now_s += 899
    assert not clock.is_due(1, ends_epoch=True)
    moved.now_s += 1
    assert clock.is_due(1)


def test_a_time_that_was_asked_for_is_obeyed(moved: Time) -> None:
    clock = CheckpointClock("30s")
    write(clock, moved, 20.0)
    moved.now_s += 29
    assert not clock.is_due(1)
    moved.now_s += 1
    assert clock.is_due(1)


def test_steps_that_were_asked_for_are_obeyed(moved: Time) -> None:
    clock = CheckpointClock("5steps")
    write(clock, moved, 100.0)
    assert [step for step in range(1, 12) if clock.is_due(step)] == [5, 10]
    assert clock.is_due(7, ends_epoch=True)
    moved.now_s += 10_000
    assert not clock.is_due(7)


@pytest.mark.parametrize("text", ["30s", "10min", "1.5h", "500steps", "1step", " 500 "])
def test_paces_that_can_be_read(text: str) -> None:
    assert read_pace(text) == text.strip()


@pytest.mark.parametrize("text", ["", "0", "0s", "-5", "1.5", "1.5steps", "5d", "s", "lots", "1e3"])
def test_paces_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(UnitError, match=r"30s, 10min or 1h"):
        read_pace(text)
