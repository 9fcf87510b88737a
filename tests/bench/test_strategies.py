"""SAGE's strategies: what is compared with what, and how surely one is slower."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
from daf_bench.sweep.strategies import MODELS, POLICIES, figures_of, log_ratios, near_end_of_ratio

MB = 10**6
PLAIN_MS = [9.0, 9.0, 10.0, 10.0, 10.0, 10.0]


def timed(ratio: float, spread: float = 0.0) -> dict[str, Any]:
    """Six steps of which the first two warm up."""
    steps = [90.0, 90.0, *(10.0 * ratio * (1.0 + spread * sign) for sign in (1, -1, 1, -1))]
    return {
        "outcome": "trained",
        "step_ratio": ratio,
        "steps_ms": steps,
        "plain_steps_ms": PLAIN_MS,
    }


def plain(workload: str) -> dict[str, Any]:
    return {"part": "plain", "workload": workload}


def static(workload: str, strategy: str, peak_mb: int, ratio: float) -> dict[str, Any]:
    row = {"part": "static", "workload": workload, "strategy": strategy}
    return row | {"peak_bytes": peak_mb * MB} | timed(ratio)


def budget(
    workload: str, policy: str, percent: int, budget_mb: int, ratio: float | None, over: int = 0
) -> dict[str, Any]:
    row = {"part": "budget", "workload": workload, "policy": policy, "percent": percent}
    row |= {"budget_bytes": budget_mb * MB, "overshoot_bytes": over}
    return row | ({"outcome": "refused"} if ratio is None else timed(ratio))


def whole(workload: str, sage: float | None = 1.0, over: int = 0) -> list[dict[str, Any]]:
    """All eight strategies at two budgets; SGC fits 600 MB, SGA 400 MB."""
    budgets = [
        budget(workload, policy, *at, 1.0 if policy != "sage" else sage, over * (policy == "sage"))
        for policy, at in product(POLICIES, ((50, 650), (25, 450)))
    ]
    by_hand = [
        static(workload, "checkpoint 100 % of blocks", 600, 1.3),
        static(workload, "accumulate 2", 700, 0.5),
        static(workload, "accumulate 4", 400, 1.0),
    ]
    return [plain(workload), *by_hand, *budgets]


def test_a_model_counts_once_all_eight_were_tried_at_each_budget() -> None:
    rows = [row for name in MODELS for row in whole(name)]
    assert figures_of(rows)["sage_models"] == 4
    for left_out in range(len(rows) // 4):
        others = [row for place, row in enumerate(rows) if place != left_out]
        # SGA was tried with two amounts: without one of them it still was.
        is_needed = not rows[left_out].get("strategy", "").startswith("accumulate")
        is_needed &= rows[left_out].get("policy") != "sage"  # a budget less is another comparison
        assert figures_of(others)["sage_models"] == 4 - is_needed, rows[left_out]


def test_a_model_that_no_budget_was_tried_on_does_not_count() -> None:
    begun = [row for row in whole("w2a") if row["part"] != "budget"]
    assert figures_of([*begun, *whole("w3")])["sage_models"] == 1


def test_sage_is_compared_with_the_fastest_by_hand_that_the_budget_holds() -> None:
    figures = figures_of(whole("w3", sage=1.2))
    assert figures["sage_points"] == 2
    assert figures["sage_fits_where_static_fits"] == 1.0
    # Two parts are faster, and hold more than both budgets.
    assert figures["sage_vs_best_static_worst"] == pytest.approx(1.2)


def test_refused_or_over_its_budget_it_does_not_fit() -> None:
    assert figures_of(whole("w3", sage=None))["sage_fits_where_static_fits"] == 0.0
    assert figures_of(whole("w3", over=1))["sage_fits_where_static_fits"] == 0.0
    assert "sage_vs_best_static_worst" not in figures_of(whole("w3", sage=None))
    rows = [row for row in whole("w3") if row["part"] != "static"]
    assert "sage_fits_where_static_fits" not in figures_of(rows)
    assert figures_of([row for row in rows if row.get("policy") != "sage"]) == {}


def test_the_first_steps_do_not_count_and_noise_widens_the_interval() -> None:
    assert log_ratios(timed(1.5)) == pytest.approx([math.log(1.5)] * 4)
    one, other = log_ratios(timed(1.2)), log_ratios(timed(1.0))
    assert near_end_of_ratio(one, other) == pytest.approx(1.2)
    assert near_end_of_ratio(other, one) == pytest.approx(1 / 1.2)
    noisy = near_end_of_ratio(log_ratios(timed(1.2, spread=0.05)), other)
    assert 1.0 < noisy < 1.15
    assert near_end_of_ratio(log_ratios(timed(1.02, spread=0.1)), other) == 1.0


def test_the_interval_is_welch_s() -> None:
    """Of two times four numbers of equal variance: six degrees of freedom, t of 2.45."""
    ours, theirs = [0.1, 0.3, 0.1, 0.3], [0.0, -0.2, 0.0, -0.2]
    error = math.sqrt(2 * (4 * 0.01 / 3) / 4)
    assert near_end_of_ratio(ours, theirs) == pytest.approx(math.exp(0.3 - 2.45 * error))
