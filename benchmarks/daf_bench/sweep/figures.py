"""The sweep's named numbers, from its rows alone."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

Rows = Sequence[dict[str, Any]]
OWN_POLICY = "optimal"
# Every workload can be trained at these shares of plain's peak above the floor.
FEASIBLE_FROM_PERCENT = 50
# Accumulation by hand computes something else here: batch statistics are each piece's own.
BATCH_STATISTICS = ("w1", "w2a", "w2b", "w2c", "w5", "w6")


def figures_of(rows: Rows) -> dict[str, float]:
    """Counts and ratios over DAF's own policy; the others are there to be drawn."""
    ours = [row for row in rows if row["part"] == "budget" and row["policy"] == OWN_POLICY]
    trained = [row for row in ours if row["outcome"] == "trained"]
    errors = [row["prediction_error"] for row in trained]
    figures: dict[str, float] = {
        "points": len(ours),
        "points_trained": len(trained),
        "overshoots": sum(row["overshoot_bytes"] > 0 for row in trained),
        "refusals_of_feasible": sum(map(_is_wrong_refusal, ours)),
        "least_too_high": sum(_is_least_too_high(row) for row in ours),
        "slower_than_static": sum(_is_slower(row, rows, row["peak_bytes"]) for row in trained),
        "slower_than_static_within_budget": sum(
            _is_slower(row, rows, row["budget_bytes"]) for row in trained
        ),
    }
    if errors:
        figures["prediction_error_median"] = statistics.median(errors)
        figures["prediction_error_worst"] = max(errors)
    return figures | _step_ratios(trained)


def _is_wrong_refusal(row: dict[str, Any]) -> bool:
    """Refused, raised or dead where the budget allows it; of what is 10 % below the least, never.

    A refusal must name a least budget above the one it refuses, and that must then work.
    """
    if row["outcome"] == "trained" or row["asked"] == "10 % less":
        return False
    if row["outcome"] != "refused" or row["asked"] == "least":
        return True
    least = row["least_bytes"]
    feasible = row["percent"] >= FEASIBLE_FROM_PERCENT
    return bool(feasible or least is None or least <= row["budget_bytes"])


def _is_least_too_high(row: dict[str, Any]) -> bool:
    within = row["outcome"] == "trained" and not row["overshoot_bytes"]
    return bool(row["asked"] == "10 % less" and within)


def _is_slower(row: dict[str, Any], rows: Rows, allowed_bytes: int) -> bool:
    """Is a strategy by hand, whose peak is at most that, faster?"""
    if "step_ratio" not in row or row["asked"] == "10 % less":
        return False
    return any(
        static["step_ratio"] < row["step_ratio"]
        for static in comparable_statics(rows, row["workload"])
        if static["peak_bytes"] <= allowed_bytes
    )


def comparable_statics(rows: Rows, workload: str) -> Iterable[dict[str, Any]]:
    """Strategies by hand on this workload that compute what plain computes."""
    for row in rows:
        if row["part"] != "static" or row["workload"] != workload or row["outcome"] != "trained":
            continue
        if workload not in BATCH_STATISTICS or not row["strategy"].startswith("accumulate"):
            yield row


def _step_ratios(trained: Rows) -> dict[str, float]:
    figures = {}
    for workload in dict.fromkeys(row["workload"] for row in trained if "step_ratio" in row):
        of = [row for row in trained if row["workload"] == workload]
        ratios = {row["percent"] or row["asked"]: row["step_ratio"] for row in of}
        if 50 in ratios:
            figures[f"step_ratio_{workload}_50"] = ratios[50]
        lowest = ratios.get(25, ratios.get("least"))
        if lowest is not None:
            figures[f"step_ratio_{workload}_25_or_least"] = lowest
    return figures
