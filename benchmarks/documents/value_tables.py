"""The tables of exact recomputation, and of how sessions start, in Markdown."""

from __future__ import annotations

from typing import Any

from daf_bench.doors.interval import interval_of
from daf_bench.start.run import ratios_of
from words import MB, measured_by

_ASKED = {
    "resnet18": 1.7,
    "resnet50": 1.7,
    "densenet121": 3.2,
    "mobilenet_v2": 2.8,
    "bert_small": 1.5,
    "gpt2": 1.6,
}


def values_figures(result: dict[str, Any]) -> str:
    """Saved bytes and the time of a pass, exact beside plain, by model."""
    figures = result["figures"]
    lines = [
        measured_by(result, "values"),
        "",
        "| exact, whole batch | saved by plain | plain's over ours | asked | a pass over plain's | "
        "plain's over itself |",
        "|---|---|---|---|---|---|",
        *(_values_line(row) for row in result["rows"]),
        "",
        "Medians of pairs, with their 95 % intervals; asked within a pass of 1.15. Gradients equal "
        f"plain's bit for bit where plain's equal themselves: {figures['compared']:.0f} compared, "
        f"{figures['mismatches']:.0f} differ.",
    ]
    return "\n".join(lines)


def _values_line(row: dict[str, Any]) -> str:
    plain, ours = row["saved_bytes_plain"], row["saved_bytes"]
    cells = [
        row["model"],
        f"{plain / MB:.0f} MB",
        f"{plain / ours:.2f}",
        f"{_ASKED.get(row['model'], 0.0):.1f}",
        *(_ratio(row["ms"], label) for label in ("exact", "plain again")),
    ]
    return f"| {' | '.join(cells)} |"


def _ratio(found: dict[str, list[float]], label: str) -> str:
    pairs = zip(found[label], found["plain"], strict=True)
    interval = interval_of([one / other for one, other in pairs])
    return f"{interval.middle:.3f} ({interval.low:.3f} to {interval.high:.3f})"


def start_figures(result: dict[str, Any]) -> str:
    """How long a session takes to begin, by workload and budget."""
    lines = [
        measured_by(result, "start"),
        "",
        "| workload | budget | plain's step | first step | in a second process | twenty steps | "
        "steady step | cold | run20 |",
        "|---|---|---|---|---|---|---|---|---|",
        *(_start_line(row) for row in result["rows"]),
        "",
        *(f"- {note}" for note in result["notes"][1:]),
    ]
    return "\n".join(lines)


def _start_line(row: dict[str, Any]) -> str:
    named = ", the least" if row["refused"] else f", {row['share']:.0%}"
    if "cold" not in row or "first_ms" not in row["cold"]:
        return f"| {row['workload']} | {row['share']:.0%} | | refused | | | | | |"
    cold, warm, ratios = row["cold"], row["warm"], ratios_of(row)
    cells = [
        row["workload"],
        f"{row['budget_bytes'] / MB:.0f} MB{named}",
        *(
            f"{ms / 1000:.3g} s"
            for ms in (
                row["plain_ms"],
                cold["first_ms"],
                warm["first_ms"],
                cold["run_ms"],
                cold["steady_ms"],
            )
        ),
        *(f"{ratios[name]:.3g}" for name in ("cold", "run20")),
    ]
    return f"| {' | '.join(cells)} |"
