"""Codes that may wait in host memory: what they take of the device, cost, and make possible."""

from __future__ import annotations

from dataclasses import replace

import planned
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from synthetic import MIB, profile, profiles, saving

from daf.core.errors import BudgetError, PlatformError
from daf.core.json_dataclasses import from_plain, to_plain
from daf.core.policy import Method, Need, Policy, placed_on_host, policy_for, with_host_codes
from daf.core.profile import Profile
from daf.offload.host_codes import host_options
from daf.planning import planner
from daf.planning.explain import explain
from daf.planning.options import Allowed, OptionMaker
from daf.planning.table import make_table
from daf.session.arguments import fixed_policy, passing_bytes, refuse_what_sends_nothing

few = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
PLENTY = 1 << 50
HERE = Allowed(widths=(8, 2))
THERE = replace(HERE, host_bytes=PLENTY, passing_bytes=MIB)


def rows_of(count: int = 3, elements: int = MIB) -> Profile:
    """Tensors of linear layers in a row, of so many floats for each of 8 examples."""
    return profile([saving(place, count, Need.LINEAR, elements) for place in range(count)])


def linked(measured: Profile, link: float = 1e9) -> Profile:
    return replace(measured, speeds=replace(measured.speeds, link=link))


@few
@given(profiles(may_be_fused=True))
def test_a_travelling_level_is_the_same_one_but_for_bytes_and_the_way(measured: Profile) -> None:
    table = make_table(linked(measured), measured.batch_size, THERE)
    own = make_table(linked(measured), measured.batch_size, HERE)
    assert (table.base_bytes == own.base_bytes + MIB).all()
    for with_host, without in zip(table.options, own.options, strict=True):
        here = [option for option in with_host if "host" not in option.level]
        assert [each.level for each in here] == [each.level for each in without]
        for option in with_host:
            if "host" not in option.level:
                continue
            level = option.level.removesuffix(" on the host")
            (like,) = [
                each for each in here if each.level == level and each.requires == option.requires
            ]
            assert {s: placed_on_host(t) for s, t in like.treatments.items()} == option.treatments
            assert option.noise == like.noise
            assert option.cost_ms >= like.cost_ms
            assert sum(span.nbytes for span in option.spans) <= sum(
                span.nbytes for span in like.spans
            )


def test_a_code_larger_than_what_may_pass_goes_alone() -> None:
    measured = linked(rows_of())
    size = make_table(measured, measured.batch_size, HERE)
    row = max(range(len(size.base_bytes)), key=lambda moment: float(size.row(moment).max()))
    coded = size.column_of(0, "8")
    assert coded is not None
    code_bytes = float(size.row(row)[coded])
    assert code_bytes > 2 * MIB

    def held_bytes(passing: int) -> float:
        table = make_table(measured, measured.batch_size, replace(THERE, passing_bytes=passing))
        column = table.column_of(0, "8 on the host")
        assert column is not None
        return float(table.row(row)[column])

    assert held_bytes(MIB) == pytest.approx(code_bytes - MIB / 2, abs=1)
    assert held_bytes(2 * int(code_bytes) + 2) == 0


def test_what_no_code_on_the_device_could_hold_is_planned_at_many_bits() -> None:
    """On the host bits cost no memory: they follow from noise and the way alone."""
    measured = linked(rows_of(12))
    allowed = replace(HERE, replay=False, methods=frozenset(Method) - {Method.SPILL})
    travelling = replace(allowed, host_bytes=PLENTY, passing_bytes=20 * MIB)
    least = planned.least_budget(measured, allowed=allowed)
    least_with = planned.least_budget(measured, allowed=travelling)
    assert least_with < least
    with pytest.raises(BudgetError):
        planned.make_plan(measured, least_with, allowed=allowed)
    plan = planned.make_plan(measured, least_with, allowed=travelling, tolerance=1e-3)
    assert plan.predicted_peak_bytes <= least_with
    codes = [each for each in plan.policy.by_site.values() if each.is_code]
    assert codes
    assert all(each.on_host for each in codes)
    assert {each.bits for each in codes} == {8}


def test_levels_travel_that_the_host_has_room_for_whatever_is_mixed() -> None:
    measured = linked(rows_of(3))  # codes of 8 MiB at 8 bits with headers, of 2.25 at 2
    for host_bytes, expected in (
        (3 * 16 * MIB, {"exact on the host", "8 on the host", "2 on the host"}),
        (3 * 16 * MIB - 1, {"exact on the host", "2 on the host"}),
        (3 * 4 * MIB - 1, {"exact on the host"}),
        (0, set()),
    ):
        allowed = replace(THERE, host_bytes=host_bytes)
        maker = OptionMaker(measured, 8, allowed)
        levels = {each for each, _ in maker._levels if "host" in each}
        assert levels == expected
        base = (
            make_table(measured, 8, allowed).base_bytes - make_table(measured, 8, HERE).base_bytes
        )
        assert set(base.tolist()) == {MIB if expected else 0}


def test_where_nothing_would_be_sent_that_is_said() -> None:
    for bits, policy, has_budget in ((None, None, False), ("plain", None, False)):
        with pytest.raises(ValueError, match="so that nothing is coded"):
            refuse_what_sends_nothing(bits, policy, has_budget=has_budget)
    for bits, policy in ((2, None), (None, "quantize"), (None, "sage")):
        with pytest.raises(ValueError, match="only the optimal policy sends"):
            refuse_what_sends_nothing(bits, policy, has_budget=True)
    refuse_what_sends_nothing(2, None, has_budget=False)
    refuse_what_sends_nothing("exact", None, has_budget=False)
    refuse_what_sends_nothing(None, "optimal", has_budget=True)


def test_where_there_is_room_nothing_travels_and_a_slow_link_is_avoided() -> None:
    measured = rows_of()
    allowed = replace(THERE, replay=False)
    wide = planner.kept_peak_bytes(measured) + 64 * MIB
    plan = planned.make_plan(linked(measured), wide, allowed=allowed)
    assert not any(each.on_host for each in plan.policy.by_site.values())
    tight = planned.least_budget(measured, allowed=replace(HERE, replay=False)) + 2 * MIB
    slow = planned.make_plan(linked(measured, link=1.0), tight, allowed=allowed)
    assert not any(each.on_host for each in slow.policy.by_site.values())


def test_a_plan_s_reasons_say_where_codes_wait() -> None:
    measured = linked(rows_of(1))
    table = make_table(measured, 8, THERE)
    column = table.column_of(0, "2 on the host")
    assert column is not None
    assert "rotated 2 on the host" in "\n".join(explain(table, (column,)))


def test_policies_travel_whole_and_come_back_from_json() -> None:
    policy = with_host_codes(policy_for(2))
    assert {each.method for each in policy.by_need.values() if not each.on_host} == {Method.DROP}
    assert from_plain(Policy, to_plain(policy)) == policy
    assert fixed_policy(2, fused=False, has_budget=False, on_host=True) == policy


def test_what_passes_is_a_small_share_of_the_budget() -> None:
    assert [passing_bytes(each) for each in (MIB, 512 * MIB, 64 * 1024 * MIB)] == [
        2 * MIB,
        32 * MIB,
        64 * MIB,
    ]


def test_host_memory_for_a_model_on_the_processor_is_refused() -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(2, 2)
    assert host_options(model, None) is None
    with pytest.raises(PlatformError, match="in host memory already"):
        host_options(model, "1GB")


@few
@given(profiles(may_be_fused=True), st.sampled_from((0.1, 1e9)))
def test_no_budget_is_refused_that_held_without_but_for_what_passes(
    measured: Profile, tolerance: float
) -> None:
    def least(allowed: Allowed) -> float:
        try:
            return planned.least_budget(linked(measured), allowed=allowed, tolerance=tolerance)
        except BudgetError as error:
            return error.least_bytes or float("inf")

    margin = 1.2 * MIB
    assert least(THERE) <= least(HERE) + margin
