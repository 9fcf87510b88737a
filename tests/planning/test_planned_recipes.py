"""Recipes among the planner's choices: what they hold, what must be kept for them, and policies."""

from __future__ import annotations

from dataclasses import replace

import planned
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import MIB, profile, profiles, saving
from thoroughness import at_most

from daf.core.policy import KEEP, RECOMPUTE, Method, Need
from daf.core.profile import ZERO, Affine, Profile, Recipe, Saving
from daf.planning.candidate import with_margin
from daf.planning.options import HELD, RECOMPUTED, Allowed
from daf.planning.table import kept_selection, make_table, unmet

LOSSLESS = Allowed(replay=False, widths=(), methods=frozenset(Method) - {Method.SPILL})
ELEMENTS = 256_000
NBYTES = 4 * ELEMENTS


def recipe(*kept: Saving, held: tuple[tuple[int, int], ...] = (), ms: float = 1.0) -> Recipe:
    """From tensors that other sites keep, and numbered ones that nothing else does."""
    lines = tuple((number, Affine(0, nbytes)) for number, nbytes in held)
    sites = frozenset(each.site for each in kept)
    return Recipe(sites, lines, ZERO, Affine(0, NBYTES // 2), Affine(0, ms))


def behind(norm: Saving) -> Profile:
    """What a convolution and another one read behind a kept normalisation's input."""
    made = [replace(saving(at, 3, Need.LINEAR, ELEMENTS), recipe=recipe(norm)) for at in (1, 2)]
    return profile([norm, *made], gradients=0, batch=1)


def test_an_option_holds_its_result_while_it_is_read_and_needs_its_leaf_kept() -> None:
    measured = behind(saving(0, 3, Need.NORM, ELEMENTS))
    table = make_table(measured, 1, LOSSLESS)
    assert [[each.level for each in own] for own in table.options] == [
        *(["keep"], ["keep", RECOMPUTED], ["keep", RECOMPUTED]),
        ["keep", HELD],  # the graph of values, which is recorded for all
    ]
    option = table.options[1][1]
    assert option.treatments == {measured.savings[1].site: RECOMPUTE}
    assert option.coded_sites == frozenset()
    assert (option.noise, option.cost_ms) == (0.0, 1.0)
    assert {(each.first, each.last, each.nbytes) for each in option.spans} == {
        *((4, 4, NBYTES), (4, 4, NBYTES / 2))
    }
    recording = int(table.first[-1]) - 1
    chosen = set(kept_selection(table)) - {int(table.first[1])} | {int(table.first[1]) + 1}
    assert unmet(table, chosen) == {int(table.first[1]) + 1}
    assert not unmet(table, {*chosen, recording} - {recording - 1})


def test_a_leaf_is_held_until_its_last_recipe_has_run() -> None:
    # Its own reader comes late in forward, hence early in backward (a shortcut to the end, say).
    measured = behind(saving(0, 3, Need.NORM, ELEMENTS))
    leaf = replace(measured.savings[0], read=3, released=3)
    table = make_table(replace(measured, savings=(leaf, *measured.savings[1:])), 1, LOSSLESS)
    held = [
        sorted((each.first, each.last, each.nbytes) for each in options[1].spans)
        for options in table.options[1:3]
    ]
    while_read = [(4, 4, NBYTES / 2), (4, 4, NBYTES)]
    assert held == [[*while_read, (4, 4, NBYTES)], [(3, 3, NBYTES / 2), (3, 3, NBYTES)]]


def test_a_leaf_that_is_coded_is_no_leaf() -> None:
    measured = behind(saving(0, 3, Need.NORM, ELEMENTS))
    coding = replace(LOSSLESS, widths=(2,))
    table = make_table(measured, 1, coding)
    norm = next(at for at, each in enumerate(table.options[0]) if each.level == "2")
    again = next(at for at, each in enumerate(table.options[1]) if each.level == RECOMPUTED)
    chosen = {norm, int(table.first[1]) + again, int(table.first[2]), int(table.first[-1]) - 1}
    assert unmet(table, chosen) == {int(table.first[1]) + again}


def test_leaves_that_recipes_share_are_held_once() -> None:
    # As in DenseNet: each concatenation is made from parts that nothing else keeps.
    parts = [(number, NBYTES // 4) for number in (7, 8, 9)]
    savings = [
        replace(saving(at, 3, Need.LINEAR, ELEMENTS), recipe=recipe(held=tuple(parts[: at + 1])))
        for at in range(3)
    ]
    measured = profile(savings, gradients=0, batch=1)
    table = make_table(measured, 1, LOSSLESS)
    again = [int(first) + 1 for first in table.first[:3]]
    leaves = {leaf for column in again for leaf in table.leaves_of(column)}
    assert len(leaves) == 1 + len(parts)
    assert unmet(table, {*again}) == {*again}
    selection = [*again, *leaves]
    assert not unmet(table, {*selection})
    above = table.usage_of(selection) - table.base_bytes
    # In forward, the parts; in backward also what is read, and what its recipe needs meanwhile.
    assert list(above[:3] / NBYTES) == [0.25, 0.5, 0.75]
    assert above[3:6].max() == (0.75 + 1.0 + 0.5) * NBYTES


def test_recording_is_paid_once_and_only_where_anything_is_computed_again() -> None:
    measured = replace(behind(saving(0, 3, Need.NORM, ELEMENTS)), recording_ms=5.0)
    table = make_table(measured, 1, LOSSLESS)
    kept = table.peak_bytes(kept_selection(table))
    for fewer, added_ms in ((0, 0.0), (1, 5.0 + 1.0)):
        limit = with_margin(measured, kept - fewer * NBYTES // 2)
        found = planned.choose(measured, limit, tolerance=0.0, allowed=LOSSLESS)
        assert found is not None
        assert found.step_ms - measured.step_ms(1) == pytest.approx(added_ms)
    # With codes allowed, a model whose operators are small is not recorded for one tensor.
    coding = replace(LOSSLESS, widths=(4, 2))
    plan = planned.make_plan(measured, limit, tolerance=10.0, allowed=coding)
    assert not plan.policy.records_values


@pytest.mark.parametrize("need", [Need.SIGN, Need.SHAPE])
def test_what_a_mask_stands_for_is_not_computed_again(need: Need) -> None:
    norm = saving(0, 3, Need.NORM, ELEMENTS)
    result = replace(saving(1, 3, need, ELEMENTS, storage=1), recipe=recipe(norm))
    read = replace(saving(2, 3, Need.LINEAR, ELEMENTS, storage=1), recipe=recipe(norm))
    table = make_table(profile([norm, result, read], gradients=0, batch=1), 1, LOSSLESS)
    (option,) = (each for each in table.options[1] if each.level == RECOMPUTED)
    assert option.treatments[result.site].method in (Method.MASK, Method.DROP)
    assert option.treatments[read.site] == RECOMPUTE


def test_one_tensor_without_a_recipe_keeps_the_memory_that_it_shares() -> None:
    norm = saving(0, 3, Need.NORM, ELEMENTS)
    first = replace(saving(1, 3, Need.LINEAR, ELEMENTS, storage=1), recipe=recipe(norm))
    second = saving(2, 3, Need.LINEAR, ELEMENTS, storage=1)
    table = make_table(profile([norm, first, second], gradients=0, batch=1), 1, LOSSLESS)
    assert [each.level for each in table.options[1]] == ["keep"]


def chain(count: int, milliseconds: list[float]) -> Profile:
    """A kept tensor and so many that are made from it, each at its own price."""
    norm = saving(0, count + 1, Need.NORM, ELEMENTS)
    made = [
        replace(saving(at, count + 1, Need.LINEAR, ELEMENTS), recipe=recipe(norm, ms=ms))
        for at, ms in enumerate(milliseconds, 1)
    ]
    return profile([norm, *made], gradients=0, batch=1)


def test_dynamic_checkpointing_evicts_what_costs_least_and_no_more_than_it_must() -> None:
    measured = chain(4, [2.0, 1.0, 3.0, 9.0])
    table = make_table(measured, 1, LOSSLESS)
    kept = table.peak_bytes(kept_selection(table))
    evicted = []
    for fewer in range(3):
        budget = with_margin(measured, kept - fewer * NBYTES)
        plan = planned.make_plan(measured, budget, policy="checkpoint", allowed=LOSSLESS)
        evicted.append([at for at in range(1, 5) if treatment(plan, measured, at) == RECOMPUTE])
    assert evicted == [[], [2], [1, 2]]


def treatment(plan: object, measured: Profile, at: int) -> object:
    each = measured.savings[at]
    return plan.policy.treatment(each.need, each.site)  # type: ignore[attr-defined]


def test_greedy_policies_hold_the_leaves_of_what_they_evict() -> None:
    parts = ((7, NBYTES // 8),)
    savings = [
        replace(saving(at, 3, Need.LINEAR, ELEMENTS), recipe=recipe(held=parts)) for at in range(3)
    ]
    measured = profile(savings, gradients=0, batch=1)
    table = make_table(measured, 1, LOSSLESS)
    kept = table.peak_bytes(kept_selection(table))
    for policy in ("sage", "checkpoint"):
        budget = with_margin(measured, kept - NBYTES)
        plan = planned.make_plan(measured, budget, policy=policy, allowed=LOSSLESS)
        again = [each for each in savings if treatment(plan, measured, each.saved) == RECOMPUTE]
        assert again
        assert plan.account["saved"] >= (3 - len(again)) * NBYTES + NBYTES // 8


@settings(max_examples=at_most(60, 20), deadline=None)
@given(profiles(4, splittable=False), st.data())
def test_plans_with_recipes_keep_every_leaf(measured: Profile, data: st.DataObject) -> None:
    savings = list(measured.savings)
    for at in range(1, len(savings)):
        if data.draw(st.booleans()):
            leaf = savings[data.draw(st.integers(0, at - 1))]
            if leaf.storage != savings[at].storage:
                held = ((99, MIB),) if data.draw(st.booleans()) else ()
                savings[at] = replace(savings[at], recipe=recipe(leaf, held=held))
    measured = replace(measured, savings=tuple(savings))
    least = planned.least_budget(measured)
    budget = least + data.draw(st.integers(0, 8)) * MIB
    plan = planned.make_plan(measured, budget)
    for each in savings:
        if plan.policy.by_site.get(each.site, KEEP) == RECOMPUTE and each.recipe:
            assert all(plan.policy.by_site.get(leaf, KEEP) == KEEP for leaf in each.recipe.kept)
    assert plan.predicted_peak_bytes <= budget
