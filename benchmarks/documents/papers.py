"""What was seen of the papers' experiments: tables and sentences, in Markdown."""

from __future__ import annotations

from collections import Counter
from typing import Any

from daf_bench.offload.shared_memory import SAME
from words import MB, measured_by, picture

POLICIES = {
    "optimal": "DAF",
    "sage": "SAGE",
    "checkpoint": "DGC",
    "checkpoint-static": "static levels",
    "daf": "DAF as published",
    "daf-channels": "the same by channels",
    "accumulate": "DGA",
    "reduce": "subgraph reduction",
    "quantize": "codes alone",
}


def policy_lines(rows: list[dict[str, Any]]) -> list[str]:
    """Step time by budget and policy, where several were compared; and who is fastest how often."""
    points = [row for row in rows if row["part"] == "budget" and row.get("percent") is not None]
    names = [name for name in POLICIES if any(row["policy"] == name for row in points)]
    if len(names) < 2:
        return []
    table: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    for row in points:
        table.setdefault((row["workload"], row["percent"]), {})[row["policy"]] = row
    compared = {key: of for key, of in table.items() if len(of) > 1}
    titles = [POLICIES[name] for name in names]
    return [
        "| workload | budget, % | " + " | ".join(f"{title}: step" for title in titles) + " |",
        "|---" * (2 + len(names)) + "|",
        *(
            f"| {workload} | {percent} | {' | '.join(step_cell(of.get(name)) for name in names)} |"
            for (workload, percent), of in compared.items()
        ),
        "",
        fastest_seen([ratios_of(of) for of in compared.values()]),
        "",
    ]


def strategy_lines(rows: list[dict[str, Any]]) -> list[str]:
    """Each strategy's peak and step at each budget, and what of it accumulates or recomputes."""
    return [
        "| workload | strategy | budget, % | peak above the floor, MB | step ÷ plain's "
        "| examples at once | tensors computed again |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {row['workload']} | {_strategy(row)} | {row.get('percent') or ''} "
            f"| {' | '.join(_strategy_cells(row))} |"
            for row in sorted(rows, key=lambda row: str(row["workload"]))
            if row["part"] in ("static", "budget")
        ),
    ]


def _strategy(row: dict[str, Any]) -> str:
    if row["part"] == "budget":
        least = "" if row["percent"] is not None else f", {row['asked']}"
        return POLICIES[row["policy"]] + least
    return row["strategy"].replace("checkpoint", "SGC,").replace("accumulate", "SGA, parts:")


def _strategy_cells(row: dict[str, Any]) -> list[str]:
    if row["outcome"] != "trained":
        return [row["outcome"], "", "", ""]
    above = f"{(row['peak_bytes'] - row['floor_bytes']) / 1e6:.0f}"
    methods, plan = row.get("methods") or {}, row.get("plan") or {}
    again = sum(methods.get(name, 0) for name in ("recompute", "replay", "rederive"))
    of_plan = [str(plan.get("micro_batch", "")), str(again) if row["part"] == "budget" else ""]
    return [above, f"{row['step_ratio']:.3f}", *of_plan]


def step_cell(row: dict[str, Any] | None) -> str:
    """A point's step ÷ plain's, or how it ended."""
    if row is None:
        return ""
    return f"{row['step_ratio']:.3f}" if "step_ratio" in row else row["outcome"]


def ratios_of(policies: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Of those that trained at one budget."""
    return {name: row["step_ratio"] for name, row in policies.items() if "step_ratio" in row}


def fastest_seen(points: list[dict[str, float]]) -> str:
    """At how many budgets each was fastest."""
    fastest = Counter(min(of, key=lambda name: of[name]) for of in points if of)
    listed = ", ".join(f"{POLICIES[name]} {count}" for name, count in fastest.most_common())
    return f"Seen here: the fastest of these at {sum(fastest.values())} budgets was {listed}."


def packing_figures(result: dict[str, Any]) -> str:
    """What packing costs, in Markdown."""
    return "\n".join(
        [
            measured_by(result, "packing"),
            "",
            packing_seen(result["figures"]),
            "",
            *picture("packing", "What packing costs, stage by stage"),
            "| bits | quantize, ms | pack, ms | change layout, ms | one native pass, ms "
            "| memcpy, ms |",
            "|---|---|---|---|---|---|",
            *(
                f"| {row['bits']} | {row['quantize_ms']:.1f} | {row['pack_ms']:.1f} "
                f"| {row['relayout_ms']:.1f} | {row['fused_ms']:.1f} | {row['memcpy_ms']:.1f} |"
                for row in result["rows"]
            ),
        ]
    )


def shared_figures(result: dict[str, Any]) -> str:
    """Who packs in one memory, in Markdown: a row for each workload and way."""
    figures = result["figures"]
    pays = f"{figures['helper_pays']:.0f} of {figures['helpers']:.0f}"
    return "\n".join(
        [
            measured_by(result, "pack --device cpu"),
            "",
            "| workload | packed | forward ÷ plain's | packing, ms | of it hidden | exposed, ms "
            "| keeps up | copied | step ÷ plain's | step ÷ on the forward thread |",
            "|---" * 10 + "|",
            *map(_shared_line, result["rows"]),
            "",
            f"A helper pays in {pays} cases: the whole interval of its step lies below that of "
            "packing on the forward thread.",
        ]
    )


def _shared_line(row: dict[str, Any]) -> str:
    cells = [row["workload"], row["way"], f"{row['forward_ratio']:.2f}"]
    if row["packing_ms"]:
        is_beside = row["way"] != SAME  # what is packed in between has nothing to hide behind
        hidden = f"{row['hidden_ms'] / row['packing_ms']:.0%}" if is_beside else ""
        cells += [f"{row['packing_ms']:.0f}", hidden, f"{row['exposed_ms']:.0f}"]
        low, high = row["step_over_same_low"], row["step_over_same_high"]
        beside = f"{row['step_over_same']:.3f} ({low:.3f} to {high:.3f})"
        keeps_up = "yes" if row["keeps_up"] else "no"
        cells += [keeps_up if is_beside else "", f"{row['copied_bytes'] / MB:.0f} MB"]
    else:
        cells, beside = [*cells, "", "", "", "", ""], ""
    cells += [f"{row['step_ratio']:.3f}", beside]
    return f"| {' | '.join(cells)} |"


def packing_seen(figures: dict[str, float]) -> str:
    """The result in a sentence."""
    return (
        "Seen here, at 2 bits with PyTorch's operators: packing is "
        f"{100 * figures['packing_share']:.0f} % of quantizing and packing, and changing the "
        f"layout afterwards {100 * figures['relayout_share']:.0f} % of all three; one native pass "
        f"is {figures['fused_speed_vs_stages']:.1f} times as fast as quantizing and packing."
    )


def reduce_figures(result: dict[str, Any]) -> str:
    """Every strategy's time over PyTorch's, in Markdown."""
    names = ("tree", "atomics", "hybrid", "chosen")
    lines = [
        f"| {shape_cell(row)} | "
        + " | ".join(
            f"{row['microseconds'][name] / row['microseconds']['torch']:.2f}" for name in names
        )
        + f" | {row['choice']} | {row['rule'] or ''} |"
        for row in result["rows"]
    ]
    return "\n".join(
        [
            f"{measured_by(result, 'reduce')} times ÷ PyTorch's.",
            "",
            reduce_seen(result),
            "",
            *picture("reduce", "Time of each strategy over PyTorch's"),
            "| outer × channels × inner | tree | atomics | hybrid | chosen on first use | which "
            "| the rule takes |",
            "|---|---|---|---|---|---|---|",
            *lines,
        ]
    )


def varying_figures(result: dict[str, Any]) -> str:
    """If strategies that are timed again while running beat the choice of first use."""
    figures = result["figures"]
    verdict = "pays" if figures["is_worthwhile"] else "does not pay: the first choice stays"
    return (
        f"{measured_by(result, 'reduce --varying')} while other load comes and goes, threads and "
        f"sizes change, {len(result['rows'])} stretches in all, timing strategies again takes "
        f"{figures['retimed_vs_kept']:.3f} times as long as the choice of first use in the "
        f"geometric mean ({figures['retimed_vs_kept_best']:.2f} to "
        f"{figures['retimed_vs_kept_worst']:.2f}). It {verdict}."
    )


def shape_cell(row: dict[str, Any]) -> str:
    """Three extents."""
    return " × ".join(f"{row[name]:,}" for name in ("outer", "channels", "inner"))


def reduce_seen(result: dict[str, Any]) -> str:
    """The result in a sentence."""
    names = {"tree": "tree", "atomics": "atomics", "hybrid": "hybrid", "torch": "PyTorch's own"}
    best = Counter(min(names, key=row["microseconds"].__getitem__) for row in result["rows"])
    listed = ", ".join(f"{words} on {best[name]}" for name, words in names.items())
    figures = result["figures"]
    return (
        f"Seen here: of {len(result['rows'])} shapes, best is {listed}; hybrid takes at most "
        f"{figures['hybrid_worst_vs_best']:.2f} times the best one's time, what is chosen on first "
        f"use at most {figures['worst_vs_best']:.2f} times."
    )
