"""The sweep's picture: throughput against memory, as SAGE draws it, a panel for each workload."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from daf_bench.sweep.figures import OWN_POLICY, Rows

_INK, _QUIET = "#22303c", "#8a97a3"
_COLOURS: Mapping[str, str] = {
    OWN_POLICY: "#2a78b8",
    "sage": "#588157",
    "checkpoint": "#d98c1f",
    "checkpoint-static": "#e9c46a",
    "daf": "#7b2d43",
    "daf-channels": "#b5657c",
    "accumulate": "#8e5ea2",
    "reduce": "#6b705c",
    "quantize": "#c0392b",
}
# SAGE's names (Gim and Ko, MobiSys 2022): static or dynamic, checkpointing or accumulation.
_NAMES: Mapping[str, str] = {
    OWN_POLICY: "DAF",
    "sage": "SAGE: DGA, then DGC (examples at once + tensors computed again)",
    "checkpoint": "DGC: recomputation alone",
    "checkpoint-static": "one level of the tree computed again",
    "daf": "DAF as published",
    "daf-channels": "the same, ranges of channels",
    "accumulate": "DGA: pieces alone",
    "reduce": "five operators' results computed again",
    "quantize": "codes alone",
}
_COMPUTED_AGAIN = ("recompute", "replay", "rederive")  # methods
_BY_HAND = {"checkpoint": ("^", "SGC, by hand"), "accumulate": ("s", "SGA, by hand")}
_MB = 1e6


def draw_sweep(rows: Rows, path: Path) -> None:
    """Draw a PNG of the timed workloads' rows; without any, of the others' unpaired ratios."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # heavy, and wanted only here
    from matplotlib.figure import Figure

    names = drawn_workloads(rows)
    figure = Figure(figsize=(5.2 * len(names), 4.4), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    for panel, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        _draw_panel(panel, rows, name)
    figure.savefig(path)


def drawn_workloads(rows: Rows) -> list[str]:
    """Those whose steps were paired with plain's; if none were, all."""
    paired = [row["workload"] for row in rows if "step_ratio" in row]
    return list(dict.fromkeys(paired or [row["workload"] for row in rows]))


def curve(rows: Rows, workload: str, policy: str) -> list[tuple[float, float]]:
    """(budget above the floor in MB, throughput ÷ plain's) of what was trained, least first."""
    found = [
        ((row["budget_bytes"] - row["floor_bytes"]) / _MB, 1 / _ratio(row))
        for row in _trained(rows, workload, policy)
    ]
    return sorted(found)


def _trained(rows: Rows, workload: str, policy: str) -> list[dict[str, Any]]:
    return [
        row
        for row in rows
        if row["part"] == "budget"
        and (row["workload"], row["policy"]) == (workload, policy)
        and row["outcome"] == "trained"
        and row["asked"] != "10 % less"
    ]


def _ratio(row: Mapping[str, Any]) -> float:
    ratio: float = row.get("step_ratio") or row["step_ratio_apart"]
    return ratio


def _draw_panel(panel: Any, rows: Rows, workload: str) -> None:
    for policy, colour in _COLOURS.items():
        points = curve(rows, workload, policy)
        if points:
            label = _NAMES[policy]
            panel.plot(*zip(*points, strict=True), color=colour, marker="o", ms=4, label=label)
    _mark_turning_point(panel, rows, workload)
    _draw_by_hand(panel, rows, workload)
    plain = next(r for r in rows if r["part"] == "plain" and r["workload"] == workload)
    above = (plain["peak_bytes"] - plain["floor_bytes"]) / _MB
    panel.plot([above], [1.0], color=_INK, marker="*", ms=10, linestyle="", label="plain PyTorch")
    panel.set_xlim(left=0)
    panel.set_ylim(bottom=0)
    panel.set_title(workload, color=_INK)
    panel.set_xlabel("memory above the floor, MB", color=_INK)
    panel.set_ylabel("throughput ÷ plain's", color=_INK)
    panel.grid(color="#dfe4e8", linewidth=0.7)
    panel.tick_params(colors=_QUIET, labelcolor=_INK)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
    panel.legend(loc="lower left", frameon=False, fontsize=7, labelcolor=_INK)


def _mark_turning_point(panel: Any, rows: Rows, workload: str) -> None:
    """Say beside SAGE's points how many examples it takes at once, and what it computes again."""
    sage = [row for row in _trained(rows, workload, "sage") if row.get("plan")]
    for row in sage:
        again = sum((row.get("methods") or {}).get(name, 0) for name in _COMPUTED_AGAIN)
        words = f"{row['plan']['micro_batch']}" + (f" + {again}" if again else "")
        at = ((row["budget_bytes"] - row["floor_bytes"]) / _MB, 1 / _ratio(row))
        offset = {"textcoords": "offset points", "xytext": (0, 5), "ha": "center"}
        panel.annotate(words, at, color=_COLOURS["sage"], fontsize=6, **offset)


def _draw_by_hand(panel: Any, rows: Rows, workload: str) -> None:
    """At the peak that each was measured to have."""
    for kind, (marker, label) in _BY_HAND.items():
        points = [
            ((row["peak_bytes"] - row["floor_bytes"]) / _MB, 1 / row["step_ratio"])
            for row in rows
            if row["part"] == "static"
            and row["workload"] == workload
            and row["outcome"] == "trained"
            and row["strategy"].startswith(kind)
        ]
        if points:
            panel.plot(
                *zip(*points, strict=True), color=_QUIET, marker=marker, linestyle="", label=label
            )
