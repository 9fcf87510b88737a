"""The table of the hosts, in Markdown."""

from __future__ import annotations

from typing import Any

from daf_bench.hosts.catalogue import HOSTS
from daf_bench.hosts.figures import interval_in, peak_ratio
from words import MB, measured_by

_HEAD = (
    "| host | lines changed | peak above floor, MB | within a budget, MB | plain ÷ ours "
    "| update ÷ the host's own |"
)
_ENDED = ("refused", "failed", "skipped")
_PEAKS = ("plain_peak_bytes", "peak_bytes")


def hosts_figures(result: dict[str, Any]) -> str:
    """Every host's lines, peaks and update times, and how many passed the budget or differ."""
    rows, figures = result["rows"], result["figures"]
    last = {row["host"]: row for row in rows}
    lines = [
        measured_by(result, "hosts"),
        "",
        _HEAD,
        "|---|---|---|---|---|---|",
        *(_line(row) for row in last.values()),
        "",
        f"Over budget: {figures['over_budget']}. Parameters that differ at tolerance 0: "
        f"{figures['mismatches']} of {figures['hosts']} hosts. Refused: {figures['refused']}. "
        "Medians of pairs, with their 95 % intervals.",
    ]
    return "\n".join(lines)


def _line(row: dict[str, Any]) -> str:
    name = HOSTS[row["host"]][0]
    ended = next((each for each in _ENDED if each in row or each == row["part"]), None)
    if ended is not None:
        return f"| {name} | {ended} | | | | |"
    plain, ours = ((row[name] - row["floor_bytes"]) / MB for name in _PEAKS)
    found = interval_in(row)
    interval = f"{found.middle:.3f} ({found.low:.3f} to {found.high:.3f})"
    cells = [str(row["lines_changed"]), f"{plain:.0f}", f"{ours:.0f}", f"{peak_ratio(row):.2f}"]
    return f"| {name} | {' | '.join(cells)} | {interval} |"
