"""The waterfall: plain's peak by terms, what each lever takes off, and what is left by terms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_MOST_COLUMNS = 2
_MB = 1e6
_COLOURS = {
    "parameters, buffers": "#7f8c8d",
    "optimizer state": "#b2babb",
    "saved": "#c0392b",
    "transient, gradients": "#e59866",
    "slack": "#f4d03f",
    "other": "#f4d03f",
}
_LESS, _MORE = "#2e8b57", "#8e44ad"


def draw_waterfall(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the ``waterfall`` rows of ``daf bench operators`` as a PNG, one panel per workload."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # heavy, and wanted only here
    from matplotlib.figure import Figure

    chosen = [row for row in rows if row["part"] == "waterfall"]
    workloads = list(dict.fromkeys(row["workload"] for row in chosen))
    columns = min(_MOST_COLUMNS, len(workloads))
    lines = -(-len(workloads) // columns)
    figure = Figure(figsize=(7.2 * columns, 4.8 * lines), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(lines, columns, squeeze=False).flatten()
    for panel, workload in zip(panels, workloads, strict=False):
        _draw_panel(panel, workload, [row for row in chosen if row["workload"] == workload])
    for panel in panels[len(workloads) :]:
        panel.set_axis_off()
    figure.savefig(path)


def peak_changes(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, float, float]]:
    """(stage, peak above floor before, and with it; MB) for every stage but the first."""
    peaks = [(row["peak_bytes"] - row["floor_bytes"]) / _MB for row in rows]
    stages = [row["stage"] for row in rows]
    return list(zip(stages[1:], peaks[:-1], peaks[1:], strict=True))


def _draw_panel(panel: Any, workload: str, rows: Sequence[Mapping[str, Any]]) -> None:
    panel.set_title(f"{workload}: peak above floor")
    panel.set_ylabel("MB")
    changes = peak_changes(rows)
    _stack(panel, 0, rows[0]["terms"], with_labels=True)
    for place, (_, before, after) in enumerate(changes, start=1):
        colour = _LESS if after <= before else _MORE
        panel.bar(place, before - after, bottom=after, width=0.6, color=colour)
        panel.annotate(f"{after - before:+.0f}", (place, max(before, after)), ha="center")
    _stack(panel, len(changes) + 1, rows[-1]["terms"], with_labels=False)
    panel.set_xticks(range(len(changes) + 2), ["plain", *(name for name, _, _ in changes), "DAF"])
    panel.legend(loc="upper right", fontsize=8)


def _stack(panel: Any, place: int, terms: Mapping[str, int], *, with_labels: bool) -> None:
    bottom = 0.0
    for name, count in terms.items():
        label = name if with_labels else None
        panel.bar(place, count / _MB, bottom=bottom, width=0.6, color=_COLOURS[name], label=label)
        bottom += count / _MB
    panel.annotate(f"{bottom:.0f}", (place, bottom), ha="center", va="bottom")
