"""SAGE's comparison: eight strategies on its four models, each within the same budgets.

The eight are no optimisation, static checkpointing and accumulation by hand (SGC, SGA), dynamic
ones (DGC, DGA), SAGE's hybrid, DAF as published, and DAF's own plan. A budget allows the fastest
amount of a static strategy whose measured peak is within it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from daf_bench.doors.interval import student_t
from daf_bench.sweep.point import WARM_UP_STEPS

Rows = Sequence[dict[str, Any]]

MODELS = ("w2a", "w2b", "w2c", "w3")  # ResNet-50, DenseNet-121, MobileNet-v2, BERT-small
PERCENTS = (100, 75, 50, 35, 25, 15)
POLICIES = ("optimal", "sage", "checkpoint", "accumulate", "daf")
SAGE = "sage"
STATIC = ("checkpoint", "accumulate")  # SGC and SGA; what their rows' names begin with
BY_HAND = ((1.0, 1), (0.5, 1), (0.0, 2), (0.0, 4), (0.0, 8))
# Micro-batches of these have batch statistics of their own, as SAGE has it and SGA by hand.
CUT_STATISTICS = frozenset({"sage", "accumulate"})
NOTES = (
    "cuts_statistics: micro-batches have batch statistics of their own there, as in SAGE, which "
    "computes something else; DAF's own plan and the rest never do",
    "sage_vs_best_static_worst: SAGE's step over the fastest of SGC and SGA whose peak is within "
    "the same budget; the end nearer to 1 of the 95 % interval; the worst of models and budgets",
)


def figures_of(rows: Rows) -> dict[str, float]:
    """Counts and the worst ratio; {} where SAGE was not tried."""
    tried = [row for row in rows if _is_budget_of(row, SAGE)]
    if not tried:
        return {}
    fitting = [(row, fits) for row in tried if (fits := list(_static_within(rows, row)))]
    trained = [(row, fits) for row, fits in fitting if _holds(row)]
    figures: dict[str, float] = {"sage_models": len(_models(rows)), "sage_points": len(fitting)}
    if fitting:
        figures["sage_fits_where_static_fits"] = len(trained) / len(fitting)
    if trained:
        figures["sage_vs_best_static_worst"] = max(_near_end(*each) for each in trained)
    return figures


def _models(rows: Rows) -> list[str]:
    """The workloads on which all eight strategies were tried, at the same budgets."""
    return [name for name in dict.fromkeys(row["workload"] for row in rows) if _has_all(rows, name)]


def _has_all(rows: Rows, workload: str) -> bool:
    own = [row for row in rows if row["workload"] == workload]
    percents = {row["percent"] for row in own if _is_budget_of(row, SAGE)}
    dynamic = {(row["policy"], row["percent"]) for row in own if row["part"] == "budget"}
    static = {row["strategy"].split()[0] for row in own if row["part"] == "static"}
    has_plain = any(row["part"] == "plain" for row in own)
    has_both = bool(percents) and dynamic >= {*product(POLICIES, percents)}
    return has_plain and static >= {*STATIC} and has_both


def _is_budget_of(row: dict[str, Any], policy: str) -> bool:
    return row["part"] == "budget" and row["policy"] == policy and row["percent"] is not None


def _holds(row: dict[str, Any]) -> bool:
    """True if it trained, and its process never held more than its budget."""
    return row["outcome"] == "trained" and not row["overshoot_bytes"]


def _static_within(rows: Rows, asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
    static = (row for row in rows if row["part"] == "static" and row["outcome"] == "trained")
    for row in static:
        is_same = row["workload"] == asked["workload"]
        if is_same and row["peak_bytes"] <= asked["budget_bytes"]:
            yield row


def _near_end(sage: dict[str, Any], static: Rows) -> float:
    best = min(map(log_ratios, static), key=statistics.fmean)
    return near_end_of_ratio(log_ratios(sage), best)


def log_ratios(row: dict[str, Any]) -> list[float]:
    """Each timed step's logarithm of its time over that of plain's beside it."""
    skip = min(WARM_UP_STEPS, len(row["steps_ms"]) - 1)
    pairs = zip(row["steps_ms"][skip:], row["plain_steps_ms"][skip:], strict=True)
    return [math.log(ours / plain) for ours, plain in pairs]


def near_end_of_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The end nearer to 1 of the 95 % interval of ours ÷ theirs, from logarithms; 1 if inside.

    Welch's interval: the two sides were measured apart, each in turn with plain.
    """
    middle = statistics.fmean(ours) - statistics.fmean(theirs)
    shares = [
        statistics.variance(side) / len(side) if len(side) > 1 else 0.0 for side in (ours, theirs)
    ]
    error = math.sqrt(sum(shares))
    half = _t_of(shares, (len(ours), len(theirs))) * error
    return math.exp(math.copysign(max(0.0, abs(middle) - half), middle))


def _t_of(shares: Sequence[float], counts: Sequence[int]) -> float:
    """Student's t by the degrees of freedom of Welch and Satterthwaite."""
    below = sum(s * s / (n - 1) for s, n in zip(shares, counts, strict=True) if n > 1)
    return student_t(int(sum(shares) ** 2 / below) if below else 1)
