"""The picture of ``daf bench kernels``: a roofline, and where each kernel stands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

_COLOURS = {"rotated": "#1b6ca8", "minmax": "#c8553d", "mask": "#588157"}
_OTHER_COLOUR = "#8d99ae"
_MARKERS = {"encode": "o", "decode": "s"}

Row = Mapping[str, Any]


def draw_roofline(rows: Sequence[Row], path: Path) -> None:
    """Bytes moved per second against instructions per byte, one panel an instruction set.

    The level line is the speed of reading memory once; the falling one the highest
    rate of instructions that any kernel of the set reached at any size.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # heavy, and wanted only here
    from matplotlib.figure import Figure

    counted = [row for row in rows if row["part"] == "kernel" and row["instructions_per_byte"]]
    names = list(dict.fromkeys(row["instruction_set"] for row in counted))
    figure = Figure(figsize=(4.6 * max(1, len(names)), 4.2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, max(1, len(names)), squeeze=False, sharey=True)[0]
    for panel, name in zip(panels, names, strict=False):
        own = [row for row in counted if row["instruction_set"] == name]
        _draw_panel(panel, name, own, rows)
    panels[0].set_ylabel("bytes moved, GB/s")
    figure.savefig(path)


def _draw_panel(panel: Any, name: str, own: Sequence[Row], rows: Sequence[Row]) -> None:
    largest = max(row["elements"] for row in own)
    shown = [row for row in own if (row["elements"], row["threads"]) == (largest, 1)]
    for row in shown:
        colour = _COLOURS.get(row["codec"], _OTHER_COLOUR)
        place = (row["instructions_per_byte"], row["gb_per_s"])
        panel.plot(*place, _MARKERS[row["way"]], color=colour, markersize=5)
        panel.annotate(str(row["bits"]), place, xytext=(4, 2), textcoords="offset points", size=7)
    _draw_limits(panel, own, rows, largest)
    for codec in dict.fromkeys(row["codec"] for row in shown):
        panel.plot([], [], "o", color=_COLOURS.get(codec, _OTHER_COLOUR), label=codec)
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_title(f"{name}, {largest:,} elements, one thread", fontsize=9)
    panel.set_xlabel("instructions per byte (round: encode, square: decode)")
    panel.legend(loc="upper right", frameon=False, fontsize=7)


def _draw_limits(panel: Any, own: Sequence[Row], rows: Sequence[Row], largest: int) -> None:
    alone = [row for row in own if row["threads"] == 1]
    most = max(row["gb_per_s"] * row["instructions_per_byte"] for row in alone)
    across = np.array([min(row["instructions_per_byte"] for row in alone) / 2, 100.0])
    panel.plot(across, most / across, "--", color="black", linewidth=0.8, label="instructions")
    for row in rows:
        if row["part"] == "limit" and (row["elements"], row["threads"]) == (largest, 1):
            panel.axhline(row["read_gb_per_s"], color="black", linewidth=0.8, label="one read")
