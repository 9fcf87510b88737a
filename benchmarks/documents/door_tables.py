"""The table of the doors, in Markdown."""

from __future__ import annotations

from typing import Any

from daf_bench.doors.interval import interval_of
from words import measured_by

_COLUMNS = {"backward": "`session.backward`", "compress": "`compress`", "step again": "itself"}
_REFUSED = "refused"


def doors_figures(result: dict[str, Any]) -> str:
    """Every door's step over the session's by workload, and the fixed cost of each."""
    rows = result["rows"]
    (fixed,) = (row for row in rows if row["part"] == "fixed")
    costs = [f"{label} {fixed[door]:.2f}" for door, label in _fixed_columns(fixed).items()]
    lines = [
        measured_by(result, "doors"),
        "",
        "| at half of plain's peak, step ÷ `session.step`'s | "
        + " | ".join(_COLUMNS.values())
        + " |",
        "|---|---|---|---|",
        *(_line(row) for row in rows if row["part"] == "in turn"),
        "",
        "Medians of pairs, with their 95 % intervals. On a two-layer network a door adds to each "
        f"step, in ms: {', '.join(costs)}.",
    ]
    return "\n".join(lines)


def _fixed_columns(fixed: dict[str, Any]) -> dict[str, str]:
    names = {"step": "`session.step`", **_COLUMNS}
    return {door: name for door, name in names.items() if door in fixed}


def _line(row: dict[str, Any]) -> str:
    cells = [_REFUSED if door in row["refused"] else _ratio(row, door) for door in _COLUMNS]
    return f"| {row['workload'].upper()} | " + " | ".join(cells) + " |"


def _ratio(row: dict[str, Any], door: str) -> str:
    pairs = zip(row["ms"][door], row["ms"]["step"], strict=True)
    ratios = [one / other for one, other in pairs]
    if not ratios:
        return ""
    found = interval_of(ratios)
    return f"{found.middle:.3f} ({found.low:.3f} to {found.high:.3f})"
