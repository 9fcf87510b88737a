"""Tables of exact recomputation, ablations, levers, and how sessions start, in Markdown."""

from __future__ import annotations

from typing import Any

from daf_bench.doors.interval import interval_of
from daf_bench.levers.run import ELSEWHERE, as_good, chosen, plans_of
from daf_bench.peers.table import PLAIN
from daf_bench.peers.verdicts import why_not
from daf_bench.start.run import ratios_of
from daf_bench.values.rivals import NOTES as RIVAL_NOTES
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
        *(_values_line(row) for row in result["rows"] if "ms" in row),
        "",
        "Medians of pairs, with their 95 % intervals; asked within a pass of 1.15. Gradients equal "
        f"plain's bit for bit where plain's equal themselves: {figures['compared']:.0f} compared, "
        f"{figures['mismatches']:.0f} differ. Recording and looking up takes at most "
        f"{figures['recording_share_worst']:.1%} of plain's step; where nothing is computed again, "
        f"{figures['unused_recorders']:.0f} recorders were made.",
        *_rivals_table(result),
    ]
    return "\n".join(lines)


def _rivals_table(result: dict[str, Any]) -> list[str]:
    """Exact sessions and rivals, each beside plain's steps; nothing where none was measured."""
    rows = [row for row in result["rows"] if "contestant" in row]
    if not rows:
        return []
    figures, shown = result["figures"], ("fewer_bytes_worst", "vs_best_recompute_worst")
    worst = (f"{name}: {figures[name]:.3g}" for name in shown if name in figures)
    return [
        "",
        "| whole steps | | budget | peak | saved, of plain's | step over plain's |",
        "|---|---|---|---|---|---|",
        *(_rival_line(row, rows) for row in rows),
        "",
        f"{'; '.join(worst)}.",
        *(f"- {note}" for note in result["notes"][-len(RIVAL_NOTES) :]),
    ]


def _rival_line(row: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    named = f"| {row['workload']} | {row['contestant']}"
    if "step_ratio" not in row:
        least = row.get("least_bytes")
        why = f"refused, at least {least / MB:.0f} MB" if least else why_not(row)[:120]
        return f"{named} | {why} | | | |"
    plain = next(r for r in rows if r["contestant"] == PLAIN and r["workload"] == row["workload"])
    saved, budget = row["saved_bytes_peak"], row.get("budget_bytes")  # plain was given none
    cells = [
        "" if budget is None else f"{budget / MB:.0f} MB",
        f"{row['peak_bytes'] / MB:.0f} MB",
        "" if saved is None else f"{saved / plain['saved_bytes_peak']:.3f}",
        f"{row['step_ratio']:.3f}",
    ]
    return f"{named} | {' | '.join(cells)} |"


def ablations_figures(result: dict[str, Any]) -> str:
    """Stages of both papers' ablations, each beside plain's steps."""
    lines = [
        measured_by(result, "ablations"),
        "",
        "| workload | stage | peak above the floor, of plain's | saved, of plain's | step over "
        "plain's | gradient error |",
        "|---|---|---|---|---|---|",
        *(_stage_line(row, result["rows"]) for row in result["rows"]),
        "",
        *(f"- {note}" for note in result["notes"][1:]),
    ]
    return "\n".join(lines)


def _stage_line(row: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    named = f"| {row['workload']} | {row['contestant']}"
    if "step_ratio" not in row:
        return f"{named} | {why_not(row)[:120]} | | | |"
    plain = next(r for r in rows if r["contestant"] == PLAIN and r["workload"] == row["workload"])
    saved, error = row["saved_bytes_peak"] / plain["saved_bytes_peak"], row["gradient_error"]
    shown = "" if error is None else f"{error:.2g}"
    return f"{named} | {row['peak_ratio']:.3f} | {saved:.3f} | {row['step_ratio']:.3f} | {shown} |"


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


def levers_figures(result: dict[str, Any]) -> str:
    """Each lever and in how many plans it is pulled, of which workloads; each policy likewise."""
    rows, figures = result["rows"], result["figures"]
    plans = plans_of(rows)
    lines = [
        measured_by(result, "levers"),
        "",
        f"| lever | of {figures['plans']:.0f} plans | of which workloads |",
        "|---|---|---|",
        *(f"| {name} | {count} | {_where(name, plans)} |" for name, count in chosen(rows).items()),
        "",
        "| policy | plans predicted as fast as the optimum |",
        "|---|---|",
        *(f"| `{name}` | {count} |" for name, count in as_good(rows).items()),
        "",
        *(f"- {note}" for note in result["notes"][: -len(ELSEWHERE)]),
    ]
    return "\n".join(lines)


def _where(name: str, plans: list[dict[str, Any]]) -> str:
    pulled = (plan for plan in plans if any(each.endswith(name) for each in plan["levers"]))
    found = ", ".join(dict.fromkeys(plan["workload"] for plan in pulled))
    return found or ELSEWHERE.get(name, "none")
