"""The picture of ``daf bench pressure``: budget and memory over time, and throughput beneath."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_INK, _QUIET = "#22303c", "#8a97a3"
_MEMORY, _BUDGET, _OTHER, _SPEED = "#2a78b8", "#c0392b", "#d98c1f", "#588157"
_MB = 1e6
Rows = Sequence[Mapping[str, Any]]


def draw_pressure(rows: Rows, path: Path) -> None:
    """Draw the rows of a result as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # heavy, and wanted only here
    from matplotlib.figure import Figure

    steps = [row for row in rows if row["part"] == "step"]
    start_s, end_s = steps[0]["start_s"], steps[-1]["end_s"]
    figure = Figure(figsize=(9, 6), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    memory, speed = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    _draw_memory(memory, rows, start_s, end_s)
    _draw_speed(speed, steps, start_s)
    speed.set_xlim(0, end_s - start_s)
    speed.set_xlabel("seconds", color=_INK)
    figure.savefig(path)


def budget_corners(rows: Rows, start_s: float, end_s: float) -> tuple[list[float], list[float]]:
    """The budget as corners of steps: seconds since ``start_s``, megabytes."""
    changes = [row for row in rows if row["part"] == "budget" and row["budget_bytes"] is not None]
    times = [max(0.0, row["at_s"] - start_s) for row in changes]
    sizes = [row["budget_bytes"] / _MB for row in changes]
    ends = [*times[1:], end_s - start_s][: len(times)]  # none, if the run told nothing
    corners = [(at, size) for *span, size in zip(times, ends, sizes, strict=True) for at in span]
    return [at for at, _ in corners], [size for _, size in corners]


def _draw_memory(panel: Any, rows: Rows, start_s: float, end_s: float) -> None:
    samples = [row for row in rows if row["part"] == "memory" and row["at_s"] >= start_s]
    times = [row["at_s"] - start_s for row in samples]
    sizes = [row["resident_bytes"] / _MB for row in samples]
    panel.fill_between(times, sizes, color=_MEMORY, alpha=0.18, linewidth=0)
    panel.plot(times, sizes, color=_MEMORY, linewidth=0.9, label="memory of the whole process")
    panel.plot(*budget_corners(rows, start_s, end_s), color=_BUDGET, linewidth=1.6, label="budget")
    squeeze = next(row for row in rows if row["part"] == "squeeze")
    if "end_s" in squeeze:
        whose = "a second process would hold" if squeeze["simulated"] else "a second process holds"
        moments = (squeeze["start_s"], squeeze["full_s"], squeeze["end_s"], squeeze["end_s"])
        heights = (0, squeeze["bytes"] / _MB, squeeze["bytes"] / _MB, 0)
        panel.plot([at - start_s for at in moments], heights, "--", color=_OTHER, label=whose)
    panel.set_ylim(bottom=0)
    panel.set_ylabel("MB", color=_INK)
    panel.legend(frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), ncols=3)
    _dress(panel)


def _draw_speed(panel: Any, steps: Rows, start_s: float) -> None:
    for step in steps:
        span = step["start_s"] - start_s, step["end_s"] - start_s
        rate = step["examples"] / (step["step_ms"] / 1000)
        panel.plot(span, (rate, rate), color=_SPEED, linewidth=2.2, solid_capstyle="butt")
    panel.set_ylim(bottom=0)
    panel.set_ylabel("examples/s", color=_INK)
    _dress(panel)


def _dress(panel: Any) -> None:
    panel.grid(axis="y", color="#dfe4e8", linewidth=0.7)
    panel.tick_params(colors=_QUIET, labelcolor=_INK)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
