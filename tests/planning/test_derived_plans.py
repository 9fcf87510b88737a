"""A tensor that other codes, or inputs that are kept, tell: when it is planned, for what."""

from __future__ import annotations

from dataclasses import replace

import planned
import pytest
from synthetic import MIB, SPEEDS, fused, profile, saving

from daf.core.policy import KEEP, Method, Need, Reading, Treatment
from daf.core.profile import Profile, Saving
from daf.planning.bit_widths import is_lossy
from daf.planning.candidate import with_margin
from daf.planning.noise import expected_noise
from daf.planning.options import Allowed
from daf.planning.table import lawful, make_table

WITHOUT_CODES = Allowed(replay=False, widths=(), methods=frozenset(Method) - {Method.SPILL})


def test_a_tensor_is_computed_from_other_codes_only_where_those_are() -> None:
    norm = saving(0, 3, Need.NORM, 256_000)
    derived = saving(1, 3, Need.LINEAR, 256_000, parents=frozenset([norm.site]))
    measured = profile([norm, derived, saving(2, 3, Need.LINEAR, 256_000)], gradients=0, batch=1)
    without_replay = Allowed(replay=False, methods=frozenset(Method) - {Method.SPILL})
    base = make_table(measured, 1, without_replay).peak_bytes(())
    # Room for the last tensor and one code of 8 bits, but not for two.
    budget = with_margin(measured, base + int(1.3 * 4 * 256_000))
    found = planned.choose(measured, budget, tolerance=0.14, allowed=without_replay)
    assert found is not None
    policy = found.as_plan(budget, "optimal").policy
    eight_bits = Treatment(Method.MINMAX, 8)
    assert policy.treatment(norm.need, norm.site) == eight_bits
    assert policy.treatment(derived.need, derived.site) == eight_bits
    held = found.table.row(2)[list(found.selection)]
    assert sum(held > 0) == 2  # the code of the first, and the last tensor itself


def behind_a_norm(norm: Saving) -> Profile:
    """A convolution behind it, and something that is saved in any case."""
    derived = saving(1, 3, Need.LINEAR, 256_000, parents=frozenset([norm.site]))
    savings = [norm, derived, saving(2, 3, Need.EXACT, 256_000)]
    return replace(profile(savings, gradients=0, batch=1), chunk_bytes=MIB)


def test_an_input_that_a_fused_norm_holds_exactly_tells_what_is_behind() -> None:
    measured = behind_a_norm(fused(saving(0, 3, Need.NORM, 256_000)))
    norm, derived, _ = measured.savings
    table = make_table(measured, 1, WITHOUT_CODES)
    assert [[each.level for each in options] for options in table.options] == [
        *(["keep"], ["keep", "exact"], ["keep"])
    ]
    option = table.options[1][1]
    assert option.treatments == {derived.site: Treatment(Method.REDERIVE)}
    assert (option.noise, option.requires, option.coded_sites) == (0.0, frozenset(), frozenset())
    # Nothing but what is decoded, while it is read; one pass of copying.
    assert [(each.first, each.last, each.nbytes) for each in option.spans] == [(4, 4, 4 * 256_000)]
    assert option.cost_ms == pytest.approx(1000 * 4 * 256_000 / SPEEDS.decode[Method.REDERIVE])
    # Room for two of the three tensors.
    budget = with_margin(measured, table.peak_bytes(()) + 2 * 4 * 256_000)
    plan = planned.make_plan(measured, budget, tolerance=0.0, allowed=WITHOUT_CODES)
    assert plan.policy.rederive
    assert plan.policy.treatment(derived.need, derived.site).method is Method.REDERIVE
    assert plan.policy.treatment(norm.need, norm.site) == KEEP
    assert plan.added_noise == 0.0
    assert not is_lossy(plan.policy)
    assert any("rederive" in line for line in plan.choices)


def test_a_derived_input_has_the_noise_of_the_code_that_it_is_derived_from() -> None:
    measured = behind_a_norm(fused(saving(0, 3, Need.NORM, 256_000)))
    norm, derived, _ = measured.savings
    allowed = replace(WITHOUT_CODES, widths=(8, 2))
    table = make_table(measured, 1, allowed)
    # It has no code of its own: deriving holds less, and no code makes it more exact.
    assert [each.level for each in table.options[1]] == ["keep", "exact"]
    assert [each.level for each in table.options[0]] == ["keep", "8", "2"]
    # Room for one tensor and a code of two bits.
    budget = with_margin(measured, table.peak_bytes(()) + int(1.15 * 4 * 256_000))
    plan = planned.make_plan(measured, budget, tolerance=10.0, allowed=allowed)
    assert plan.policy.treatment(norm.need, norm.site) == Treatment(Method.ROTATED, 2)
    assert plan.policy.treatment(derived.need, derived.site).method is Method.REDERIVE
    found = expected_noise(measured, plan.policy, 1)
    assert found[derived.site] == found[norm.site] > 0.0
    assert plan.added_noise == pytest.approx(sum(found.values()))


@pytest.mark.parametrize("change", ["whole", "operator", "need", "two sites"])
def test_only_fused_norms_are_trusted_to_tell(change: str) -> None:
    norm = fused(saving(0, 3, Need.NORM, 256_000))
    changed = {
        "whole": replace(norm, reading=Reading.WHOLE),
        "operator": replace(norm, site=replace(norm.site, operator="gelu")),
        "need": replace(norm, need=Need.LINEAR),
        "two sites": norm,
    }[change]
    measured = behind_a_norm(changed)
    if change == "two sites":  # of which one is a mask of its own
        first, derived, last = measured.savings
        other = replace(last, need=Need.SIGN)
        both = replace(derived, parents=frozenset([first.site, other.site]))
        measured = replace(measured, savings=(first, both, other))
    table = make_table(measured, 1, WITHOUT_CODES)
    assert [each.level for each in table.options[1]] == ["keep"]


def between_layers() -> Profile:
    """GELU's input, kept or coded; the layer behind, which the former tells; and a third tensor."""
    smooth = saving(0, 3, Need.SMOOTH, 256_000)
    behind = saving(1, 3, Need.LINEAR, 256_000)
    told = replace(behind, teller=smooth.site, reading=Reading.CHUNKS)
    savings = [smooth, told, saving(2, 3, Need.EXACT, 1000)]
    return replace(profile(savings, batch=1, gradients=0), chunk_bytes=MIB // 8)


def test_a_layer_is_told_by_an_activation_that_is_kept() -> None:
    measured = between_layers()
    smooth, behind, _ = measured.savings
    table = make_table(measured, 1, WITHOUT_CODES)
    assert [each.level for each in table.options[0]] == ["keep"]
    assert [each.level for each in table.options[1]] == ["keep", "exact"]
    assert table.options[1][1].requires_kept == {smooth.site}
    budget = with_margin(measured, table.peak_bytes(()) + int(1.3 * 4 * 256_000))
    plan = planned.make_plan(measured, budget, tolerance=0.0)
    assert plan.policy.treatment(smooth.need, smooth.site) == KEEP
    assert plan.policy.treatment(behind.need, behind.site).method is Method.REDERIVE
    assert "activation" in plan.policy.operators
    assert plan.added_noise == 0.0


def test_a_layer_is_not_told_by_an_activation_that_is_coded() -> None:
    """Neither by the program nor by greedy choices; each has a code of its own then."""
    measured = between_layers()
    smooth, behind, _ = measured.savings
    allowed = Allowed(frozenset(Method) - {Method.SPILL}, widths=(2,), replay=False)
    table = make_table(measured, 1, allowed)
    (needed,) = table.requires
    assert needed == (table.column_of(1, "exact"), (table.column_of(0, "keep"),))
    refused = [table.column_of(0, "2"), table.column_of(1, "exact"), int(table.first[2])]
    assert lawful(table, refused) == (refused[0], int(table.first[1]), refused[2])
    for quickly in (False, True):
        least = planned.least_budget(measured, allowed=allowed)
        plan = planned.make_plan(
            measured, least + 4096, tolerance=10.0, quickly=quickly, allowed=allowed
        )
        coded = [plan.policy.treatment(each.need, each.site) for each in (smooth, behind)]
        assert [each.method for each in coded] == [Method.DERIVATIVE, Method.ROTATED]


@pytest.mark.parametrize("other", ["own", "told by another"])
def test_a_site_is_derived_only_where_all_that_it_saves_can_be(other: str) -> None:
    """A layer that runs twice saves two tensors at one site, which has one treatment."""
    measured = between_layers()
    smooth, behind, last = measured.savings
    second = replace(behind, storage=7, content=7, saved=last.saved, read=last.read, teller=None)
    if other == "told by another":
        second = replace(second, teller=smooth.site)
    measured = replace(measured, savings=(smooth, behind, second))
    table = make_table(measured, 1, Allowed(widths=(2,), replay=False))
    family = next(each for each in table.options if behind.site in each[-1].treatments)
    levels = [each.level for each in family]
    if other == "told by another":
        assert family[1].treatments == {behind.site: Treatment(Method.REDERIVE)}
        assert "exact" in levels
        return
    assert "exact" not in levels
    plan = planned.make_plan(
        measured, planned.least_budget(measured, policy="2-bit"), policy="2-bit"
    )
    assert plan.policy.treatment(behind.need, behind.site) == Treatment(Method.ROTATED, 2)
