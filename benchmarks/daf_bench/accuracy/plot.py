"""Accuracy against bytes saved for backward: one line for every codec and allocation."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
# (what lines are called, colour); DAF's own first.
FAMILIES: Mapping[str, tuple[str, str]] = {
    "allocated": ("DAF: rotated codes, widths by measured sensitivity", "#c0392b"),
    "rotated": ("DAF: rotated codes, one width", "#e59866"),
    "gact": ("GACT's allocation, min-max codes", "#2a78b8"),
    "actnn": ("ActNN's allocation, min-max codes", "#5aa6e6"),
    "minmax": ("min-max codes, one width", "#7f8c8d"),
    "alam": ("ALAM's averaging, min-max codes", "#8e44ad"),
    "tensor": ("DAF as published, the tensor's range", "#196f3d"),
    "channel": ("DAF as published, each channel's range", "#52be80"),
    "fused-allocated": ("DAF, allocated, fused operators", "#7d1f14"),
    "spread": ("DAF, attention's weights allocated too", "#d68910"),
    "fused-spread": ("DAF, queries and keys allocated too, fused operators", "#b9770e"),
    "apart-gact": ("GACT as published", "#16384f"),
    "apart-actnn": ("ActNN as published", "#3b7ca8"),
    "apart-minmax": ("min-max codes as published", "#bdc3c7"),
}
COLUMNS = 3  # of panels, so that a page's width still shows them
_FLOAT_BITS = 32.0
_BESIDE = 1.2
_BOTTOM = 0.02  # of a panel's height


def curve(rows: Sequence[Row], family: str, metric: str) -> list[tuple[float, float, float, float]]:
    """(bits per saved value, mean, least, greatest of the metric) of a family's policies, sorted.

    Bits per saved value: 32 over the saved ratio, whatever is stored in place of the values. Only
    policies all of whose runs finished; the others are ``failed``.
    """
    found = []
    for bits, group in _policies(rows, family):
        values = [row["metrics"].get(metric) for row in group]
        if None not in values:
            found.append((bits, statistics.mean(values), min(values), max(values)))
    return sorted(found)


def failed(rows: Sequence[Row], family: str, metric: str) -> list[float]:
    """Bits per saved value of a family's policies under which a run did not finish, sorted."""
    return sorted(
        bits
        for bits, group in _policies(rows, family)
        if any(metric not in row["metrics"] for row in group)
    )


def _policies(rows: Sequence[Row], family: str) -> Iterator[tuple[float, list[Row]]]:
    for policy in dict.fromkeys(row["policy"] for row in rows):
        group = [row for row in rows if row["policy"] == policy and row["saved_ratio"]]
        if policy.rpartition("-")[0] == family and group:
            yield statistics.mean(_FLOAT_BITS / row["saved_ratio"] for row in group), group


def draw_curves(rows: Sequence[Row], tasks: Mapping[str, str], path: Path) -> None:
    """Draw a PNG with a panel for every task; ``tasks``: names, each with its metric."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # heavy, and wanted only here
    from matplotlib.figure import Figure

    chosen = {name: _rows_of(rows, name) for name in tasks}
    shown = [name for name in tasks if any(row["policy"] != "plain" for row in chosen[name])]
    columns = max(1, min(COLUMNS, len(shown)))
    rows_of_panels = max(1, -(-len(shown) // columns))
    size = (6.4 * columns, 4.8 * rows_of_panels)
    figure = Figure(figsize=size, dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows_of_panels, columns, squeeze=False).flat
    for panel, name in zip_longest(panels, shown):
        if name is None:
            panel.set_axis_off()
        else:
            _draw_panel(panel, name, chosen[name], tasks[name])
    figure.savefig(path)


def _rows_of(rows: Sequence[Row], task: str) -> list[Row]:
    return [row for row in rows if row["task"] == task and "skipped" not in row]


def _draw_panel(panel: Any, name: str, rows: list[Row], metric: str) -> None:
    panel.set_title(name)
    panel.set_xscale("log", base=2)
    panel.set_xlabel("bits held per saved value (32 is plain PyTorch)")
    panel.set_ylabel(metric.replace("_", " "))
    plain = [row["metrics"][metric] for row in rows if row["policy"] == "plain" and row["metrics"]]
    if plain:
        panel.axhline(statistics.mean(plain), color="black", linewidth=1, label="plain PyTorch")
        panel.axhspan(min(plain), max(plain), color="black", alpha=0.08)
    found = {family: curve(rows, family, metric) for family in FAMILIES}
    for family, points in found.items():
        if points:
            words, colour = FAMILIES[family]
            bits, mean, least, most = zip(*points, strict=True)
            low = [m - each for m, each in zip(mean, least, strict=True)]
            high = [each - m for m, each in zip(mean, most, strict=True)]
            panel.errorbar(
                bits, mean, [low, high], color=colour, marker="o", capsize=2, label=words
            )
    ends = {family: failed(rows, family, metric) for family in FAMILIES}
    for family, places in ends.items():
        if places:
            words, colour = FAMILIES[family]
            panel.plot(
                places, [_BOTTOM] * len(places), "x", color=colour, clip_on=False,
                transform=panel.get_xaxis_transform(), label=f"{words}: not finished",
            )  # fmt: skip
    shown = [bits for points in found.values() for bits, *_ in points]
    shown += [bits for each in ends.values() for bits in each]
    if shown:  # a single point has no range of its own
        panel.set_xlim(min(shown) / _BESIDE, _BESIDE * max(shown))
    panel.legend(loc="lower right", fontsize=7)
