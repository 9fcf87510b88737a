"""The timelines of three ways to pack beside a forward pass: what they took, and were to take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_LANES = {"gpu": "#2a78b8", "link": "#6d7a86", "cpu": "#c2570c"}
_HALVES = {"measured_timeline": 1.0, "timeline": 0.35}  # how opaque
_HALF = 0.42
_DARK = "#22303c"


def draw_pack(rows: list[dict[str, Any]], path: Path) -> None:
    """One strip a way and resource, its lower half, paler, by the model that chose the split.

    The long line is the end of the forward pass alone, the short ones those of the watched passes.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # heavy, and wanted only here
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.2 + 1.3 * len(rows)), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    labels: list[tuple[float, str]] = []
    for group, row in enumerate(rows):
        top = 4.0 * group
        for lane, resource in enumerate(_LANES):
            _draw_strip(axes, row, resource, top + lane)
            labels.append((top + lane + _HALF, f"{row['way']}: {resource}"))
        axes.vlines(row["measured_forward_ms"], top - 0.2, top + 3.0, color=_DARK, linewidth=1)
        axes.axvline(row["plain_forward_ms"], color=_DARK, linewidth=1, linestyle="dashed")
    axes.set_yticks([height for height, _ in labels], [name for _, name in labels], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(
        "ms since the forward pass began: measured; below, paler: by the model that chose the split"
    )
    axes.set_title("Who packs what, and when", loc="left", fontweight="bold")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path)


def _draw_strip(axes: Any, row: dict[str, Any], resource: str, top: float) -> None:
    for half, (name, opacity) in enumerate(_HALVES.items()):
        jobs = [job for job in row[name] if job["resource"] == resource]
        bars = [(job["begin_ms"], job["end_ms"] - job["begin_ms"]) for job in jobs]
        place = (top + half * _HALF, _HALF)
        # With an edge of its own colour a short job shows, too.
        axes.broken_barh(bars, place, color=_LANES[resource], alpha=opacity, linewidth=0.4)
