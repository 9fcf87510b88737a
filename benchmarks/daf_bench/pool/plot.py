"""The picture of ``daf bench pool``: time of an operation against live pages, showing the log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

_COLOURS = {"insert": "#1b6ca8", "evict": "#c8553d", "free": "#588157"}


def draw_times(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the ``time`` rows as a PNG: dots are medians; dashed, log n through the first dot."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # heavy, and wanted only here
    from matplotlib.figure import Figure

    times = [row for row in rows if row["part"] == "time"]
    subjects = list(dict.fromkeys(row["what"] for row in times))
    figure = Figure(figsize=(4.2 * len(subjects), 3.8), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(subjects), squeeze=False)[0]
    for panel, subject in zip(panels, subjects, strict=True):
        _draw_panel(panel, subject, [row for row in times if row["what"] == subject])
    panels[0].set_ylabel("\N{MICRO SIGN}s per page")
    figure.savefig(path)


def _draw_panel(panel: Any, subject: str, rows: Sequence[Mapping[str, Any]]) -> None:
    for operation, colour in _COLOURS.items():
        own = [row for row in rows if row["operation"] == operation]
        live = np.array([row["live"] for row in own], float)
        micros = np.array([row["us_per_page"] for row in own])
        panel.plot(live, micros, "o-", color=colour, linewidth=1, markersize=4, label=operation)
        logarithm = micros[0] * np.log(live) / np.log(live[0])
        panel.plot(live, logarithm, "--", color=colour, linewidth=0.8, alpha=0.6)
    panel.set_xscale("log")
    panel.set_ylim(bottom=0)
    panel.set_title(subject)
    panel.set_xlabel("nodes" if subject == "tree" else "live pages")
    panel.legend(loc="upper left", frameon=False, fontsize=8)
