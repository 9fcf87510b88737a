"""A diverging run is told from a noisy one by its losses, and rolled back once."""

from __future__ import annotations

import json
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from daf.session.rollback import Action, DivergenceWatch


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
