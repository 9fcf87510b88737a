"""Sensitivities in the planner: widths go where they count, for every policy that has widths."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, cast

import planned
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from synthetic import MIB, blocks, fused, profile, profiles, saving

from daf.capture.capture import Capture
from daf.core.code_errors import error_growth, relative_error
from daf.core.code_tables import rotated_error
from daf.core.errors import BudgetError
from daf.core.plan import Plan
from daf.core.policy import KEEP, Method, Need, Policy, Treatment, coded_policy
from daf.core.profile import Profile, Profiles
from daf.memory.domain import ProcessMemory
from daf.memory.process_limit import MemoryKeeper
from daf.planning import planner, policies
from daf.planning.bit_widths import is_lossy, one_bit_wider, wider_level
from daf.planning.noise import expected_noise, noise_per_weight, served_weights
from daf.planning.options import Allowed
from daf.planning.search import Problem
from daf.profiling.beside_memory import BesideMemory
from daf.sensitivity.tracker import SensitivityTracker
from daf.session.noise_controller import NOISE_OF_A_BIT, NoiseController
from daf.session.plan_selector import PlanSelector

few = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
CODES_ONLY = Allowed(methods=frozenset(Method) - {Method.SPILL}, replay=False)


def equal_sites(count: int = 6) -> Profile:
    return profile([saving(index, count, Need.LINEAR, 4 * MIB // 4) for index in range(count)])


def weighted(measured: Profile, weights: list[float], per_weight: float = 0.05) -> Profile:
    sites = [each.site for each in measured.savings]
    named = dict(zip(sites, weights, strict=True))
    return replace(measured, weights=named, noise_per_weight=per_weight)


def with_planes(measured: Profile, planes: int) -> int:
    """A budget that holds every site's first bit, and so many planes more."""
    plane = measured.batch_size * 4 * MIB // 4 // 8
    return planned.least_budget(measured, policy="1-bit") + int(1.02 * planes * plane)


@pytest.mark.parametrize("policy", ["optimal", "quantize"])
def test_bits_go_where_the_weight_is(policy: str) -> None:
    measured = weighted(equal_sites(), [0.1, 0.1, 5.0, 0.6, 0.1, 0.1])
    budget = with_planes(measured, 6)
    plan = planned.make_plan(measured, budget, policy=policy, allowed=CODES_ONLY)
    found = [plan.policy.treatment(each.need, each.site) for each in measured.savings]
    errors = [relative_error(each) for each in found]
    # The last is read again at once, and not alive at the peak.
    assert errors[2] <= errors[3] < min(errors[0], errors[1], errors[4])
    assert plan.predicted_peak_bytes <= budget
    uniform = planned.make_plan(replace(measured, weights={}), budget, policy="quantize")
    before = sum(expected_noise(measured, uniform.policy, measured.batch_size).values())
    assert plan.added_noise < 0.5 * before


def scores_among(weights: list[float] | None) -> Profile:
    """Two linear inputs with attention's q and k between them; chunks as plans have them."""
    needs = (Need.LINEAR, Need.SCORE, Need.SCORE, Need.LINEAR)
    measured = profile([saving(index, 4, need, MIB) for index, need in enumerate(needs)])
    measured = replace(measured, chunk_bytes=MIB)
    return measured if weights is None else weighted(measured, weights)


def score_treatments(measured: Profile, budget: int, policy: str = "optimal") -> list[Treatment]:
    plan = planned.make_plan(measured, budget, policy=policy, allowed=CODES_ONLY)
    scores = [each.site for each in measured.savings if each.need is Need.SCORE]
    return [plan.policy.by_site[site] for site in scores]


EIGHT, FOUR = coded_policy(8), coded_policy(4, score_bits=4)


@pytest.mark.parametrize("policy", ["optimal", "quantize"])
def test_queries_and_keys_have_four_bits_where_it_was_measured_that_these_add_little(
    policy: str,
) -> None:
    four, eight = (each.by_need[Need.SCORE] for each in (FOUR, EIGHT))
    assumed, faint = scores_among(None), scores_among([1.0, 0.01, 0.01, 1.0])
    tightest = partial(planned.least_budget, policy=policy, allowed=CODES_ONLY)
    assert tightest(faint) < tightest(assumed) - 3 * MIB
    assert score_treatments(faint, tightest(faint), policy) == [four, four]
    assert score_treatments(assumed, tightest(assumed), policy) == [eight, eight]
    # One of them alone was measured: what the other's would add is not known.
    partly = replace(faint, weights=dict(list(faint.weights.items())[:2]))
    assert score_treatments(partly, tightest(partly), policy) == [four, eight]


def test_queries_and_keys_keep_eight_bits_where_four_would_add_too_much() -> None:
    loud = scores_among([0.001, 1000.0, 1000.0, 0.001])
    keeping_to: dict[str, Any] = {"tolerance": planner.DEFAULT_TOLERANCE, "allowed": CODES_ONLY}
    budget = planned.least_budget(loud, **keeping_to)
    plan = planned.make_plan(loud, budget, **keeping_to)
    scores = [each.site for each in loud.savings if each.need is Need.SCORE]
    assert all(plan.policy.by_site[site] == EIGHT.by_need[Need.SCORE] for site in scores)
    narrower = dict.fromkeys(scores, FOUR.by_need[Need.SCORE])
    four = replace(plan.policy, by_site=dict(plan.policy.by_site) | narrower)
    assert plan.added_noise <= planner.DEFAULT_TOLERANCE
    assert sum(expected_noise(loud, four, loud.batch_size).values()) > planner.DEFAULT_TOLERANCE


def test_a_uniform_level_keeps_eight_bits_whatever_was_measured() -> None:
    faint = scores_among([1.0, 0.01, 0.01, 1.0])
    budget = planned.least_budget(faint, policy="2-bit")
    assert all(each.bits == 8 for each in score_treatments(faint, budget, "2-bit"))


@few
@given(profiles(may_be_fused=True), st.floats(0.0, 1.0), st.data())
def test_quantizing_by_weight_is_never_noisier_than_one_width_everywhere(
    measured: Profile, share: float, data: st.DataObject
) -> None:
    sites = sorted({each.site for each in measured.savings}, key=str)
    numbers = data.draw(st.lists(st.floats(0.01, 100.0), min_size=len(sites), max_size=len(sites)))
    heavy = replace(measured, weights=dict(zip(sites, numbers, strict=True)), noise_per_weight=0.01)
    uniform = [*policies._quantizing(Problem(heavy, allowed=CODES_ONLY))]
    least = min(each.predicted_peak_bytes for each in uniform)
    assert planned.least_budget(heavy, policy="quantize") <= least
    budget = least + int(share * 0.2 * least)
    plan = planned.make_plan(heavy, budget, policy="quantize")
    fitting = [each for each in uniform if each.predicted_peak_bytes <= budget]
    assert fitting
    # HiGHS stops within a thousandth, of an objective that holds a little time too.
    assert plan.added_noise <= min(each.noise for each in fitting) * 1.002 + 1e-4
    assert plan.policy.replayed == frozenset()
    assert plan.account["predicted_peak"] <= budget


@few
@given(profiles(may_be_fused=True), st.sampled_from(["1-bit", "2-bit", "4-bit", "optimal"]))
def test_what_a_plan_says_it_adds_is_what_its_policy_is_expected_to_add(
    measured: Profile, level: str
) -> None:
    budget = planned.least_budget(measured, policy=level)
    plan = planned.make_plan(measured, budget, policy=level)
    found = expected_noise(measured, plan.policy, plan.micro_batch)
    assert sum(found.values()) == pytest.approx(plan.added_noise, rel=1e-9, abs=1e-12)


def coded_for_nothing(measured: Profile, policy: Policy) -> float:
    """What codes would add that execution does not make, because something kept tells all."""
    found = 0.0
    for each in measured.savings:
        is_told = each.teller is not None and policy.by_site.get(each.teller) == KEEP
        if is_told:
            found += measured.weight(each.site) * relative_error(policy.by_site[each.site])
    return noise_per_weight(measured) * found


def kept_beside_their_parents(measured: Profile, policy: Policy, examples: int) -> float:
    """What tensors would add that their parents' codes could serve, but that are kept."""
    treated = {each.site: policy.treatment(each.need, each.site) for each in measured.savings}
    found = 0.0
    for each in measured.savings:
        replayed = measured.calls[each.call].module in policy.replayed
        if each.parents and each.need is Need.LINEAR and (replayed or treated[each.site] == KEEP):
            assert each.tensor_bytes.at(examples) >= 4096
            errors = [relative_error(treated[parent]) for parent in each.parents]
            share = sum(errors) / len(errors)
            found += noise_per_weight(measured) * measured.weight(each.site) * share
    return found


@settings(few, max_examples=100)
@given(profiles(may_be_fused=True), st.sampled_from(["1-bit", "2-bit", "4-bit", "optimal"]))
def test_the_planner_counts_a_code_with_all_that_it_could_serve(
    measured: Profile, level: str
) -> None:
    budget = planned.least_budget(measured, policy=level)
    candidate = planned.choose(measured, budget, policy=level)
    assert candidate is not None
    plan = candidate.as_plan(budget, level)
    unused = kept_beside_their_parents(measured, plan.policy, plan.micro_batch)
    unused += coded_for_nothing(measured, plan.policy)
    assert candidate.noise == pytest.approx(plan.added_noise + unused, rel=1e-9, abs=1e-12)
    assert plan.bounded_noise == candidate.noise


def test_a_tensor_that_is_kept_beside_its_parent_s_code_adds_nothing() -> None:
    norm = fused(saving(0, 2, Need.NORM, 40_000))
    conv = saving(1, 2, Need.LINEAR, 40_000, parents=frozenset({norm.site}))
    measured = profile([norm, conv], calls=blocks(2, 1), gradients=30 * MIB)
    measured = replace(measured, chunk_bytes=MIB)
    candidate = planned.choose(measured, planned.least_budget(measured))
    assert candidate is not None
    plan = candidate.as_plan(0, "optimal")
    treated = {each.site: plan.policy.treatment(each.need, each.site) for each in measured.savings}
    assert treated[conv.site] == KEEP  # it is gone before the gradients are all there
    assert plan.added_noise == pytest.approx(relative_error(treated[norm.site]) / 2)
    assert candidate.noise == pytest.approx(relative_error(treated[norm.site]))


def test_without_a_measurement_errors_of_one_everywhere_add_as_much_as_the_batch_has() -> None:
    measured = equal_sites()
    assert noise_per_weight(measured) * len(measured.savings) == pytest.approx(1.0)
    policy = coded_policy(2)
    found = expected_noise(measured, policy, measured.batch_size)
    assert sum(found.values()) == pytest.approx(rotated_error(2, 2))


def test_measured_noise_is_what_a_tolerance_bounds() -> None:
    quiet = weighted(equal_sites(), [1.0] * 6, per_weight=0.01)
    loud = replace(quiet, noise_per_weight=1.0)
    budget = with_planes(quiet, 7)
    narrow = planned.make_plan(quiet, budget, tolerance=0.05, allowed=CODES_ONLY)
    assert 0.0 < narrow.added_noise <= 0.05
    wide = planned.least_budget(loud, tolerance=0.05, allowed=CODES_ONLY)
    assert wide > budget  # a hundred times as loud, so it takes more bytes
    several = planned.make_plan(loud, budget, tolerance=(0.05, 0.2, 0.5), allowed=CODES_ONLY)
    assert 0.2 < several.added_noise <= 0.5


def test_at_a_tolerance_of_none_nothing_is_coded_even_where_no_noise_was_seen() -> None:
    silent = weighted(equal_sites(), [0.0] * 6)
    budget = with_planes(silent, 12)
    assert is_lossy(planned.make_plan(silent, budget, allowed=CODES_ONLY).policy)
    with pytest.raises(BudgetError) as refused:
        planned.make_plan(silent, budget, tolerance=0.0, allowed=CODES_ONLY)
    assert refused.value.least_bytes is not None
    exact = planned.make_plan(silent, refused.value.least_bytes, tolerance=0.0, allowed=CODES_ONLY)
    assert not is_lossy(exact.policy)


def test_a_code_that_serves_another_site_carries_that_one_s_weight_too() -> None:
    norm = saving(0, 2, Need.NORM, 4 * MIB // 4)
    conv = saving(1, 2, Need.LINEAR, 4 * MIB // 4, parents=frozenset({norm.site}))
    measured = weighted(profile([norm, conv]), [0.5, 1.5], per_weight=0.1)
    assert served_weights(measured) == {norm.site: 2.0, conv.site: 1.5}
    plan = planned.make_plan(
        measured, planned.least_budget(measured, policy="1-bit"), policy="1-bit"
    )
    assert plan.policy.weights == served_weights(measured)
    found = expected_noise(measured, plan.policy, measured.batch_size)
    error = rotated_error(1, 1)
    assert found == pytest.approx({norm.site: 0.05 * error, conv.site: 0.15 * error})


def test_nothing_is_added_by_what_is_replayed_or_kept() -> None:
    measured = weighted(equal_sites(2), [1.0, 1.0], per_weight=1.0)
    first, second = (each.site for each in measured.savings)
    policy = replace(coded_policy(2), by_site={first: KEEP})
    assert set(expected_noise(measured, policy, measured.batch_size)) == {second}


def test_policies_become_a_bit_wider_until_they_cannot() -> None:
    policy: Policy = coded_policy(1)
    widths = []
    while (wider := one_bit_wider(policy)) != policy:
        policy = wider
        widths.append(policy.by_need[Need.LINEAR])
    assert widths[:3] == [Treatment(Method.ROTATED, bits) for bits in (2, 3, 4)]
    assert widths[3] == Treatment(Method.MINMAX, 8)
    assert policy.by_need[Need.SMOOTH] == Treatment(Method.DERIVATIVE, 4)
    assert policy.by_need[Need.SIGN] == Treatment(Method.MASK, 1)
    assert [wider_level(each) for each in ("1-bit", "4-bit", "8-bit", "optimal")] == [
        "2-bit",
        "8-bit",
        None,
        None,
    ]
    assert is_lossy(policy)
    exact = replace(policy, by_need={Need.SIGN: Treatment(Method.MASK, 1)})
    assert not is_lossy(exact)


def test_lost_planes_make_a_code_as_bad_as_a_shorter_one() -> None:
    assert error_growth(4, 0.0) == 1.0
    assert error_growth(4, 2.0) == pytest.approx(rotated_error(4, 2) / rotated_error(4, 4))
    assert error_growth(4, 1.5) == pytest.approx((error_growth(4, 1.0) + error_growth(4, 2.0)) / 2)
    assert error_growth(4, 9.0) == error_growth(4, 3.0)  # the first plane stays


class Asked:
    """A chooser that notes which tolerance it is asked for."""

    def __init__(self, measured: Profile, plan: Plan) -> None:
        self.profiles, self.plan = Profiles(measured), plan
        self.tolerances: list[float] = []

    def widen(self, tolerance: float, budget_bytes: int) -> bool:
        del budget_bytes
        self.tolerances.append(tolerance)
        return True


def test_wider_codes_are_sought_below_what_tolerance_bounds_not_below_what_is_added() -> None:
    """Tolerance bounds a code with all it could serve; a share of what is added bounds nothing."""
    measured = profile([saving(0, 1, Need.NORM, 40_000)])
    plan = planned.make_plan(measured, planned.least_budget(measured, policy="2-bit"))
    for added, bounded in ((0.3, 0.8), (0.8, 0.3)):
        chooser = Asked(measured, replace(plan, added_noise=added, bounded_noise=bounded))
        control = NoiseController(
            cast(SensitivityTracker, None),
            cast(PlanSelector, chooser),
            cast(Capture, None),
            1.0,
            BesideMemory(ProcessMemory(), MemoryKeeper()),
        )
        assert control.widen(budget_bytes=2**30)
        assert chooser.tolerances == [pytest.approx(0.8 / NOISE_OF_A_BIT)]


def test_what_a_mask_and_a_code_make_errs_as_the_code_does() -> None:
    """Weights of attention that are dropped: a mask takes no share of the error."""
    weights = saving(0, 3, Need.PROBABILITY, MIB)
    noise = saving(1, 3, Need.TWO_VALUED, MIB)
    dropped = saving(2, 3, Need.PRODUCT, MIB, parents=frozenset({weights.site, noise.site}))
    measured = replace(
        profile([weights, noise, dropped]),
        weights={weights.site: 0.5, dropped.site: 1.5},
        noise_per_weight=1.0,
    )
    assert served_weights(measured)[weights.site] == 2.0
    four = coded_policy(4)
    error = relative_error(four.by_need[Need.PROBABILITY])
    found = expected_noise(measured, four, measured.batch_size)
    assert found == pytest.approx({weights.site: 0.5 * error, dropped.site: 1.5 * error})
