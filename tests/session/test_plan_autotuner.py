"""Plans of other kinds are tried in training, and the fastest stays: made-up machines."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

import planned
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import MIB, large

from daf.core.plan import Plan
from daf.core.policy import coded_policy, exact_policy, with_fused_operators
from daf.core.profile import Affine, Profile, Profiles
from daf.planning import planner
from daf.planning.planner import RIVAL_SIZE, Constraints
from daf.session import plan_selector as module
from daf.session.plan_autotuner import (
    ALIKE,
    LEAST_STEPS,
    MOST_PASSED,
    SHORTEST_MS,
    TOGETHER_MS,
    WORTH_TRYING,
    PlanKind,
    StepMeasurement,
    Trial,
    factor_of,
    plan_kind,
    trial_of,
)
from daf.session.plan_selector import PlanSelector

EXAMPLES = 32  # of ``large`` profiles
OWN_CODES, OWN_EXACT = PlanKind(False, True, EXAMPLES), PlanKind(False, False, EXAMPLES)
FUSED_CODES, FUSED_EXACT = PlanKind(True, True, EXAMPLES), PlanKind(True, False, EXAMPLES)
KINDS = (OWN_CODES, OWN_EXACT, FUSED_CODES, FUSED_EXACT)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough patience that a background search always ends in time."""
    monkeypatch.setattr(module, "PATIENCE_S", 60.0)


def plan_of(kind: PlanKind, predicted_ms: float, noise: float | None = None) -> Plan:
    policy = coded_policy(2) if kind.lossy else exact_policy()
    return Plan(
        with_fused_operators(policy) if kind.fused else policy,
        kind.micro_batch,
        300 * MIB,
        return_freed_blocks=True,
        reason="made up",
        predicted_step_ms=predicted_ms,
        bound_ms=predicted_ms,
        added_noise=float(kind.lossy) if noise is None else noise,
    )


def run(trial: Trial, times_ms: Mapping[PlanKind, tuple[float, ...]]) -> Trial:
    """Every plan takes its kind's times, over and over."""
    while not trial.is_over:
        own = times_ms[plan_kind(trial.plan)]
        trial = trial.noted(StepMeasurement(own[len(trial.times_ms) % LEAST_STEPS], 0))
    return trial


# --- trials ---------------------------------------------------------------------------------------


def test_every_plan_runs_in_turn_and_its_first_step_does_not_count() -> None:
    plans = (plan_of(OWN_CODES, 100.0), plan_of(FUSED_CODES, 110.0), plan_of(OWN_EXACT, 120.0))
    trial = trial_of(plans)
    assert trial is not None
    ran = []
    times_ms = {OWN_CODES: (1, 300, 290), FUSED_CODES: (900, 210, 220), OWN_EXACT: (400, 250, 800)}
    while not trial.is_over:
        ran.append(trial.plan)
        ms = times_ms[plan_kind(trial.plan)][len(ran) % LEAST_STEPS - 1]
        trial = trial.noted(StepMeasurement(ms, 100 + len(ran)))
    assert ran == [plan for plan in plans for _ in range(LEAST_STEPS)]
    assert trial.measured_ms == (290, 210, 250)
    best, held_bytes = trial.fastest()
    assert plan_kind(best) == FUSED_CODES
    assert held_bytes == 106  # of its own steps, the fourth to the sixth
    assert (best.predicted_step_ms, best.bound_ms) == (210, 110)
    assert "the fastest of 3 tried, 210 ms" in best.reason


def test_of_plans_that_are_alike_the_one_that_adds_less_noise_stays() -> None:
    trial = trial_of((plan_of(OWN_CODES, 100.0), plan_of(OWN_EXACT, 101.0)))
    assert trial is not None
    near = 200 * (1 + ALIKE / 2)
    done = run(trial, {OWN_CODES: (200,) * 3, OWN_EXACT: (near,) * 3})
    assert plan_kind(done.fastest()[0]) == OWN_EXACT
    done = run(trial, {OWN_CODES: (200,) * 3, OWN_EXACT: (200 * (1 + 2 * ALIKE),) * 3})
    assert plan_kind(done.fastest()[0]) == OWN_CODES


def test_what_is_predicted_far_slower_or_takes_no_time_is_not_tried() -> None:
    best = plan_of(OWN_CODES, 100.0)
    near, far = plan_of(OWN_EXACT, 99 * WORTH_TRYING), plan_of(FUSED_CODES, 101 * WORTH_TRYING)
    times_ms = {OWN_CODES: (100,) * 3, OWN_EXACT: (170,) * 3, FUSED_CODES: (90,) * 3}
    for plans, tried in (((best, near, far), 2), ((best, far), 1)):
        trial = trial_of(plans)
        assert trial is not None
        done = run(trial, times_ms)
        assert len(done.measured_ms) == tried
        assert done.fastest()[0].policy == best.policy
    assert trial_of((best,)) is None
    assert trial_of(()) is None
    short = plan_of(OWN_CODES, 0.9 * SHORTEST_MS)
    assert trial_of((short, near)) is None


def test_what_is_predicted_far_slower_is_tried_where_all_before_took_longer_still() -> None:
    best = plan_of(OWN_CODES, 100.0)
    far, farther = plan_of(OWN_EXACT, 200.0), plan_of(FUSED_CODES, 220.0)
    trial = trial_of((best, far, farther))
    assert trial is not None
    done = run(trial, {OWN_CODES: (230,) * 3, OWN_EXACT: (210,) * 3, FUSED_CODES: (5,) * 3})
    assert done.measured_ms == (230, 210)  # the last one was predicted more than the second took
    assert plan_kind(done.fastest()[0]) == OWN_EXACT
    done = run(trial, {OWN_CODES: (230,) * 3, OWN_EXACT: (225,) * 3, FUSED_CODES: (215,) * 3})
    assert done.measured_ms == (230, 225, 215)
    assert plan_kind(done.fastest()[0]) == FUSED_CODES
    # A plan that was refused memory takes none of this away.
    without = trial
    while len(without.times_ms) < LEAST_STEPS:
        without = without.noted(StepMeasurement(230, 0))
    without = without.without_current()
    assert without.plans == (best, farther)
    assert without.plan is farther
    assert not without.is_over


def test_short_steps_are_more_so_that_together_they_take_as_long() -> None:
    def steps(predicted_ms: float) -> int:
        plans = plan_of(OWN_CODES, predicted_ms), plan_of(OWN_EXACT, predicted_ms)
        trial = trial_of(plans)
        assert trial is not None
        return trial.steps_of_each

    assert steps(1000.0) == steps(TOGETHER_MS / LEAST_STEPS) == LEAST_STEPS
    assert steps(TOGETHER_MS / 10) == 10
    assert steps(SHORTEST_MS) == TOGETHER_MS / SHORTEST_MS


def test_a_kind_s_factor_is_measured_over_predicted_and_others_take_after_it() -> None:
    trial = trial_of((plan_of(OWN_CODES, 100.0), plan_of(FUSED_CODES, 110.0)))
    assert trial is not None
    done = run(trial, {OWN_CODES: (250,) * 3, FUSED_CODES: (220,) * 3})
    factors = done.factors({})
    assert factors == pytest.approx({OWN_CODES: 2.5, FUSED_CODES: 2.0})
    assert factor_of(OWN_EXACT, factors) == pytest.approx(2.5)
    assert factor_of(FUSED_EXACT, factors) == pytest.approx(2.0)
    assert factor_of(FUSED_EXACT, {OWN_CODES: 2.0, OWN_EXACT: 3.0}) == pytest.approx(2.5)
    assert factor_of(OWN_CODES, {}) == 1.0
    other_sizes = {replace(OWN_CODES, micro_batch=4): 2.0, replace(OWN_CODES, micro_batch=2): 3.0}
    assert factor_of(OWN_CODES, {**other_sizes, OWN_EXACT: 9.0}) == pytest.approx(2.5)
    # What was predicted with factors is measured against those.
    assert done.factors({OWN_CODES: 2.0}) == pytest.approx({OWN_CODES: 5.0, FUSED_CODES: 4.0})


# --- in a session's selector ----------------------------------------------------------------------


def fused(measured: Profile) -> Profile:
    times = tuple((examples, 0.5 * ms) for examples, ms in measured.micro_batch_ms)
    return replace(measured, micro_batch_ms=times, chunk_bytes=8 * MIB)


def with_slow_replays(measured: Profile) -> Profile:
    """Codes are faster, but not by much."""
    calls = tuple(
        replace(call, forward_ms=Affine(4.0, 25 * call.forward_ms.per_example))
        for call in measured.calls
    )
    return replace(measured, calls=calls)


def begun(budget_share: float = 0.5, **terms: object) -> tuple[PlanSelector, int, Profile]:
    measured = with_slow_replays(large(60))
    least = planned.least_budget(measured)
    budget = int(least + budget_share * (planner.kept_peak_bytes(measured) - least))
    selector = PlanSelector(Constraints(**terms))  # type: ignore[arg-type]
    selector.begin(Profiles(measured, fused(measured)), budget)
    if selector.first is not None:
        selector.correct(selector.first.predicted_peak_bytes, budget)
    return selector, budget, measured


def train(selector: PlanSelector, slowness: Mapping[PlanKind, float], most: int = 40) -> list[Plan]:
    """Steps until the plan is settled: what was predicted, times how slow its kind really is."""
    ran: list[Plan] = []
    predicted: dict[int, float] = {}
    while not selector.is_settled and len(ran) < most:
        if selector._search is not None:
            selector._search.wait(60)
        selector.between_steps()
        plan = selector.running
        assert plan is not None
        ran.append(plan)
        base = predicted.setdefault(id(plan), plan.predicted_step_ms)
        selector.note_step(plan, StepMeasurement(base * slowness[plan_kind(plan)], 0), 1.0)
    assert selector.is_settled
    return ran


slownesses = st.fixed_dictionaries({kind: st.floats(0.5, 4.0) for kind in KINDS})


@settings(max_examples=8, deadline=None)
@given(slownesses, st.floats(0.2, 0.9))
def test_the_plan_that_is_fastest_on_the_machine_stays(
    slowness: dict[PlanKind, float], share: float
) -> None:
    selector, budget, _ = begun(share)
    ran = train(selector, slowness)
    tried = {id(plan): plan for plan in ran}.values()
    assert all(plan.predicted_peak_bytes <= budget for plan in tried)
    factors = selector.autotuner.factors
    assert (len(factors) > 1) == (len(tried) > 1)
    if factors:
        assert len(ran) >= LEAST_STEPS * len(factors)
        real_ms = [plan.predicted_step_ms * slowness[plan_kind(plan)] for plan in tried]
        assert selector.plan is not None
        assert selector.plan.predicted_step_ms <= (1 + ALIKE) * min(real_ms) + 1e-6
        for kind, factor in factors.items():
            assert factor == pytest.approx(slowness[kind])


def test_larger_pieces_that_are_predicted_slower_and_run_faster_stay() -> None:
    measured = replace(large(60), split_refusal="")
    least = planned.least_budget(measured)
    room = planner.kept_peak_bytes(measured) - least
    budget, best, rival = next(
        (budget, plans[0], plan)
        for budget in (int(least + share * room) for share in (0.5, 0.4, 0.3, 0.2, 0.1))
        for plans in [planner.make_plans((measured,), budget, with_others=True)]
        for plan in plans
        if plan.micro_batch >= RIVAL_SIZE * plans[0].micro_batch
    )
    selector = PlanSelector(Constraints())
    selector.begin(Profiles(measured), budget)
    if selector.first is not None:
        selector.correct(selector.first.predicted_peak_bytes, budget)
    slowness = {plan_kind(best): 2.0, plan_kind(rival): 1.0}
    train(selector, defaultdict(lambda: 2.0, slowness))
    assert selector.plan is not None
    assert selector.plan.micro_batch == rival.micro_batch
    assert selector.autotuner.factors[plan_kind(best)] == pytest.approx(2.0)


def test_another_budget_is_planned_for_with_what_was_measured() -> None:
    slow_codes = {OWN_CODES: 4.0, OWN_EXACT: 1.0, FUSED_CODES: 4.0, FUSED_EXACT: 4.0}
    selector, budget, measured = begun(0.5)
    train(selector, slow_codes)
    assert selector.autotuner.factors[OWN_CODES] == pytest.approx(4.0)
    assert selector.plan is not None
    assert plan_kind(selector.plan) == OWN_EXACT
    again = selector.again(budget - 4 * MIB, can_refuse=False)
    assert plan_kind(again) == OWN_EXACT  # predicted alone, codes would have been faster
    predicted = planned.make_plan(measured, budget - 4 * MIB, also=(fused(measured),))
    assert plan_kind(predicted).lossy
    assert train(selector, slow_codes)  # the search is taken over, and nothing is tried again
    assert selector.autotuner.trial is None


def test_a_trial_goes_on_where_it_was_in_a_resumed_session() -> None:
    selector, _, _ = begun()
    slowness = {OWN_CODES: 3.0, OWN_EXACT: 2.0, FUSED_CODES: 1.0, FUSED_EXACT: 2.0}
    while selector.autotuner.trial is None or len(selector.autotuner.trial.times_ms) <= LEAST_STEPS:
        selector.between_steps()
        plan = selector.running
        assert plan is not None
        selector.note_step(
            plan, StepMeasurement(plan.predicted_step_ms * slowness[plan_kind(plan)], 7), 1.0
        )
    resumed = PlanSelector(selector.constraints)
    resumed.load_state_dict(json.loads(json.dumps(selector.state_dict())))
    assert resumed.autotuner.trial == selector.autotuner.trial
    assert not resumed.is_settled
    train(resumed, slowness)
    train(selector, slowness)
    assert resumed.autotuner.factors == pytest.approx(dict(selector.autotuner.factors))
    assert resumed.plan == selector.plan
    settled = PlanSelector(selector.constraints)
    settled.load_state_dict(json.loads(json.dumps(selector.state_dict())))
    assert settled.is_settled
    assert settled.autotuner.factors == selector.autotuner.factors


def until_trial(selector: PlanSelector) -> Trial:
    while selector.autotuner.trial is None:
        selector.between_steps()
    return selector.autotuner.trial


def test_where_the_first_plan_is_refused_memory_a_tighter_one_stays() -> None:
    selector, _, _ = begun()
    first = until_trial(selector).plan
    tighter = selector.tighten(first)
    assert tighter is not None
    assert tighter.predicted_peak_bytes < first.predicted_peak_bytes
    assert selector.plan is tighter
    assert selector.is_settled
    selector.between_steps()
    assert selector.plan is tighter
    assert not selector.autotuner.may_try


def test_where_a_later_one_is_refused_the_proven_one_goes_on_and_the_others_are_tried() -> None:
    selector, _, _ = begun()
    first, refused, *others = until_trial(selector).plans
    assert others
    for _ in range(LEAST_STEPS):
        selector.note_step(first, StepMeasurement(500.0, 70), 1.0)
        selector.between_steps()
    assert selector.plan is refused
    assert selector.tighten(refused) is first  # under which the step is tried again
    trial = selector.autotuner.trial
    selector.note_step(first, StepMeasurement(400.0, 60), 1.0)  # which is no trial
    assert selector.autotuner.trial is trial
    selector.between_steps()
    assert selector.plan is others[0]
    for step in range(LEAST_STEPS):
        assert selector.autotuner.take_held_bytes() is None
        selector.note_step(others[0], StepMeasurement(300.0, 50 - step), 1.0)
    assert selector.autotuner.take_held_bytes() == 50
    assert selector.autotuner.take_held_bytes() is None
    assert selector.plan is not None
    assert selector.plan.policy == others[0].policy
    assert plan_kind(refused) not in selector.autotuner.factors
    assert selector.is_settled


def test_where_the_last_one_is_refused_the_fastest_of_the_others_stays() -> None:
    selector, _, _ = begun()
    plans = until_trial(selector).plans
    slow_ms = 2 * plans[-1].predicted_step_ms  # so that the last one is worth trying
    for at in range(LEAST_STEPS * (len(plans) - 1)):
        plan = plans[at // LEAST_STEPS]
        step_ms = slow_ms * (0.9 if plan is plans[0] else 1.0)
        selector.note_step(plan, StepMeasurement(step_ms, 100 - at), 1.0)
        selector.between_steps()
    assert selector.plan is plans[-1]
    kept = selector.tighten(plans[-1])
    assert kept is selector.plan
    assert kept is not None
    assert kept.policy == plans[0].policy
    assert selector.is_settled
    assert selector.autotuner.take_held_bytes() == 100


def test_smaller_batches_decide_nothing_and_cannot_keep_a_trial_open() -> None:
    selector, _, _ = begun()
    trial = until_trial(selector)
    steps = trial.steps_of_each * len(trial.plans)
    selector.note_step(
        trial.plan, StepMeasurement(90.0, 0), 0.9
    )  # near enough: its time counts as 100
    assert selector.autotuner.trial is not None
    assert selector.autotuner.trial.times_ms == pytest.approx((100.0,))
    for _ in range(MOST_PASSED * steps + 1):
        assert selector.autotuner.trial is not None
        selector.between_steps()
        selector.note_step(trial.plan, StepMeasurement(1.0, 0), 0.5)
    assert selector.is_settled
    assert selector.autotuner.factors == {}
    assert selector.plan is trial.plans[0]


def test_a_step_under_another_plan_is_not_counted() -> None:
    selector, _, _ = begun()
    before = until_trial(selector)
    selector.note_step(replace(before.plan, reason="another"), StepMeasurement(1.0, 0), 1.0)
    assert selector.autotuner.trial is before


def test_nothing_is_tried_beyond_the_budget() -> None:
    selector, _, measured = begun()
    until_trial(selector)
    plan = selector.again(measured.floor_bytes + MIB, can_refuse=True)
    assert plan.predicted_peak_bytes > measured.floor_bytes + MIB
    assert selector.is_settled


@pytest.mark.parametrize("policy", ["checkpoint", "quantize", "4-bit"])
def test_named_policies_are_not_tried_against_others(policy: str) -> None:
    selector, _, _ = begun(policy=policy)
    for _ in range(5):
        selector.between_steps()
    assert selector.autotuner.trial is None
    assert selector.is_settled


def test_what_may_add_no_noise_is_tried_with_other_operators_only() -> None:
    selector, _, _ = begun(0.9, tolerance=0.0)
    ran = train(selector, dict.fromkeys(KINDS, 1.0))
    assert {plan_kind(plan).fused for plan in ran} == {False, True}
    assert not any(plan_kind(plan).lossy for plan in ran)
