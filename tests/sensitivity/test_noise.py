"""The noise watch's log and answers, and the one rollback of a diverging run."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daf.core.errors import DataError
from daf.sensitivity.monitors import NoiseRecord, NoiseWatch, Response
from daf.session.divergence import Action, DivergenceWatch


class Widths:
    """Four widths can be had; each divides the added variance by four."""

    def __init__(self, left: int = 3) -> None:
        self.left = left
        self.asked: list[NoiseRecord] = []

    def widen(self, record: NoiseRecord) -> bool:
        self.asked.append(record)
        self.left -= 1
        return self.left >= 0

    @property
    def variance(self) -> float:
        return 4.0 ** max(0, self.left)


def test_it_tells_once_per_interval_and_widens_until_it_is_quiet() -> None:
    widths, told = Widths(), []
    watch = NoiseWatch(0.5, widths.widen, interval=10, on_record=told.append)
    for step in range(100):
        watch.note(step, widths.variance, 8.0)
    assert [record.step for record in told] == list(range(0, 100, 10))
    # 64 and 16 beside 8 are too much, 4 is just what is tolerated.
    assert [record.response for record in told] == [Response.WIDENED] * 2 + [None] * 8
    assert told[-1].relative_noise == pytest.approx(0.5)
    assert [record.relative_noise for record in widths.asked] == [8.0, 2.0]


def test_without_room_the_user_is_told() -> None:
    told: list[NoiseRecord] = []
    watch = NoiseWatch(0.1, lambda _: False, interval=1, on_record=told.append)
    found = watch.note(3, 1.0, 1.0)
    assert found is told[0]
    assert found.response is Response.NO_ROOM
    assert json.loads(json.dumps(found.as_dict())) == {
        "step": 3,
        "added_variance": 1.0,
        "batch_variance": 1.0,
        "tolerance": 0.1,
        "response": "no room",
        "relative_noise": 1.0,
    }


def test_scattered_measurements_are_averaged() -> None:
    random = np.random.default_rng(0)
    told: list[NoiseRecord] = []
    watch = NoiseWatch(1.0, lambda _: False, interval=100, memory=0.99, on_record=told.append)
    for step in range(1001):
        watch.note(step, float(random.exponential(0.5)), float(random.exponential(1.0)))
    late = [record.relative_noise for record in told[3:]]
    assert np.mean(late) == pytest.approx(0.5, abs=0.1)
    assert all(record.response is None for record in told[3:])


def test_what_is_not_finite_is_an_excess_at_once() -> None:
    widths = Widths()
    watch = NoiseWatch(0.5, widths.widen, interval=100)
    watch.note(0, 0.0, 1.0)
    record = watch.note(1, math.nan, 1.0)
    assert record is not None
    assert record.response is Response.WIDENED
    assert watch.note(101, 0.0, 1.0).relative_noise == 0.0  # type: ignore[union-attr]


def test_no_noise_of_its_own_makes_any_noise_too_much() -> None:
    assert NoiseRecord(0, 0.1, 0.0, 1.0).exceeds
    assert not NoiseRecord(0, 0.0, 0.0, 1.0).exceeds


@pytest.mark.parametrize("wrong", [{"tolerance": 0.0}, {"interval": 0}, {"memory": 1.0}])
def test_numbers_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    numbers = {"tolerance": 0.1, "interval": 5, "memory": 0.5} | wrong
    with pytest.raises(DataError, match="asked to watch"):
        NoiseWatch(numbers.pop("tolerance"), lambda _: True, **numbers)  # type: ignore[arg-type]


def small_watch() -> DivergenceWatch:
    return DivergenceWatch(window=10, patience=3, save_every=20)


def falling(step: int) -> float:
    return 2.0 * 0.99**step + 0.02 * math.sin(step)


def test_a_good_run_is_left_alone_and_saved_now_and_then() -> None:
    watch = small_watch()
    actions = {step: watch.note(step, falling(step)) for step in range(100)}
    assert [step for step, action in actions.items() if action is Action.SAVE] == [
        0,
        20,
        40,
        60,
        80,
    ]
    assert set(actions.values()) == {Action.SAVE, Action.CONTINUE}


def test_spikes_in_a_row_are_rolled_back_once_and_then_stop() -> None:
    watch = small_watch()
    for step in range(50):
        watch.note(step, falling(step))
    assert [watch.note(50 + i, 9.0) for i in range(3)] == [
        Action.CONTINUE,
        Action.CONTINUE,
        Action.ROLL_BACK,
    ]
    assert watch.good_step == 40
    assert "3 losses in a row up to step 52" in watch.reason
    for step in range(41, 70):
        assert watch.note(step, falling(step)) in (Action.CONTINUE, Action.SAVE)
    assert watch.good_step == 60
    assert watch.note(70, math.inf) is Action.STOP
    assert "inf" in watch.reason


def test_a_lone_spike_is_noise() -> None:
    watch = small_watch()
    for step in range(100):
        action = watch.note(step, 9.0 if step % 7 == 6 and step > 20 else falling(step))
        assert action in (Action.CONTINUE, Action.SAVE)


def test_no_state_is_good_right_after_a_spike() -> None:
    watch = small_watch()
    for step in range(39):
        watch.note(step, falling(step))
    watch.note(39, 9.0)
    later = [watch.note(step, falling(step)) for step in range(40, 45)]
    assert later.index(Action.SAVE) == 3  # three calm steps, as many as make a divergence


def test_nan_in_the_first_step_has_nothing_to_go_back_to() -> None:
    assert small_watch().note(0, math.nan) is Action.STOP


def test_it_can_be_resumed() -> None:
    whole, first = small_watch(), small_watch()
    for step in range(45):
        whole.note(step, falling(step))
        first.note(step, falling(step))
    second = small_watch()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    losses = [*(falling(step) for step in range(45, 60)), 9.0, 9.0, 9.0, falling(41), math.nan]
    for step, loss in enumerate(losses, 45):
        assert second.note(step, loss) is whole.note(step, loss)
    assert second.good_step == whole.good_step


@settings(max_examples=60)
@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=200))
def test_there_is_never_a_second_rollback(losses: list[float]) -> None:
    watch = DivergenceWatch(window=3, patience=1, save_every=2)
    actions = [watch.note(step, loss) for step, loss in enumerate(losses)]
    assert actions.count(Action.ROLL_BACK) <= 1
    if Action.ROLL_BACK in actions:
        assert Action.SAVE in actions[: actions.index(Action.ROLL_BACK)]
    before_stop = actions[: actions.index(Action.STOP)] if Action.STOP in actions else actions
    assert all(
        math.isfinite(loss) or action is Action.ROLL_BACK
        for loss, action in zip(losses, before_stop, strict=False)
    )


def test_senseless_numbers_are_refused() -> None:
    with pytest.raises(DataError, match="whole numbers from 1"):
        DivergenceWatch(window=0)
