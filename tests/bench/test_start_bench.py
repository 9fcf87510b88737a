"""``daf bench start``: what its figures say, and a process that it starts."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
from daf_bench.harness.subprocess_channel import Child
from daf_bench.start import run
from daf_bench.start.child import RUN_STEPS, TWO_LAYERS, Start


def found(first_ms: float, run_ms: float, steady_ms: float, peak_bytes: int = 90) -> dict[str, Any]:
    return {
        "first_ms": first_ms,
        "run_ms": run_ms,
        "steady_ms": steady_ms,
        "steps_until_settled": 20,
        "is_settled": True,
        "measuring_share": 0.01,
        "peak_bytes": peak_bytes,
        "micro_batch": 4,
    }


def row(cold: dict[str, Any], warm: dict[str, Any], **changed: Any) -> dict[str, Any]:
    known = {"workload": "w1", "share": 0.5, "refused": False, "plain_ms": 100.0}
    known["plain_first_ms"] = 160.0
    return known | {"budget_bytes": 100, "cold": cold, "warm": warm} | changed


def test_figures_take_off_what_any_session_may_take_and_name_the_worst() -> None:
    rows = [
        row(found(600.0, 3300.0, 120.0), found(290.0, 3000.0, 120.0)),
        row(found(1300.0, 6300.0, 200.0), found(450.0, 5000.0, 200.0, 101), refused=True),
    ]
    figures = run.figures_of(rows)
    assert figures["cold_worst"] == pytest.approx(10.0)  # (1300 - 300) / 100
    assert figures["cold_median"] == pytest.approx(6.5)
    assert figures["warm_worst"] == pytest.approx(2.0)  # (290 - 50) / 120; (450 - 50) / 200
    assert figures["warm_to_plains_first_worst"] == pytest.approx(2.5)  # (450 - 50) / 160
    assert figures["run20_worst"] == pytest.approx(6000 / (RUN_STEPS * 200 + 200))
    assert (figures["refused"], figures["failed"], figures["over_budget"]) == (1, 0, 1)


def test_a_row_that_did_not_train_is_counted_and_nothing_else() -> None:
    rows = [row({"least_bytes": 200}, {"least_bytes": 200}, refused=True), {"workload": "w2"}]
    figures = run.figures_of([*rows[:1], rows[1] | {"refused": False, "failed": "killed"}])
    assert figures == {"rows": 2, "timed": 0, "refused": 1, "failed": 2, "over_budget": 0}


@pytest.mark.thorough
def test_a_process_times_a_session_from_its_making_and_names_a_least_budget() -> None:
    answers = {}
    for budget_bytes in (None, 1_000_000_000, 1_000_000):
        start = Start(TWO_LAYERS, None, is_small=True, budget_bytes=budget_bytes)
        child = Child("daf_bench.start.child", asdict(start), str(budget_bytes))
        answers[budget_bytes] = child.ask("train", 3)
        assert child.end() == 0
    assert answers[None]["plain_ms"] > 0.0
    ours = answers[1_000_000_000]
    assert ours["steady_ms"] < ours["first_ms"] <= ours["run_ms"]
    assert ours["peak_bytes"] <= 1_000_000_000
    assert answers[1_000_000]["least_bytes"] > 1_000_000
