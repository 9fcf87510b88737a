"""The side-by-side's picture: time against memory, a panel for each workload."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from daf_bench.peers.verdicts import OURS, Row, Rows, ran, workloads_of

_INK, _QUIET = "#22303c", "#8a97a3"
_OURS, _PUBLISHED, _PEER = "#2a78b8", "#588157", "#c2570c"
_COLUMNS = 3
_MOST_TIMES = 4.0  # what is slower lies at the upper edge


def draw_peers(rows: Rows, path: Path) -> None:
    """Draw a PNG: left and low is better; numbers stand for names, told beside the panels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # heavy, and wanted only here
    from matplotlib.figure import Figure

    found = {name: ran(own) for name, own in workloads_of(rows).items() if ran(own)}
    columns = min(_COLUMNS, max(1, len(found)))
    lines = -(-len(found) // columns) or 1
    figure = Figure(figsize=(4.2 * columns + 2.8, 4.0 * lines), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(lines, columns, squeeze=False).flat)
    numbers = {row["contestant"]: index for index, row in enumerate(_each_once(rows))}
    for panel, (name, own) in zip(panels, found.items(), strict=False):
        _draw_panel(panel, name, own, numbers)
    for panel in panels[len(found) :]:
        panel.set_visible(False)
    _draw_key(figure, _each_once(rows))
    figure.savefig(path)


def _each_once(rows: Rows) -> list[Row]:
    """One row of every contestant, in the table's order."""
    return list({row["contestant"]: row for row in reversed(ran(rows))}.values())[::-1]


def _draw_panel(panel: Any, name: str, rows: Rows, numbers: Mapping[str, int]) -> None:
    for row in rows:
        place = _place(row)
        panel.plot(*([value] for value in place), "o", ms=4.5, color=_colour(row))
        panel.annotate(
            str(numbers[row["contestant"]]),
            place,
            xytext=(3, 3),
            textcoords="offset points",
            fontsize=7,
            color=_colour(row),
        )
    budgets = sorted(_place(row) for row in rows if row["kind"] == OURS and row["percent"])
    if budgets:
        panel.plot(*zip(*budgets, strict=True), color=_OURS, linewidth=0.8, alpha=0.5, zorder=0)
    panel.axhline(1.0, color=_QUIET, linewidth=0.7, zorder=0)
    panel.axvline(1.0, color=_QUIET, linewidth=0.7, zorder=0)
    panel.set_xlim(left=0)
    panel.set_ylim(0, 1.07 * max(_place(row)[1] for row in rows))
    panel.set_title(name, loc="left", color=_INK, fontweight="bold")
    panel.set_xlabel("peak above the floor ÷ plain's", color=_INK)
    panel.set_ylabel(f"time a step ÷ plain's, to {_MOST_TIMES:.0f}", color=_INK)
    panel.tick_params(colors=_QUIET, labelcolor=_INK)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)


def _draw_key(figure: Any, each: list[Row]) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], marker="o", ms=4.5, linestyle="", color=_colour(row), label=label)
        for index, row in enumerate(each)
        for label in [f"{index}  {row['contestant']}"]
    ]
    figure.legend(handles=handles, loc="outside right upper", frameon=False, fontsize=8)


def _place(row: Row) -> tuple[float, float]:
    return float(row["peak_ratio"]), min(float(row["step_ratio"]), _MOST_TIMES)


def _colour(row: Row) -> str:
    if row["contestant"] == "plain":
        return _INK
    return {OURS: _OURS, "published": _PUBLISHED}.get(row["kind"], _PEER)
