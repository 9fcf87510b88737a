"""The trade between step time and memory, one point for each allocator and cap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_COLOURS = {"plain": "#2a78b8", "coded": "#c0392b"}


def draw_trade(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the ``trade`` rows of ``daf bench allocator`` as a PNG, one panel per workload."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # heavy, and wanted only here
    from matplotlib.figure import Figure

    trade = [row for row in rows if row["part"] == "trade"]
    workloads = list(dict.fromkeys(row["workload"] for row in trade))
    figure = Figure(figsize=(6.4 * len(workloads), 4.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(workloads), squeeze=False)[0]
    for panel, workload in zip(panels, workloads, strict=True):
        _draw_panel(panel, workload, [row for row in trade if row["workload"] == workload])
    figure.savefig(path)


def _draw_panel(panel: Any, workload: str, rows: Sequence[Mapping[str, Any]]) -> None:
    panel.set_title(f"{workload}: plain PyTorch under glibc's defaults is (1, 1)")
    panel.set_xlabel("peak above floor, to plain's")
    panel.set_ylabel("step time, to plain's")
    panel.axhline(1.0, color="#8a97a3", linewidth=0.8)
    panel.axvline(1.0, color="#8a97a3", linewidth=0.8)
    for kind, colour in _COLOURS.items():
        ours = [row for row in rows if row["kind"] == kind]
        recycling = [row for row in ours if "accounting_error" in row]
        others = [row for row in ours if "accounting_error" not in row]
        panel.plot(*_places(recycling), "o-", color=colour, label=f"{kind}, recycling")
        panel.plot(*_places(others), "s", color=colour, fillstyle="none", label=f"{kind}, others")
        for row in ours:
            place = (row["peak_ratio"], row["step_ratio"])
            words = row["allocator"].removeprefix("recycle").strip(" ,")
            panel.annotate(words, place, textcoords="offset points", xytext=(4, 4), fontsize=7)
    panel.legend(loc="upper right", fontsize=8)


def _places(rows: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[float]]:
    return [row["peak_ratio"] for row in rows], [row["step_ratio"] for row in rows]
