"""The planner by its invariants: no torch, no device, only made-up profiles."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import planned
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from synthetic import MIB, blocks, fused, large, profile, profiles, saving

from daf.core.errors import BudgetError, UnknownNameError
from daf.core.policy import KEEP, Method, Need, Reading
from daf.core.profile import Affine, Profile
from daf.planning import planner, policies
from daf.planning.candidate import Candidate, noise_price_ms, with_margin, without_margin
from daf.planning.mip import RELATIVE_GAP, Program
from daf.planning.options import Allowed
from daf.planning.planner import RIVAL_MS, RIVAL_SIZE, rival_of
from daf.planning.policies import evicted, times_of_sizes
from daf.planning.search import Problem, Search, Shape
from daf.planning.table import Table, kept_selection, make_table

few = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
NARROW = Allowed(widths=(4, 1))
any_profiles = profiles(may_be_fused=True)


def selections(table: Table) -> list[list[int]]:
    """Every selection that the words allow: by brute force."""
    found = []
    families = range(len(table.options))
    for replayed in itertools.chain.from_iterable(
        itertools.combinations(range(len(table.replays)), n) for n in range(len(table.replays) + 1)
    ):
        inside = [family for place in replayed for family in table.replays[place].families]
        if len(inside) != len(set(inside)):
            continue
        rest = [
            range(int(table.first[f]), int(table.first[f + 1])) for f in families if f not in inside
        ]
        for chosen in itertools.product(*rest):
            selection = [*chosen, *(table.replay_column(place) for place in replayed)]
            if all(
                column not in selection or any(other in selection for other in alternatives)
                for column, alternatives in table.requires
            ):
                found.append(selection)
    return found


def exhaustive(table: Table, limit: int, tolerance: float, price: float) -> float:
    objective = table.cost_ms + price * table.noise
    return min(
        (
            float(objective[each].sum())
            for each in selections(table)
            if table.peak_bytes(each) <= limit and table.noise[each].sum() <= tolerance
        ),
        default=math.inf,
    )


def limits(measured: Profile, fraction: float) -> tuple[Table, int]:
    table = make_table(measured, measured.batch_size, NARROW)
    top, low = table.peak_bytes(kept_selection(table)), table.peak_bytes(())
    return table, int(low + fraction * (top - low))


@few
@given(any_profiles, st.floats(0, 1), st.sampled_from((0.0, 0.1, 0.3, math.inf)))
def test_the_exact_answer_is_the_best_of_all_selections(
    measured: Profile, fraction: float, tolerance: float
) -> None:
    table, limit = limits(measured, fraction)
    best = exhaustive(table, limit, tolerance, 2.0)
    cost = table.cost_ms + 2.0 * table.noise
    found = Program(table, tolerance, limit, cost).least_objective(relative_gap=0.0)
    if found is None:
        assert best == math.inf
        return
    assert table.peak_bytes(list(found.selection)) <= limit
    assert found.objective == pytest.approx(best, abs=1e-5)
    assert found.bound <= best + 1e-6


@few
@given(any_profiles, st.floats(0, 1), st.sampled_from((0.1, math.inf)), st.floats(0, 100))
def test_an_answer_is_within_the_stated_gap_of_the_whole_step(
    measured: Profile, fraction: float, tolerance: float, fixed: float
) -> None:
    table, limit = limits(measured, fraction)
    best = fixed + exhaustive(table, limit, tolerance, 2.0)
    program = Program(table, tolerance, limit, table.cost_ms + 2.0 * table.noise, fixed)
    relaxed, found = program.relaxed(), program.least_objective(relative_gap=0.01)
    if found is None:
        assert best == math.inf
        return
    assert relaxed is not None
    assert list(found.selection) in [sorted(each) for each in selections(table)]
    assert table.peak_bytes(list(found.selection)) <= limit
    assert table.noise[list(found.selection)].sum() <= tolerance
    assert relaxed.bound <= best + 1e-6
    assert found.bound <= best + 1e-6
    assert best - 1e-6 <= found.objective <= found.bound * 1.0102 + 1e-6


@few
@given(any_profiles, st.floats(0, 1))
def test_evictions_by_cost_per_byte_are_lawful_and_within_the_limit(
    measured: Profile, fraction: float
) -> None:
    table, limit = limits(measured, fraction)
    found = evicted(table, limit)
    if found is not None:
        assert list(found) in [sorted(each) for each in selections(table)]
        assert table.peak_bytes(found) <= limit


@few
@given(profiles(most=3, may_be_fused=True), st.sampled_from((0.1, math.inf)))
def test_the_least_peak_is_the_lowest_of_all_selections(
    measured: Profile, tolerance: float
) -> None:
    table, _ = limits(measured, 1.0)
    allowed = [each for each in selections(table) if table.noise[each].sum() <= tolerance]
    found = Program(table, tolerance).least_peak()
    assert (found is None) == (not allowed)
    if found is not None:
        lowest = min(table.peak_bytes(each) for each in allowed)
        assert table.peak_bytes(list(found)) <= lowest + 1


@few
@given(
    profiles(may_be_fused=True),
    st.floats(0, 1.2),
    st.sampled_from(planner.policy_names()),
    st.booleans(),
)
def test_a_plan_is_within_its_budget_and_a_refusal_names_the_least(
    measured: Profile, fraction: float, policy: str, quickly: bool
) -> None:
    _, limit = limits(measured, fraction)
    budget = with_margin(measured, limit)
    least = planned.least_budget(measured, policy=policy)
    if budget < least:
        with pytest.raises(BudgetError) as caught:
            planned.make_plan(measured, budget, policy=policy, quickly=quickly)
        assert caught.value.least_bytes == least
        return
    plan = planned.make_plan(measured, budget, policy=policy, quickly=quickly)
    assert plan.predicted_peak_bytes <= budget
    assert plan.bound_ms <= plan.predicted_step_ms + 1e-6
    assert measured.split_refusal == "" or plan.micro_batch == measured.batch_size


@few
@given(any_profiles, st.sampled_from(planner.policy_names()))
def test_the_least_feasible_budget_is_feasible_and_a_byte_less_is_not(
    measured: Profile, policy: str
) -> None:
    least = planned.least_budget(measured, policy=policy)
    assert planned.make_plan(measured, least, policy=policy).predicted_peak_bytes <= least
    with pytest.raises(BudgetError) as caught:
        planned.make_plan(measured, least - 1, policy=policy)
    assert caught.value.least_bytes == least


@few
@given(
    profiles(may_be_fused=True), st.floats(0, 1), st.floats(0, 1), st.sampled_from((0.14, math.inf))
)
def test_more_budget_never_gives_a_slower_plan(
    measured: Profile, one: float, other: float, tolerance: float
) -> None:
    lower, higher = sorted((one, other))
    budgets = [with_margin(measured, limits(measured, each)[1]) for each in (lower, higher)]
    found = [planned.choose(measured, each, tolerance=tolerance) for each in budgets]
    if found[0] is None:
        return
    assert found[1] is not None
    # Codes of unmeasured noise are left out where they gain little.
    is_exact = found[0].noise and not found[1].noise
    gap = 1.02 * RELATIVE_GAP + (policies.UNMEASURED_GAIN if is_exact else 0.0)
    slack = gap * found[0].objective + 1e-3
    assert found[1].objective <= found[0].objective + slack
    # Noise has a price, so that time alone may differ by as much.
    priced = noise_price_ms(measured) * found[0].noise
    assert found[1].step_ms <= found[0].step_ms + priced + slack


def test_a_rival_has_much_larger_pieces_and_is_predicted_nearly_as_fast() -> None:
    measured = replace(large(60), split_refusal="")
    table = make_table(measured, measured.batch_size, Allowed())
    kept, base = table.peak_bytes(kept_selection(table)), measured.resident_bytes
    rivals = 0
    for share in (0.2, 0.4, 0.6, 0.8):
        limit = int(base + share * (kept - base))
        problem = Problem(measured, limit)
        found = policies.optimal(problem)
        rival = found and rival_of(found, problem)
        if found is None or rival is None:
            continue
        rivals += 1
        least_ms = found.objective
        assert rival.table.micro_batch >= RIVAL_SIZE * found.table.micro_batch
        assert found.bound_ms <= rival.objective <= RIVAL_MS * least_ms
        assert rival.table.peak_bytes(list(rival.selection)) <= limit
        assert rival.bound_ms == found.bound_ms <= rival.step_ms
    assert rivals > 0


def test_pieces_that_only_slow_codes_make_larger_are_no_rival() -> None:
    slow = dict.fromkeys(Method, 5e7)
    measured = replace(large(60), split_refusal="")
    measured = replace(measured, speeds=replace(measured.speeds, encode=slow, decode=slow))
    table = make_table(measured, measured.batch_size, Allowed())
    kept, base = table.peak_bytes(kept_selection(table)), measured.resident_bytes
    limit = int(base + 0.4 * (kept - base))
    problem = Problem(measured, limit, allowed=Allowed(replay=False))
    found = policies.optimal(problem)
    assert found is not None
    assert RIVAL_SIZE * found.table.micro_batch < measured.batch_size
    assert rival_of(found, problem) is None


@few
@given(any_profiles, st.floats(0.2, 1))
def test_plans_are_deterministic(measured: Profile, fraction: float) -> None:
    least = planned.least_budget(measured)
    budget = max(least, with_margin(measured, limits(measured, fraction)[1]))
    assert planned.make_plan(measured, budget) == planned.make_plan(measured, budget)


@given(st.integers(0, 10**10), st.integers(0, 10**9))
def test_the_margin_can_be_taken_off_again(budget: int, floor: int) -> None:
    measured = profile([])
    limit = without_margin(measured, budget)
    assert with_margin(measured, limit) <= budget < with_margin(measured, limit + 1)


# --- what the words mean ------------------------------------------------------------------------


def test_a_kept_tensor_counts_from_when_the_program_lets_go_of_it() -> None:
    one = saving(0, 2, Need.LINEAR, 1000, lives=1)
    two = saving(1, 2, Need.LINEAR, 3000)
    measured = profile([one, two], gradients=0, batch=2)
    table = make_table(measured, 2, Allowed(replay=False))
    held = table.usage_of(kept_selection(table)) - 210 * MIB
    # Moments: save one, save two, read two, read one; then the update.
    assert held.tolist() == [0, 2 * 4 * 4000, 2 * 4 * 4000, 2 * 4 * 1000, 0]


def test_a_coded_tensor_counts_its_code_until_it_is_decoded_and_both_then() -> None:
    measured = profile([saving(0, 1, Need.LINEAR, 25600)], gradients=0, batch=1)
    table = make_table(measured, 1, Allowed(replay=False))
    column = table.column_of(0, "2")
    assert column is not None
    code = 25600 * 2 // 8 + 25600 // 256 * 4
    held = table.usage_of([column]) - 210 * MIB
    assert held.tolist() == [code, code + 4 * 25600, 0]


def test_memory_saved_twice_is_counted_once_and_decided_together() -> None:
    sign = saving(0, 2, Need.SIGN, 25600)
    linear = saving(1, 2, Need.LINEAR, 25600, storage=0)
    table = make_table(profile([sign, linear], gradients=0, batch=1), 1, Allowed(replay=False))
    assert len(table.options) == 1
    kept = table.usage_of(kept_selection(table)) - 210 * MIB
    assert kept.tolist() == [4 * 25600] * 4 + [0]
    two_bits = table.option(table.column_of(0, "2") or 0)
    assert {each.method for each in two_bits.treatments.values()} == {Method.MASK, Method.ROTATED}


@pytest.mark.parametrize("other", [Need.SMOOTH, Need.EXACT, Need.LINEAR])
def test_a_site_that_saves_tensors_of_several_kinds_has_one_treatment_or_none(other: Need) -> None:
    first, second = saving(0, 2, Need.LINEAR, 25600), saving(1, 2, other, 25600)
    second = replace(second, site=first.site)
    table = make_table(profile([first, second], batch=1), 1, Allowed(replay=False, widths=(4, 2)))
    levels = {each.level for each in table.options[0] if first.site in each.treatments}
    # Only the disk takes tensors of any kind; EXACT ones too.
    assert levels == ({"4", "2", "spill"} if other is Need.LINEAR else {"spill"})
    kept = table.options[0][0]
    assert len(kept.spans) == 2


@pytest.mark.parametrize("reading", [Reading.WHOLE, Reading.CHUNKS])
def test_from_disk_whole_storages_come_back(reading: Reading) -> None:
    """Of a part of its memory, and with a gradient where chunks would have had none."""
    part = replace(
        saving(0, 1, Need.LINEAR, MIB), reading=reading, storage_bytes=Affine(0, 16 * MIB)
    )
    table = make_table(
        replace(profile([part], batch=1), chunk_bytes=MIB), 1, Allowed(replay=False, widths=())
    )
    spilled = next(each for each in table.options[0] if each.level == "spill")
    held = sum(span.nbytes for span in spilled.spans if span.first <= part.read <= span.last)
    assert held == (16 if reading is Reading.WHOLE else 20) * MIB


def test_a_replayed_call_holds_its_tensors_only_in_its_own_backward() -> None:
    savings = [saving(n, 4, Need.LINEAR, 25600, call=1 + n // 2) for n in range(4)]
    measured = profile(savings, calls=blocks(4, 2), gradients=0, batch=1)
    table = make_table(measured, 1, Allowed(widths=()))
    first = next(place for place, each in enumerate(table.replays) if each.module == "block1")
    selection = [table.replay_column(first), *kept_selection(table)[2:]]
    held = (table.usage_of(selection) - 210 * MIB) / (4 * 25600)
    #   save 0, 1, 2, 3, read 3, 2, 1, 0, update
    assert held.tolist() == [0, 0, 1, 2, 2, 1, 2, 1, 0]
    assert table.cost_of(selection) == pytest.approx(0.1 + 0.2)


def test_pieces_hold_every_gradient_and_a_release_the_largest_at_most() -> None:
    measured = profile([saving(0, 1, Need.LINEAR, 1000)], refusal="", gradients=MIB)
    whole, pieces = make_table(measured, 8, Allowed()), make_table(measured, 4, Allowed())
    released = make_table(measured, 8, Allowed(), release_gradients=True)
    fixed = 210 * MIB + MIB  # with the optimizer's state
    assert (whole.base_bytes - fixed).tolist() == [0, 0, MIB]
    assert (pieces.base_bytes - fixed).tolist() == [MIB] * 3
    assert (released.base_bytes - fixed).tolist() == [0, MIB, 0]


# --- named policies -----------------------------------------------------------------------------


def row_of(count: int, **more: object) -> Profile:
    savings = [saving(n, count, Need.LINEAR, 100_000, call=1 + n // 2) for n in range(count)]
    return profile(savings, calls=blocks(count, 2), gradients=0, **more)  # type: ignore[arg-type]


def budget_at(measured: Profile, fraction: float) -> int:
    table = make_table(measured, measured.batch_size, Allowed())
    top = table.peak_bytes(kept_selection(table))
    return with_margin(measured, int(210 * MIB + fraction * (top - 210 * MIB)))


def test_a_roomy_budget_keeps_everything() -> None:
    measured = row_of(8, refusal="")
    for policy in ("optimal", "sage", "accumulate"):
        plan = planned.make_plan(measured, budget_at(measured, 1.1), policy=policy)
        assert (plan.policy.name, plan.micro_batch) == ("plain", measured.batch_size)


def test_accumulate_only_takes_smaller_pieces() -> None:
    measured = row_of(8, refusal="")
    plan = planned.make_plan(measured, budget_at(measured, 0.5), policy="accumulate")
    assert (plan.policy.name, plan.micro_batch) == ("plain", 4)
    with pytest.raises(BudgetError):
        planned.make_plan(row_of(8), budget_at(row_of(8), 0.5), policy="accumulate")


@pytest.mark.parametrize("slow", [1.0, 3.0, 6.0, 15.0])
def test_codes_of_unmeasured_noise_are_planned_where_they_gain_a_twentieth(slow: float) -> None:
    measured = large(60)
    calls = tuple(
        replace(call, forward_ms=Affine(4.0, slow * call.forward_ms.per_example))
        for call in measured.calls
    )
    measured = replace(measured, calls=calls)
    budget = budget_at(measured, 0.3)
    problem = Problem(measured, without_margin(measured, budget), planner.DEFAULT_TOLERANCE)
    best, exact = Search(problem).run(), Search(replace(problem, tolerance=0.0)).run()
    assert best is not None
    assert exact is not None
    gain = exact.objective / best.objective - 1
    found = policies.optimal(problem)
    assert found is not None
    assert (found.noise > 0) == (best.noise > 0 and gain > policies.UNMEASURED_GAIN)
    assert found.bound_ms == pytest.approx(best.bound_ms)
    known = replace(measured, weights={measured.savings[0].site: 1.0})
    found = policies.optimal(replace(problem, profile=known))
    assert found is not None
    assert found.selection == Search(replace(problem, profile=known)).run().selection  # type: ignore[union-attr]


def test_parts_fit_as_they_are_where_some_take_no_longer_than_the_whole() -> None:
    measured = row_of(4, batch=8, refusal="")
    kept = [planner.level_peak_bytes(measured, size, "keep") for size in (8, 4, 1)]
    slower = replace(measured, micro_batch_ms=((1, 4.0), (4, 8.0), (8, 12.0)))
    even = replace(measured, micro_batch_ms=((1, 1.0), (4, 4.0), (8, 8.0)))
    for place, whole in enumerate((True, False, False)):
        assert planner.kept_parts_fit(slower, kept[place]) == whole
        assert planner.kept_parts_fit(even, kept[place])
        assert planner.kept_parts_fit(replace(even, split_refusal="no"), kept[place]) == whole
    assert not planner.kept_parts_fit(even, kept[-1] - 1)


def test_quantize_takes_the_widest_that_fits_everywhere() -> None:
    measured = row_of(20)
    for fraction, name in ((0.5, "8-bit"), (0.25, "4-bit"), (0.13, "2-bit")):
        plan = planned.make_plan(measured, budget_at(measured, fraction), policy="quantize")
        assert (plan.policy.name, plan.micro_batch) == (name, measured.batch_size)


def test_checkpoint_replays_one_level_of_blocks_and_codes_nothing() -> None:
    measured = row_of(20)
    plan = planned.make_plan(measured, budget_at(measured, 0.5), policy="checkpoint-static")
    assert plan.policy.replayed == {f"block{n}" for n in range(1, 11)}
    assert set(plan.policy.by_site.values()) <= {KEEP}


def test_reduce_computes_again_whatever_few_operators_do() -> None:
    measured = row_of(20)
    counts = {"block1": 5, "block2": 6, "block3": 1, "block4": 12}
    slow = {"block3": Affine(900.0, 900.0)}  # no cost counts
    calls = tuple(
        replace(
            call,
            operators=counts.get(call.module, 99),
            forward_ms=slow.get(call.module, call.forward_ms),
        )
        for call in measured.calls
    )
    plan = planned.make_plan(
        replace(measured, calls=calls), budget_at(measured, 0.95), policy="reduce"
    )
    assert plan.policy.replayed == {"block1", "block3"}
    assert set(plan.policy.by_site.values()) <= {KEEP}


def test_reduce_takes_the_outermost_of_nested_calls() -> None:
    measured = row_of(4)
    whole, first, second = measured.calls
    inner = replace(first, module="block1.inner", parent=1, operators=2)
    savings = tuple(replace(each, call=3) if each.call == 1 else each for each in measured.savings)
    calls = (whole, replace(first, operators=4), replace(second, operators=7), inner)
    nested = replace(measured, calls=calls, savings=savings)
    plan = planned.make_plan(nested, budget_at(measured, 0.95), policy="reduce")
    assert plan.policy.replayed == {"block1"}


def test_sage_takes_pieces_down_to_the_knee_and_then_evicts() -> None:
    # Pieces of 2 and more run at nearly the same rate.
    measured = row_of(8, refusal="", micro_batch_ms=((1, 20.0), (2, 20.5), (4, 40.0), (8, 79.0)))
    assert policies.knee(measured) == 2
    line = "micro-batches of 1, 2, 4, 8: █▄▄▄ 9.88 to 20 ms an example; knee 2"
    assert times_of_sizes(measured) == [line]
    assert times_of_sizes(replace(measured, micro_batch_ms=((8, 79.0),))) == []
    halved = planned.make_plan(measured, budget_at(measured, 0.55), policy="sage")
    assert (halved.policy.name, halved.micro_batch) == ("plain", 4)
    tight = planned.make_plan(measured, budget_at(measured, 0.15), policy="sage")
    assert tight.micro_batch == 2
    assert tight.policy.replayed


def test_what_execution_lacks_is_not_planned() -> None:
    measured = row_of(20)
    allowed = Allowed(
        methods=frozenset(Method) - {Method.SPILL}, replay=False, release_gradients=False
    )
    plan = planned.make_plan(measured, budget_at(measured, 0.3), allowed=allowed)
    assert plan.policy.replayed == frozenset()
    assert not plan.release_gradients
    methods = {plan.policy.treatment(s.need, s.site).method for s in measured.savings}
    assert Method.SPILL not in methods


def test_every_choice_has_a_reason_and_the_account_adds_up() -> None:
    measured = row_of(20)
    budget = budget_at(measured, 0.3)
    candidate = planned.choose(measured, budget)
    assert candidate is not None
    plan = planned.make_plan(measured, budget)
    assert len(plan.choices) == 2 + len(candidate.selection)
    terms = candidate.account(candidate.predicted_peak_bytes)
    predicted = terms.pop("predicted_peak")
    assert sum(terms.values()) == predicted == plan.predicted_peak_bytes


def test_a_policy_registered_from_outside_plans_and_names_its_least_budget() -> None:
    def ones(problem: Problem) -> Iterator[Candidate]:
        table = Shape(1).table(problem.profile, problem.allowed)
        yield Candidate(table, kept_selection(table))

    policies.register_policy("one by one", policies.first_that_fits(ones))
    try:
        measured = row_of(8, refusal="")
        assert "one by one" in planner.policy_names()
        plan = planned.make_plan(measured, budget_at(measured, 1.1), policy="one by one")
        assert (plan.policy.name, plan.micro_batch) == ("plain", 1)
        least = planned.least_budget(measured, policy="one by one")
        with pytest.raises(BudgetError) as caught:
            planned.make_plan(measured, least - 1, policy="one by one")
        assert caught.value.least_bytes == least
    finally:
        del policies._strategies["one by one"]
    with pytest.raises(UnknownNameError):
        planned.make_plan(measured, least, policy="one by one")


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="known: optimal, sage"):
        planned.make_plan(row_of(4), 10**9, policy="best")


def test_a_thousand_sites_are_solved_to_the_stated_gap() -> None:
    measured = large(1000)
    table = make_table(measured, 32, Allowed())
    top, low = table.peak_bytes(kept_selection(table)), table.peak_bytes(())
    limit = low + (top - low) // 2
    fixed = measured.step_ms(32)
    cost = table.cost_ms + noise_price_ms(measured) * table.noise
    relaxed = Program(table, 0.14, limit, cost, fixed).relaxed()
    found = Program(table, 0.14, limit, cost, fixed).least_objective()
    assert found is not None
    assert relaxed is not None
    assert table.peak_bytes(list(found.selection)) <= limit
    assert relaxed.bound <= found.objective
    assert found.objective <= (1 + 1.02 * RELATIVE_GAP) * found.bound


def test_lines_through_measured_points() -> None:
    assert Affine.through([(2, 10.0), (4, 14.0)]).at(8) == 22.0
    assert Affine.through([(4, 10.0)]).at(8) == 20.0
    assert Affine.through([(2, 10.0), (4, 9.0)]).at(100) == 9.0  # a fall is noise
    assert np.isclose(row_of(2).forward_backward_ms(3), 40.0)


def test_what_a_device_decodes_for_a_fused_norm_is_counted() -> None:
    """A part at a time, in float32, whatever the tensor's own width."""
    (saved,) = [replace(fused(saving(0, 1, Need.NORM, MIB)), tensor_bytes=Affine(0, 2 * MIB))]
    held = []
    for part_bytes in (0, 3 * MIB, 1 << 40):
        measured = replace(profile([saved]), part_bytes=part_bytes)
        table = make_table(measured, 8, Allowed(widths=(1,)))
        column = table.column_of(0, "1")
        assert column is not None
        held.append(float(table.row(1)[column]))
    coded = held[0]
    assert 0 < coded < 8 * MIB
    assert [each - coded for each in held] == [0, 3 * MIB, 8 * 4 * MIB]
