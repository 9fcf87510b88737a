"""The planner by its invariants: no torch, no device."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daf import planner
from daf.errors import BudgetError
from daf.plan import Measurement, Profile

MIB = 2**20
PER_EXAMPLE = {
    "plain": 4.0,
    "exact": 3.0,
    "8-bit": 1.5,
    "4-bit": 1.0,
    "3-bit": 0.9,
    "2-bit": 0.8,
    "1-bit": 0.7,
}


def points(fixed_mib: float, slope_mib: float, sizes: tuple[int, ...]) -> tuple[Measurement, ...]:
    return tuple(
        Measurement(size, int((fixed_mib + slope_mib * size) * MIB), 0, int(slope_mib * size * MIB))
        for size in sizes
    )


def profile(
    *,
    floor_mib: int = 200,
    model_mib: int = 90,
    optimizer_mib: int = 45,
    batch: int = 128,
    per_example: Mapping[str, float] = PER_EXAMPLE,
    refusal: str = "",
) -> Profile:
    fixed = floor_mib + model_mib
    return Profile(
        floor_bytes=floor_mib * MIB,
        resident_bytes=fixed * MIB,
        parameter_bytes=model_mib * MIB // 2,
        gradient_bytes=model_mib * MIB // 2,
        optimizer_bytes=optimizer_mib * MIB,
        batch_size=batch,
        measurements={n: points(fixed, per_example[n], (16, 32)) for n in planner.LADDER},
        split_refusal=refusal,
    )


def test_prediction_is_the_line_plus_what_is_to_come_plus_the_margin() -> None:
    peak = (290 + 4 * 128 + 45) * MIB
    margin = planner.MARGIN_FRACTION * (peak - 200 * MIB) + planner.MARGIN_BYTES
    assert planner.predict_peak(profile(), "plain", 128) == int(peak + margin)


def test_a_roomy_budget_keeps_everything_and_the_default_allocator() -> None:
    plan = planner.make_plan(profile(), 4000 * MIB)
    assert (plan.policy.name, plan.micro_batch, plan.return_freed_blocks) == ("plain", 128, False)


def test_pieces_come_before_lossy_codes_where_the_batch_may_be_split() -> None:
    plan = planner.make_plan(profile(), 700 * MIB)
    assert (plan.policy.name, plan.micro_batch) == ("plain", 64)


def test_codes_come_where_the_batch_must_stay_whole() -> None:
    plan = planner.make_plan(profile(refusal="batch statistics"), 500 * MIB)
    assert (plan.policy.name, plan.micro_batch) == ("4-bit", 128)


def test_small_pieces_are_the_last_resort() -> None:
    plan = planner.make_plan(profile(), 347 * MIB)
    assert plan.micro_batch < planner.SMALLEST_EFFICIENT_PIECE


def test_refusal_names_the_least_budget_and_that_budget_works() -> None:
    measured = profile(refusal="BatchNorm2d 'stem' takes its statistics from the whole batch")
    with pytest.raises(BudgetError, match="BatchNorm2d 'stem'") as caught:
        planner.make_plan(measured, 300 * MIB)
    least = caught.value.least_bytes
    assert least is not None
    assert least > 300 * MIB
    assert planner.make_plan(measured, least).predicted_peak_bytes <= least
    with pytest.raises(BudgetError):
        planner.make_plan(measured, least - 1)


@given(
    budget=st.integers(300, 3000),
    slopes=st.lists(st.floats(0, 8), min_size=7, max_size=7),
    splittable=st.booleans(),
)
def test_a_plan_is_always_within_its_budget(
    budget: int, slopes: list[float], splittable: bool
) -> None:
    per_example = dict(zip(planner.LADDER, slopes, strict=True))
    measured = profile(per_example=per_example, refusal="" if splittable else "batch statistics")
    least = planner.least_budget(measured)
    if budget * MIB < least:
        with pytest.raises(BudgetError) as caught:
            planner.make_plan(measured, budget * MIB)
        assert caught.value.least_bytes == least
        return
    plan = planner.make_plan(measured, budget * MIB)
    assert plan.predicted_peak_bytes <= budget * MIB
    assert splittable or plan.micro_batch == measured.batch_size
    first = planner.tightest_first(plan, measured)
    assert first.predicted_peak_bytes <= plan.predicted_peak_bytes
    assert first.micro_batch == plan.micro_batch


@given(st.integers(450, 3000), st.integers(450, 3000))
def test_more_bytes_never_give_a_tighter_plan(one: int, other: int) -> None:
    measured = profile(refusal="batch statistics")
    names = [
        planner.make_plan(measured, budget * MIB).policy.name for budget in sorted((one, other))
    ]
    assert planner.LADDER.index(names[1]) <= planner.LADDER.index(names[0])


def test_a_first_step_that_held_more_than_predicted_tightens_the_plan() -> None:
    measured = profile(refusal="batch statistics")
    budget = 500 * MIB
    plan = planner.make_plan(measured, budget)
    first = planner.tightest_first(plan, measured)
    kept = planner.settle(plan, measured, first, first.predicted_peak_bytes, budget)
    assert kept.policy.name == plan.policy.name
    missed = 30 * MIB
    settled = planner.settle(plan, measured, first, first.predicted_peak_bytes + missed, budget)
    assert planner.LADDER.index(settled.policy.name) > planner.LADDER.index(plan.policy.name)
    seen = planner.correct(settled, measured, first, first.predicted_peak_bytes + missed)
    assert seen <= budget


def test_a_first_step_beyond_the_budget_is_refused_with_what_it_needed() -> None:
    measured = profile(refusal="batch statistics")
    budget = planner.least_budget(measured)
    plan = planner.make_plan(measured, budget)
    first = planner.tightest_first(plan, measured)
    with pytest.raises(BudgetError) as caught:
        planner.settle(plan, measured, first, budget + 30 * MIB, budget)
    assert caught.value.least_bytes is not None
    assert caught.value.least_bytes >= budget + 30 * MIB
