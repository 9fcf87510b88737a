"""Which levers plans pull: what counts as pulled, and one run."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
from daf_bench.levers import child
from daf_bench.levers import run as levers
from daf_bench.levers.child import Planned, levers_of
from daf_bench.levers.run import LeversJob, as_good, chosen, figures_of, known_levers, run
from daf_bench.workloads.sources import Sources

from daf.core.plan import Plan
from daf.core.policy import CHUNKED, KEEP, RECOMPUTE, Method, Policy, Site, Treatment, coded_policy


def site(number: int) -> Site:
    return Site(f"layer{number}", "conv2d", 0, 0)


def test_a_plan_tells_what_it_does_at_how_many_sites() -> None:
    by_site = {
        site(0): KEEP,
        site(1): RECOMPUTE,
        site(2): RECOMPUTE,
        site(3): Treatment(Method.ROTATED, 2),
        site(4): Treatment(Method.ROTATED, 4, whole=True),
        site(5): Treatment(Method.MASK, 1, on_host=True),
    }
    policy = Policy(
        "optimal",
        by_need=coded_policy(1).by_need,
        by_site=MappingProxyType(by_site),
        operators=frozenset({CHUNKED, "activation"}),
        replayed=frozenset({"block"}),
    )
    found = levers_of(Plan(policy, 4, 0, release_gradients=True), examples=8)
    assert found == {
        "keep": 1,
        "mask": 1,
        "mask: on_host": 1,
        "micro-batches": 1,
        "operator activation": 1,
        f"operator {CHUNKED}": 1,
        "recompute": 2,
        "released gradients": 1,
        "replayed modules": 1,
        "rotated 2": 1,
        "rotated 4": 1,
        "rotated: whole": 1,
    }
    assert "micro-batches" not in levers_of(Plan(policy, 8, 0), examples=8)


def test_a_uniform_level_is_told_by_its_needs() -> None:
    found = levers_of(Plan(coded_policy(2), 8, 0), examples=8)
    assert found["rotated 2"] >= 2
    assert found["drop"] == 1
    assert set(found) <= set(known_levers())


def row(*plans: dict[str, Any]) -> dict[str, Any]:
    return {"workload": "w1", "tolerance": None, "shares": [0.75, 0.5], "plans": list(plans)}


def test_levers_are_counted_by_plans_and_what_is_never_pulled_is_counted_too() -> None:
    one = {"levers": {"keep": 7, "mask: on_host": 2}, "policies_ms": {"optimal": 10.0, "sage": 9.0}}
    two = {"levers": {"keep": 1}, "policies_ms": {"optimal": 10.0, "sage": 10.04, "reduce": 12.0}}
    refused = {"budget_bytes": 1, "least_bytes": 2}
    rows = [row(one, two), row(refused)]
    counts = chosen(rows)
    assert (counts["keep"], counts["on_host"], counts["spill"]) == (2, 1, 0)
    assert (as_good(rows)["sage"], as_good(rows)["reduce"]) == (2, 0)
    figures = figures_of(rows)
    assert (figures["plans"], figures["refused"], figures["failed"]) == (2, 1, 0)
    assert figures["policies_predicted_faster"] == 1
    # All but what is pulled above, and what only other devices, policies or callers choose.
    assert figures["never_chosen"] == figures["levers"] - 5


def test_pytorchs_operators_are_asked_for_once_and_of_the_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Planned] = []

    def plans(planned: Planned, command: str, *budgets: int) -> dict[str, Any]:
        asked.append(planned)
        return {"peak_bytes": 100} if command == "plain" else {"plans": [{} for _ in budgets]}

    monkeypatch.setattr(levers, "_asked", plans)
    rows = run(LeversJob(("w6", "w1"), sources=Sources())).rows
    ways = [(each["tolerance"], each["operators"]) for each in rows]
    assert (
        sorted(ways, key=str)
        == [(0.0, "auto")] * 2 + [(None, "auto")] * 2 + [(None, "pytorch")] * 2
    )
    assert Counter(each.operators for each in asked) == {"auto": 8, "pytorch": 4}

    given: list[dict[str, Any]] = []
    session = SimpleNamespace(Session=lambda *_, **options: given.append(options) or 1 / 0)
    monkeypatch.setattr(child, "daf", session)
    work: Any = SimpleNamespace(model=None, optimizer=None)
    with pytest.raises(ZeroDivisionError):
        child.answer(work, asked[-1], "plans", "100")
    assert given[0]["operators"] == asked[-1].operators == "pytorch"


@pytest.mark.thorough
def test_a_workload_is_planned_within_its_budgets() -> None:
    job = LeversJob(("w6",), shares=(0.95, 0.05, 0.01), tolerances=(0.0,), is_small=True)
    job = replace(job, without_ours=False)
    (found,) = run(job).rows
    fits, *refused = found["plans"]
    assert fits["peak_bytes"] <= fits["budget_bytes"] < found["plain_peak_bytes"]
    assert set(fits["levers"]) <= set(known_levers())
    assert "optimal" in fits["policies_ms"]
    assert [each["least_bytes"] > each["budget_bytes"] for each in refused] == [True, True]
