"""What the rows of all hosts come to."""

from __future__ import annotations

from math import nan

from daf_bench.doors.interval import Interval, interval_of
from daf_bench.harness.row_log import Row

PERCENT = 45
MOST_WIDTH = 0.04  # design, section 9
MOST_APART = 1e-3  # of what training moved the parameters by


def share(floor_bytes: int, peak_bytes: int) -> int:
    """Return the budget (bytes): the floor and ``PERCENT`` of the peak above it."""
    return int(floor_bytes + PERCENT * (peak_bytes - floor_bytes) / 100)


def interval_in(row: Row) -> Interval:
    """Return the interval of an update's time within the budget to the host's own."""
    pairs = zip(row["ms"]["ours"], row["ms"]["plain"], strict=True)
    return interval_of([ours / plain for ours, plain in pairs])


def peak_ratio(row: Row) -> float:
    """Return the host's peak above its floor to that within the budget above the same floor."""
    floor = row["floor_bytes"]
    return float((row["plain_peak_bytes"] - floor) / max(1, row["peak_bytes"] - floor))


def figures_of(rows: list[Row]) -> dict[str, float]:
    """Return the figures; ``hosts``: those that were trained both ways."""
    whole = [row for row in rows if "peak_bytes" in row]
    exact = {row["host"]: row for row in whole if row["part"] == "exact"}
    timed = {row["host"]: row for row in whole if row["part"] == "in turn"}
    intervals = [interval_in(row) for row in timed.values()]
    return {
        "hosts": len(exact.keys() & timed.keys()),
        "step_ratio_worst": max((each.low for each in intervals), default=nan),
        "step_ratio_middle_worst": max((each.middle for each in intervals), default=nan),
        "peak_ratio_least": min((peak_ratio(row) for row in whole), default=nan),
        "lines_changed_most": max((row["lines_changed"] for row in whole), default=nan),
        "over_budget": sum(row["peak_bytes"] > row["budget_bytes"] for row in whole),
        "mismatches": sum(row["moved_apart"] > MOST_APART for row in exact.values()),
        "moved_apart_worst": max((row["moved_apart"] for row in exact.values()), default=nan),
        "width_worst": max((each.half_width for each in intervals), default=nan),
        "refused": sum("refused" in row for row in rows),
        "failed": sum("failed" in row for row in rows),
        "skipped": sum(row["part"] == "skipped" for row in rows),
    }
