"""The named numbers of ``daf bench papers``, from its rows alone."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from daf_bench.accuracy.falling import INVERTED, SHUFFLED
from daf_bench.papers.equal_noise import saved_ratio
from daf_bench.papers.eviction import WHOLE, gains
from daf_bench.papers.in_turn import OURS, PLAIN, PUBLISHED

Rows = Sequence[dict[str, Any]]
TABLE, TRAINING, NOISE, EVICTION, REDUCE = "table", "training", "equal noise", "eviction", "reduce"
STRATEGIES = "strategies"


def figures_of(rows: Rows) -> dict[str, float]:
    """Return counts and ratios; a ratio is missing where no workload has both of its sides."""
    table = [row for row in rows if row["part"] == TABLE]
    training = [row for row in rows if row["part"] == TRAINING]
    published = [row for row in training if row["contestant"] == PUBLISHED]
    budgeted = [row for row in training if row["contestant"] != PLAIN]
    figures: dict[str, float] = {
        "rows": len(table),
        "rows_without_command": sum(not row["command"] for row in table),
        "daf_published_tried": len(published),
        "daf_published_runs": sum(trained(row) and not is_over_budget(row) for row in published),
        "compared": len(list(pairs_of(training))),
        "over_budget": sum(map(is_over_budget, budgeted)),
        "refused": sum("refused" in row for row in budgeted),
        "failed": sum("failed" in row for row in training),
    }
    noise = [row for row in rows if row["part"] == NOISE]
    if noise:
        figures["ours_vs_daf_published_saved"] = saved_ratio(noise)
    if evicted := [row for row in rows if row["part"] == EVICTION]:
        figures["eviction_importance_gain"] = min(gains(evicted, SHUFFLED))
        figures["eviction_inverted_over_measured"] = min(gains(evicted, INVERTED))
        figures["eviction_whole_over_planes"] = min(gains(evicted, WHOLE))
    for row in rows:
        if row["part"] == REDUCE:
            figures["reduce_worst_vs_best"] = row["worst_vs_best"]
            figures["reduce_look_up_us_worst"] = row["look_up_us_worst"]
        if row["part"] == STRATEGIES:
            figures |= {name: row[name] for name in row if name.startswith("sage_")}
    return figures | _medians(training)


def trained(row: dict[str, Any]) -> bool:
    """True if it took every timed step."""
    return "steps_ms" in row


def is_over_budget(row: dict[str, Any]) -> bool:
    """True if it trained, and its process held more than its budget at any moment."""
    return trained(row) and row["peak_bytes"] > row["budget_bytes"]


def pairs_of(training: Rows) -> Iterable[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield (as published, ours) of every workload on which both trained."""
    of = {(row["workload"], row["contestant"]): row for row in training if trained(row)}
    for (workload, contestant), row in of.items():
        if contestant == PUBLISHED and (workload, OURS) in of:
            yield row, of[workload, OURS]


def _medians(training: Rows) -> dict[str, float]:
    pairs = list(pairs_of(training))
    if not pairs:
        return {}
    saved = [theirs["saved_bytes"] / ours["saved_bytes"] for theirs, ours in pairs]
    steps = [ours[f"step_vs_{PUBLISHED}"] for _, ours in pairs]
    return {
        "ours_vs_daf_published_saved_at_budget": statistics.median(saved),
        "ours_vs_daf_published_step": statistics.median(steps),
    }
