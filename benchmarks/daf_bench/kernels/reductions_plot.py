"""The reductions' picture: every strategy's time over PyTorch's, shape by shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_COLOURS = {"tree": "#2a78b8", "atomics": "#c2570c", "hybrid": "#1a7f5a", "chosen": "#22303c"}


def draw_reduce(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw a group of marks a shape; the line is PyTorch's own reduction."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # heavy, and wanted only here
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.2), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for offset, (name, colour) in enumerate(_COLOURS.items()):
        places = [5 * index + offset for index in range(len(rows))]
        times = [row["microseconds"] for row in rows]
        axes.bar(places, [each[name] / each["torch"] for each in times], color=colour, label=name)
    axes.axhline(1.0, color="#6d7a86", linewidth=1, label="PyTorch")
    cub = {place: row["microseconds"] for place, row in enumerate(rows)}
    cub = {place: times for place, times in cub.items() if "cub" in times}
    if cub:
        heights = [times["cub"] / times["torch"] for times in cub.values()]
        axes.plot([5 * place + 1.5 for place in cub], heights, "kx", label="CUB")
    axes.set_xticks([5 * index + 1.5 for index in range(len(rows))], [_name(row) for row in rows])
    axes.tick_params(axis="x", labelsize=8, rotation=40)
    axes.set_yscale("log")
    axes.set_ylabel("time ÷ PyTorch's")
    axes.set_title("Ranges of tensors, and of channels", loc="left", fontweight="bold")
    figure.legend(frameon=False, ncols=6, loc="outside lower center")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path)


def _name(row: dict[str, Any]) -> str:
    if row["channels"] == 1:
        return f"{row['outer'] * row['inner']:,}"
    return f"{row['outer']}×{row['channels']}×{row['inner']}"
