"""The timelines of three ways to pack beside a forward pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_LANES = {"gpu": "#2a78b8", "link": "#6d7a86", "cpu": "#c2570c"}


def draw_pack(rows: list[dict[str, Any]], path: Path) -> None:
    """One strip a way and resource; the line is the end of the forward pass alone."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # heavy, and wanted only here
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.2 + 1.1 * len(rows)), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    labels: list[tuple[float, str]] = []
    for group, row in enumerate(rows):
        for lane, (resource, colour) in enumerate(_LANES.items()):
            height = 4.0 * group + lane
            jobs = [job for job in row["timeline"] if job["resource"] == resource]
            bars = [(job["begin_ms"], job["end_ms"] - job["begin_ms"]) for job in jobs]
            axes.broken_barh(bars, (height, 0.8), color=colour, edgecolor="white", linewidth=0.3)
            labels.append((height + 0.4, f"{row['way']}: {resource}"))
        axes.axvline(row["plain_forward_ms"], color="#22303c", linewidth=1)
    axes.set_yticks([height for height, _ in labels], [name for _, name in labels], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("ms since the forward pass began (by the model that chose the split)")
    axes.set_title("Who packs what, and when", loc="left", fontweight="bold")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path)
