"""Which plan is in force when: made-up profiles, real planner."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import planned
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import MIB, blocks, large, profile, profiles, saving
from thoroughness import at_most

from daf.core.errors import BudgetError
from daf.core.plan import Plan
from daf.core.policy import LOSSY, Method, Need, plain_policy
from daf.core.profile import Profile, Profiles
from daf.planning import planner
from daf.planning.background_search import BackgroundPlan
from daf.planning.candidate import with_margin
from daf.planning.options import Allowed
from daf.planning.planner import Constraints
from daf.planning.table import Table, kept_selection, make_table
from daf.session import plan_selector as module
from daf.session.plan_selector import (
    ANOTHER_PROCESS_BYTES,
    FEW_EXAMPLES_SHARE,
    MORE_ROOM_BYTES,
    SEARCH_BYTES,
    THREAD_BYTES,
    PeakMeasurement,
    PlanSelector,
)
from daf.step.splitting import NO_ROOM_TO_PROVE

few = settings(max_examples=at_most(25, 12), deadline=None)
LEVELS = ("plain", "exact", "8-bit", "4-bit", "3-bit", "2-bit", "1-bit")


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough patience that a background search always ends in time."""
    monkeypatch.setattr(module, "PATIENCE_S", 60.0)


def chosen(measured: Profile, **terms: object) -> PlanSelector:
    return PlanSelector(Constraints(**terms))  # type: ignore[arg-type]


def kept_bytes(measured: Profile) -> int:
    table = make_table(measured, measured.batch_size, Allowed())
    return with_margin(measured, table.peak_bytes(kept_selection(table)))


def between(measured: Profile, share: float, **terms: object) -> int:
    """A budget at a share of the way from the least feasible one to keeping everything."""
    least = planned.least_budget(measured, **terms)  # type: ignore[arg-type]
    return int(least + share * max(0, kept_bytes(measured) - least))


# --- evidence -------------------------------------------------------------------------------------


def test_evidence_says_by_how_much_more_is_held_above_the_floor() -> None:
    floor = 200 * MIB
    assert PeakMeasurement(300 * MIB, 310 * MIB).factor(floor) == pytest.approx(1.1)
    assert PeakMeasurement(300 * MIB, 300 * MIB).factor(floor) == 1.0
    assert PeakMeasurement(300 * MIB, 250 * MIB).factor(floor) == 1.0


def test_a_prediction_lost_in_the_floor_is_taken_as_some_megabytes() -> None:
    floor = 200 * MIB
    assert PeakMeasurement(floor - MIB, floor + MIB).factor(floor) == pytest.approx(1.5)


@given(st.integers(0, 10**10), st.integers(0, 10**10), st.integers(0, 10**10))
def test_the_factor_is_never_below_one(predicted: int, measured: int, floor: int) -> None:
    factor = PeakMeasurement(predicted, measured).factor(floor)
    assert factor >= 1.0
    assert (factor == 1.0) == (measured <= predicted)


# --- beginning and settling -----------------------------------------------------------------------


def test_the_first_step_runs_under_less_than_what_training_goes_on_with() -> None:
    measured = large(60)
    selector = chosen(measured)
    plan = selector.begin(Profiles(measured), between(measured, 0.7))
    first = selector.first
    assert first is not None
    assert selector.running is first
    assert selector.plan is plan
    assert first.micro_batch == plan.micro_batch
    assert first.predicted_peak_bytes < plan.predicted_peak_bytes


@few
@given(profiles(most=6), st.floats(0.2, 1), st.sampled_from((0.0, 0.05, 0.14, None)))
def test_the_first_plan_holds_least_at_its_size_within_the_tolerance(
    measured: Profile, share: float, tolerance: float | None
) -> None:
    budget = between(measured, share, tolerance=tolerance)
    plan = planned.make_plan(measured, budget, tolerance=tolerance)
    first = planner.first_plan(measured, plan, budget, Constraints(tolerance=tolerance))
    own = Allowed(replay=False)
    found = (_at_level(measured, plan, level, tolerance, own) for level in LEVELS)
    peaks = [each for each in found if each is not None]
    if first is None:
        assert min(peaks, default=plan.predicted_peak_bytes) >= plan.predicted_peak_bytes
        return
    assert first.micro_batch == plan.micro_batch
    assert first.predicted_peak_bytes < plan.predicted_peak_bytes
    if peaks:
        assert first.predicted_peak_bytes <= min(peaks)
    if tolerance == 0.0:
        assert lossy_sites(measured, first) == []


def _at_level(
    measured: Profile, plan: Plan, level: str, tolerance: float | None, allowed: Allowed
) -> int | None:
    """A level's peak for micro-batches of the same size, if it is within the tolerance."""
    alone = replace(allowed, release_gradients=plan.release_gradients)
    found = planned.choose(measured, 10**12, policy=level, allowed=alone)
    assert found is not None
    within = tolerance is None or found.noise <= tolerance
    return found.predicted_peak_bytes if within and _is_like(found.table, plan) else None


def _is_like(table: Table, plan: Plan) -> bool:
    return (table.micro_batch, table.release_gradients) == (
        plan.micro_batch,
        plan.release_gradients,
    )


def lossy_sites(measured: Profile, plan: Plan) -> list[str]:
    exact = (Method.KEEP, Method.MASK, Method.PACK, Method.DROP, Method.SPILL, Method.REPLAY)
    return [
        str(each.site)
        for each in measured.savings
        if each.need in LOSSY
        and plan.policy.treatment(each.need, each.site).method not in exact
        and each.treatable
    ]


@few
@given(profiles(most=6), st.floats(0, 1))
def test_no_tolerance_means_only_exact_treatments(measured: Profile, share: float) -> None:
    plan = planned.make_plan(measured, between(measured, share, tolerance=0.0), tolerance=0.0)
    assert lossy_sites(measured, plan) == []


@pytest.mark.parametrize(
    "policy", ["sage", "checkpoint", "accumulate", "reduce", "quantize", "2-bit"]
)
def test_what_was_named_runs_as_named_from_the_first_step(policy: str) -> None:
    measured = large(40)
    selector = chosen(measured, policy=policy)
    budget = planned.least_budget(measured, policy=policy) + 8 * MIB
    plan = selector.begin(Profiles(measured), budget)
    assert selector.first is None
    assert selector.running == plan
    assert plan == planned.make_plan(measured, budget, policy=policy)
    selector.between_steps()
    assert selector.plan == plan


def test_a_peak_as_predicted_leaves_the_plan_as_it_is() -> None:
    measured = large(60)
    selector = chosen(measured)
    budget = between(measured, 0.7)
    plan = selector.begin(Profiles(measured), budget)
    assert selector.first is not None
    predicted = selector.first.predicted_peak_bytes
    selector.correct(predicted, budget)
    assert selector.evidence == PeakMeasurement(predicted, predicted)
    assert selector.first is None
    assert selector.running is plan


def test_a_higher_peak_than_predicted_corrects_every_later_plan() -> None:
    measured = large(60)
    selector = chosen(measured)
    budget = between(measured, 0.7)
    before = selector.begin(Profiles(measured), budget)
    least = selector.least_bytes()
    assert selector.first is not None
    above = selector.first.predicted_peak_bytes - measured.floor_bytes
    measured_peak = selector.first.predicted_peak_bytes + above // 20
    selector.correct(measured_peak, budget)
    selector.between_steps()
    after = selector.plan
    assert after is not None
    # What is told is in the process's measure, 5 % more above the floor than was modelled.
    assert after.predicted_peak_bytes <= budget
    modelled = planned.make_plan(
        measured, measured.floor_bytes + int((budget - measured.floor_bytes) / 1.05), quickly=True
    )
    expected = measured.floor_bytes + 1.05 * (modelled.predicted_peak_bytes - measured.floor_bytes)
    assert after.predicted_peak_bytes == pytest.approx(expected, rel=1e-3)
    assert after.predicted_step_ms >= before.predicted_step_ms - 1e-6
    floor = measured.floor_bytes
    allowance = ANOTHER_PROCESS_BYTES
    expected = 1.05 * (least - allowance - floor) + allowance
    assert selector.least_bytes() - floor == pytest.approx(expected, rel=1e-4)


FLOOR_BYTES = large(60).floor_bytes


def begun(share: float) -> tuple[PlanSelector, Plan, int]:
    """A selector that has begun, the plan of its first step, and its budget."""
    measured = large(60)
    selector, budget = chosen(measured), between(measured, share)
    selector.begin(Profiles(measured), budget)
    assert selector.first is not None
    return selector, selector.first, budget


def test_what_a_search_held_beside_the_step_is_no_evidence() -> None:
    selector, first, budget = begun(0.7)
    plan, search = selector.plan, BackgroundPlan(lambda _: ())
    selector._search = search
    selector.correct(first.predicted_peak_bytes + SEARCH_BYTES, budget)
    assert selector.evidence is not None
    assert selector.evidence.factor(FLOOR_BYTES) == 1.0
    assert selector.plan is plan


def test_where_evidence_leaves_no_plan_the_one_that_fitted_goes_on() -> None:
    selector, first, budget = begun(0.4)
    low = replace(first, predicted_peak_bytes=FLOOR_BYTES + MIB)
    selector.first = low
    selector.correct(budget, budget)
    assert selector.running is low
    assert selector.least_bytes() > budget
    assert selector.is_settled


def test_evidence_that_leaves_no_plan_is_an_error_that_names_the_least() -> None:
    selector, _, budget = begun(0.4)
    with pytest.raises(BudgetError) as caught:
        selector.correct(3 * budget, budget)
    assert caught.value.least_bytes == selector.least_bytes()
    assert caught.value.least_bytes > budget
    assert f"budget={caught.value.least_bytes}" in str(caught.value)


def test_a_new_profile_forgets_old_evidence() -> None:
    measured = large(40)
    selector = chosen(measured)
    selector.evidence = PeakMeasurement(
        measured.floor_bytes + 8 * MIB, measured.floor_bytes + 80 * MIB
    )
    selector.begin(Profiles(measured), between(measured, 0.5))
    assert selector.evidence is None


# --- the background -------------------------------------------------------------------------------


def test_the_best_plan_is_taken_over_between_two_steps_and_not_before() -> None:
    measured = large(40)
    selector = chosen(measured)
    quick = selector.begin(Profiles(measured), between(measured, 0.5))
    release = threading.Event()
    best = replace(quick, reason="the best")

    def search(_stop: object) -> tuple[Plan, ...]:
        assert release.wait(30)
        return (best,)

    selector._search = BackgroundPlan(search)
    selector.between_steps()
    assert selector.plan is quick  # not found yet
    release.set()
    assert selector._search is not None
    assert selector._search.wait(30) == (best,)
    assert selector.plan is quick
    selector.between_steps()
    assert selector.plan is best
    assert selector._search is None


def test_a_search_that_finds_nothing_leaves_the_quick_plan() -> None:
    measured = large(40)
    selector = chosen(measured)
    quick = selector.begin(Profiles(measured), between(measured, 0.5))

    def search(_stop: object) -> tuple[Plan, ...]:
        raise BudgetError("nothing fits")

    selector._search = BackgroundPlan(search)
    assert selector._search.wait(30) == ()
    selector.between_steps()
    assert selector.plan is quick


def test_a_search_for_an_old_budget_is_never_taken_over() -> None:
    measured = large(40)
    selector = chosen(measured)
    selector.begin(Profiles(measured), between(measured, 0.9))
    stale = replace(selector.plan, reason="stale")  # type: ignore[type-var]
    selector._search = BackgroundPlan(lambda _stop: (stale,))  # type: ignore[arg-type, return-value]
    tight = between(measured, 0.3)
    selector.again(tight, can_refuse=False)
    if selector._search is not None:
        selector._search.wait(60)
    selector.between_steps()
    assert selector.plan is not None
    assert selector.plan.reason != "stale"
    assert selector.plan.predicted_peak_bytes <= tight


def test_the_plan_in_force_becomes_the_proven_one() -> None:
    measured = large(40)
    budget = between(measured, 0.4)
    selector = chosen(measured)
    found = selector.begin(Profiles(measured), budget)
    proven = planned.make_plan(measured, budget)
    assert found == proven
    quick = planned.make_plan(measured, budget, quickly=True)
    assert proven.predicted_step_ms <= quick.predicted_step_ms + 1e-6


# --- another budget, and tightening ---------------------------------------------------------------


def test_where_refusals_are_possible_a_hopeless_budget_gets_the_plan_that_holds_least() -> None:
    measured = large(40)
    least = planned.least_budget(measured)
    selector = chosen(measured)
    before = selector.begin(Profiles(measured), between(measured, 0.5))
    with pytest.raises(BudgetError) as caught:
        selector.again(least - 4 * MIB, can_refuse=False)
    assert caught.value.least_bytes == pytest.approx(least + ANOTHER_PROCESS_BYTES, abs=2)
    assert selector.plan is before
    plan = selector.again(least - 4 * MIB, can_refuse=True)
    assert selector.running is plan
    assert plan.predicted_peak_bytes <= least + ANOTHER_PROCESS_BYTES


@pytest.mark.parametrize("share", [-0.1, 0.4])
def test_a_search_that_is_given_up_holds_nothing_beside_the_next_step(share: float) -> None:
    measured = large(40)
    selector = chosen(measured)
    selector.begin(Profiles(measured), between(measured, 0.5))

    def slow_to_stop(stop: Callable[[], bool]) -> tuple[Plan, ...]:
        while not stop():
            time.sleep(0.01)
        time.sleep(0.3)
        return ()

    search = selector._search = BackgroundPlan(slow_to_stop)
    selector.again(between(measured, share), can_refuse=True)
    assert search.is_done
    assert selector._search is not search


@settings(max_examples=12, deadline=None)
@given(profiles(most=6), st.sampled_from((None, 0.0, 0.14)))
def test_tightening_strictly_decreases_and_ends(measured: Profile, tolerance: float | None) -> None:
    selector = chosen(measured, tolerance=tolerance)
    plan: Plan | None = selector.begin(Profiles(measured), 2 * kept_bytes(measured))
    least = planned.least_budget(measured, tolerance=tolerance)
    peaks = []
    while plan is not None:
        peaks.append(plan.predicted_peak_bytes)
        assert selector.running is plan
        assert len(peaks) < 60
        plan = selector.tighten(plan)
    assert all(later < earlier for earlier, later in pairwise(peaks))
    assert peaks[-1] <= least


def test_tightening_under_evidence_stays_in_the_process_s_measure_and_ends() -> None:
    measured = large(40)
    selector = chosen(measured)
    selector.begin(Profiles(measured), between(measured, 0.6))
    selector.evidence = PeakMeasurement(300 * MIB, 310 * MIB)  # factor 1.1
    plan: Plan | None = selector.again(2 * kept_bytes(measured), can_refuse=False)
    peaks = []
    while plan is not None:
        peaks.append(plan.predicted_peak_bytes)
        assert len(peaks) < 60
        plan = selector.tighten(plan)
    assert peaks == sorted(set(peaks), reverse=True)
    assert peaks[-1] <= selector.least_bytes()


# --- levels ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [8, 4, 3, 2, 1])
def test_a_level_treats_every_site_as_it_says(width: int) -> None:
    needs = (Need.LINEAR, Need.SIGN, Need.LINEAR)
    measured = profile([saving(i, 3, need, 100_000) for i, need in enumerate(needs)])
    plan = planned.make_plan(measured, 10**12, policy=f"{width}-bit")
    found = [plan.policy.treatment(each.need, each.site) for each in measured.savings]
    assert [each.bits for each in found] == [width, 1, width]
    assert found[1].method is Method.MASK
    assert plan.policy.replayed == frozenset()


def test_the_levels_exact_and_plain_lose_nothing() -> None:
    measured = large(30)
    exact = planned.make_plan(measured, 10**12, policy="exact")
    assert lossy_sites(measured, exact) == []
    assert any(t.method is Method.MASK for t in exact.policy.by_need.values()) or any(
        t.method is Method.MASK for t in exact.policy.by_site.values()
    )
    plain = planned.make_plan(measured, 10**12, policy="plain")
    assert dict(plain.policy.by_need) == dict(plain_policy().by_need)
    assert not plain.policy.by_site


def test_a_demanded_release_is_planned_whatever_parts_would_take() -> None:
    measured = large(30)
    must = Allowed(must_release=True)
    for share in (0.2, 0.9, 1.5):
        plan = planned.make_plan(measured, between(measured, share, allowed=must), allowed=must)
        assert plan.release_gradients
        assert plan.micro_batch == measured.batch_size
    # Parts would be faster, and can release nothing.
    times = tuple((size, 0.01 * size) for size, _ in measured.micro_batch_ms[:-1])
    slow = replace(measured, micro_batch_ms=(*times, (measured.batch_size, 1e6)))
    assert planned.make_plan(slow, 10**12, allowed=must).release_gradients
    never = Allowed(release_gradients=False)
    plan = planned.make_plan(measured, between(measured, 0.5, allowed=never), allowed=never)
    assert not plan.release_gradients


def test_the_first_step_is_predicted_without_the_state_that_its_update_makes() -> None:
    measured = large(60)
    budget = between(measured, 0.7)
    selector = chosen(measured)
    plan = selector.begin(Profiles(measured), budget)
    whole = planner.first_plan(measured, plan, budget)
    assert selector.first is not None
    assert whole is not None
    before_update = selector.first.predicted_peak_bytes
    assert before_update == whole.predicted_peak_bytes - measured.optimizer_bytes


# --- fused operators ------------------------------------------------------------------------------


def fused(measured: Profile, speedup: float) -> Profile:
    """The same step with fused operators, so many times as fast."""
    times = tuple((examples, ms / speedup) for examples, ms in measured.micro_batch_ms)
    return replace(measured, micro_batch_ms=times, chunk_bytes=8 * MIB)


@few
@given(profiles(most=6), st.floats(0.2, 0.95), st.sampled_from((0.5, 2.0)))
def test_the_faster_operators_are_taken_whatever_the_budget(
    measured: Profile, share: float, speedup: float
) -> None:
    other, budget = fused(measured, speedup), between(measured, share)
    plan = chosen(measured).begin(Profiles(measured, other), budget)
    alone = [planned.make_plan(each, budget) for each in (measured, other) if fits(each, budget)]
    assert plan.predicted_step_ms <= min(each.predicted_step_ms for each in alone)
    if speedup > 1 and fits(other, budget) and len(measured.micro_batch_ms) == 1:
        assert plan.policy.fused
    if plan.policy.fused:
        share_of_batch = plan.micro_batch / other.batch_size if other.score_sites else 1
        assert plan.policy.chunk_bytes == int(other.chunk_bytes * share_of_batch)
        assert not plan.policy.replayed


def test_micro_batches_that_keep_everything_are_no_reason_to_seek_nothing_better(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With codes the micro-batches may be larger, and take less time."""
    kept = ((0, 10_000), (0, 10_000), (2, 170_000), (3, 10_000))
    measured = profile(
        [
            saving(n, 4, Need.LINEAR, elements, call=1 + n // 2, storage=storage)
            for n, (storage, elements) in enumerate(kept)
        ],
        calls=blocks(4, 2),
        refusal="",
    )
    budget = between(measured, 0.25)
    quick = planned.make_plan(measured, budget, policy="accumulate")
    assert quick.policy.name == "plain"
    assert quick.micro_batch < measured.batch_size
    selector = chosen(measured)
    monkeypatch.setattr(selector, "_quick", lambda *_, **__: quick)
    plan = selector.begin(Profiles(measured), budget)
    assert plan.predicted_step_ms < quick.predicted_step_ms
    assert plan.micro_batch > quick.micro_batch


def fits(measured: Profile, budget_bytes: int) -> bool:
    return planned.least_budget(measured) <= budget_bytes


def test_the_first_step_and_tighter_plans_of_a_fused_plan_are_its_own_profile_s() -> None:
    measured = large(60)
    other = fused(measured, 10.0)
    selector = chosen(measured)
    plan = selector.begin(Profiles(measured, other), between(measured, 0.9))
    assert plan.policy.fused
    assert selector.first is not None
    assert selector.first.policy.fused
    tighter = selector.tighten(plan)
    assert tighter is not None
    assert tighter.predicted_peak_bytes < plan.predicted_peak_bytes


def test_the_least_budget_is_the_least_of_both() -> None:
    measured = large(60)
    smaller = replace(fused(measured, 0.5), resident_bytes=measured.resident_bytes - 20 * MIB)
    selector = chosen(measured)
    least = planned.least_budget(smaller)
    selector.begin(Profiles(measured, smaller), least)
    assert selector.plan is not None
    assert selector.plan.policy.fused
    assert selector.least_bytes() == least + ANOTHER_PROCESS_BYTES + 1
    with pytest.raises(BudgetError) as error:
        chosen(measured).begin(Profiles(measured, smaller), least - MIB)
    assert error.value.least_bytes == least + ANOTHER_PROCESS_BYTES + MORE_ROOM_BYTES + 1


@pytest.mark.parametrize(("timed", "is_few"), [(8, False), (4, True)])
def test_a_whole_batch_foretold_by_few_examples_is_given_more_room(
    timed: int, is_few: bool
) -> None:
    """A quarter of the batch is measured as a rule; here there was room for one size."""
    measured = replace(large(60), batch_size=32, micro_batch_ms=((timed, 30.0),))
    least = planned.least_budget(measured)
    with pytest.raises(BudgetError) as error:
        chosen(measured).begin(Profiles(measured), least - MIB)
    more_bytes = THREAD_BYTES * torch.get_num_threads()
    more_bytes += int(FEW_EXAMPLES_SHARE * (least - measured.floor_bytes))
    expected = least + ANOTHER_PROCESS_BYTES + (more_bytes if is_few else 0) + 1
    assert error.value.least_bytes == expected + MORE_ROOM_BYTES
    measured = replace(measured, micro_batch_ms=((4, 20.0), (8, 30.0)))  # with room for two sizes
    with pytest.raises(BudgetError) as error:
        chosen(measured, tolerance=0.0).begin(Profiles(measured), least - MIB)
    exact = planned.least_budget(measured, tolerance=0.0)
    assert error.value.least_bytes == exact + ANOTHER_PROCESS_BYTES + 1  # nothing to weigh


def test_no_budget_is_taken_below_what_loading_held() -> None:
    """Plans may hold less, since code goes back; yet the process was above that budget before."""
    measured = large(60)
    selector, budget = chosen(measured), planned.least_budget(measured) + MIB
    selector.loaded_bytes = budget + MIB
    with pytest.raises(BudgetError) as error:
        selector.begin(Profiles(measured), budget)
    least = budget + MIB + ANOTHER_PROCESS_BYTES + MORE_ROOM_BYTES
    assert error.value.least_bytes == least
    assert selector.begin(Profiles(measured), least).predicted_peak_bytes <= least


@pytest.mark.parametrize("proof_share", [0.5, 1.5])
def test_where_a_proof_lacked_room_a_budget_is_named_that_has_it_for_proof_and_parts(
    proof_share: float,
) -> None:
    parts = replace(large(60), split_refusal="", micro_batch_ms=((4, 20.0), (8, 30.0)))
    least = planned.least_budget(parts)
    proof_bytes = int(proof_share * least)
    measured = replace(parts, split_refusal=NO_ROOM_TO_PROVE, proof_bytes=proof_bytes)
    with pytest.raises(BudgetError) as error:
        chosen(measured).begin(Profiles(measured), least // 2)
    expected = max(least + 1, proof_bytes) + ANOTHER_PROCESS_BYTES
    assert error.value.least_bytes == expected + MORE_ROOM_BYTES


@pytest.mark.parametrize("policy", ["sage", "checkpoint", "reduce", "2-bit"])
def test_named_policies_keep_pytorch_s_operators(policy: str) -> None:
    measured = large(20)
    selector = chosen(measured, policy=policy)
    plan = selector.begin(Profiles(measured, fused(measured, 10.0)), 10**12)
    assert not plan.policy.fused


# --- room for the search --------------------------------------------------------------------------


def test_a_search_is_stopped_with_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = large(40)
    asked = iter([False, True])
    budget, stop = between(measured, 0.5), lambda: next(asked, True)
    found = planner.make_plans((measured,), budget, stop=stop)[0]
    best = planned.make_plan(measured, between(measured, 0.5))
    assert next(asked, None) is None  # it was asked
    assert best.predicted_step_ms <= found.predicted_step_ms
    assert found.bound_ms <= best.predicted_step_ms


def test_no_search_goes_on_beside_a_step_that_needs_all_of_the_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.0)
    measured = large(60)
    for share in (0.3, 0.6):
        selector = chosen(measured)
        budget = between(measured, share)
        plan = selector.begin(Profiles(measured), budget)
        room = budget - plan.predicted_peak_bytes
        assert (selector._search is None) == (room < module.SEARCH_BYTES)
        plan = selector.again(budget - MIB, can_refuse=False)
        running = {thread.name for thread in threading.enumerate()}
        assert selector._search is not None or "daf-planner" not in running
