"""The side-by-side's picture: time against memory, a panel for each workload."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from daf.report.peers_words import OURS, Row, Rows, ran, workloads_of

_INK, _QUIET = "#22303c", "#8a97a3"
_OURS, _PUBLISHED, _PEER = "#2a78b8", "#588157", "#c2570c"
_COLUMNS = 3
_MOST_TIMES = 4.0  # what is slower is drawn at the edge, and says how slow it is


def draw_peers(rows: Rows, path: Path) -> None:
    """Draw a PNG: left and low is better."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # heavy, and wanted only here
    from matplotlib.figure import Figure

    found = {name: ran(own) for name, own in workloads_of(rows).items() if ran(own)}
    columns = min(_COLUMNS, max(1, len(found)))
    lines = -(-len(found) // columns) or 1
    figure = Figure(figsize=(5.4 * columns, 4.4 * lines), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(lines, columns, squeeze=False).flat
    for panel, (name, own) in zip(panels, found.items(), strict=False):
        _draw_panel(panel, name, own)
    for panel in list(panels)[len(found) :]:
        panel.set_visible(False)
    figure.savefig(path)


def _draw_panel(panel: Any, name: str, rows: Rows) -> None:
    for row in rows:
        x, y = row["peak_ratio"], min(row["step_ratio"], _MOST_TIMES)
        panel.plot([x], [y], marker="o", ms=5, linestyle="", color=_colour(row))
        panel.annotate(_label(row), (x, y), xytext=(4, 3), textcoords="offset points", fontsize=6)
    ours = sorted((row["peak_ratio"], row["step_ratio"]) for row in rows if row["kind"] == OURS)
    if ours:
        panel.plot(*zip(*ours, strict=True), color=_OURS, linewidth=0.8, alpha=0.5)
    panel.axhline(1.0, color=_QUIET, linewidth=0.7, zorder=0)
    panel.axvline(1.0, color=_QUIET, linewidth=0.7, zorder=0)
    panel.set_xlim(left=0)
    panel.set_ylim(bottom=0)
    panel.set_title(name, loc="left", color=_INK, fontweight="bold")
    panel.set_xlabel("peak above the floor ÷ plain's", color=_INK)
    panel.set_ylabel("time a step ÷ plain's", color=_INK)
    panel.tick_params(colors=_QUIET, labelcolor=_INK)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)


def _colour(row: Row) -> str:
    if row["contestant"] == "plain":
        return _INK
    return {OURS: _OURS, "published": _PUBLISHED}.get(row["kind"], _PEER)


def _label(row: Row) -> str:
    slow = f" ({row['step_ratio']:.1f})" if row["step_ratio"] > _MOST_TIMES else ""
    return f"{row['contestant']}{slow}"
