"""The same report as one PNG: memory, account, plan, loss and throughput, by Matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from daf.report.account import waterfall
from daf.report.memory_picture import levels_of, spread, title
from daf.report.noise import noise_of
from daf.report.runs import Run
from daf.report.scale import Point, thinned
from daf.report.treatments import COLOURS, strips_of, totals_by_method

_INK = "#22303c"
_QUIET = "#6d7a86"
_RUNS = ("#2a78b8", "#c2570c", "#1a7f5a", "#8b3fa8", "#9a7400", "#c2477f")
_BARS = {"term": "#7fa6c9", "floor": _QUIET, "predicted": "#b26a00", "measured": "#2a78b8"}
_BUDGET = "#c0392b"
_MB = 1e6


def draw_report(runs: Sequence[Run], path: Path) -> None:
    """Draw the report of one run, or the comparison of several, into a PNG file.

    Raises:
        OSError: the file cannot be written.
    """
    import matplotlib  # heavy, and wanted here only

    matplotlib.use("Agg")
    from matplotlib import pyplot

    alone = len(runs) == 1
    heights = [1.1, 1.0, 1.0, 0.9] if alone else [1.0, 0.8, 1.0]
    figure = pyplot.figure(figsize=(11, 3.6 * sum(heights)), dpi=120, layout="constrained")
    rows: Any = figure.subfigures(len(heights), 1, height_ratios=heights)
    if alone:
        _draw_one(rows, runs[0])
    else:
        _draw_several(rows, runs)
    figure.savefig(path, bbox_inches="tight", pad_inches=0.2)
    pyplot.close(figure)


def _draw_one(rows: Sequence[Any], run: Run) -> None:
    _memory(rows[0].subplots(), [run])
    _account(rows[1].subplots(), run)
    _plan(rows[2].subplots(), run)
    noise = noise_of(run)
    panels = rows[3].subplots(1, 3 if noise else 2)
    _training(panels[:2], [run])
    if noise:
        _noise(panels[2], noise)


def _draw_several(rows: Sequence[Any], runs: Sequence[Run]) -> None:
    _memory(rows[0].subplots(), runs)
    _side_by_side(rows[1].subplots(1, 2), runs)
    _training(rows[2].subplots(1, 2), runs)


def _dress(axes: Any, heading: str, x_name: str = "", y_name: str = "") -> None:
    axes.set_title(heading, loc="left", color=_INK, fontsize=11, fontweight="bold")
    axes.set_xlabel(x_name, color=_QUIET)
    axes.set_ylabel(y_name, color=_QUIET)
    axes.tick_params(colors=_QUIET, labelcolor=_INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _memory(axes: Any, runs: Sequence[Run]) -> None:
    for run, colour in zip(runs, _RUNS * len(runs), strict=False):
        points = thinned(list(zip(run.memory.seconds, run.memory.megabytes, strict=True)), max)
        xs, ys = zip(*points, strict=True)
        axes.plot(xs, ys, color=colour, linewidth=1.2, label=run.name)
        if len(runs) == 1:
            axes.fill_between(xs, ys, color=colour, alpha=0.16, linewidth=0)
    axes.set_ylim(bottom=0)
    if len(runs) == 1:
        _levels(axes, runs[0])
        heading = title(runs[0].summary, runs[0].memory.budgets)
    else:
        axes.legend(frameon=False)
        heading = "Memory over time"
    _dress(axes, heading, "seconds", "MB")


def _levels(axes: Any, run: Run) -> None:
    levels = levels_of(run.summary)
    top = 1.12 * max([level.megabytes for level in levels] + list(run.memory.megabytes))
    axes.set_ylim(0, top)
    for level, place in zip(levels, spread([each.megabytes for each in levels], top), strict=True):
        axes.axhline(level.megabytes, color=level.colour, linestyle=level.style, linewidth=1.2)
        words, colour = f"{level.words}  {level.megabytes:,.0f} MB", level.colour
        axes.text(1.01, place / top, words, transform=axes.transAxes, color=colour, va="center")


def _account(axes: Any, run: Run) -> None:
    bars = waterfall(run)
    for row, bar in enumerate(bars):
        left, width = min(bar.start_bytes, bar.end_bytes) / _MB, abs(bar.nbytes) / _MB
        axes.barh(row, width, left=left, color=_BARS[bar.kind], height=0.66)
        axes.text(left + width, row, f" {bar.nbytes / _MB:,.0f} MB", va="center", fontsize=8.5)
    if run.budget_bytes is not None:
        axes.axvline(run.budget_bytes / _MB, color=_BUDGET, linewidth=1.6)
    axes.set_yticks(range(len(bars)), [bar.words for bar in bars])
    axes.invert_yaxis()
    _dress(axes, "The account: what the peak is made of", "MB")


def _plan(axes: Any, run: Run) -> None:
    """Modules from left to right: grey what plain PyTorch would hold, in colour what was held."""
    strips = strips_of(run)
    for column, strip in enumerate(strips):
        axes.bar(column, strip.plain_bytes / _MB, color="#dfe4e8", width=0.84)
        bottom = 0.0
        for cell in strip.cells:
            height = cell.held_bytes / _MB
            axes.bar(column, height, bottom=bottom, color=COLOURS[cell.method][1], width=0.84)
            bottom += height
    for method in totals_by_method(strips):
        axes.bar(0, 0, color=COLOURS[method][1], label=COLOURS[method][0])
    axes.bar(0, 0, color="#dfe4e8", label="plain PyTorch")
    axes.legend(frameon=False, ncols=4, fontsize=8.5)
    axes.set_xticks([])
    _dress(axes, "Saved for backward, by module", f"{len(strips)} modules, first to last", "MB")


def _training(both: Sequence[Any], runs: Sequence[Run]) -> None:
    for run, colour in zip(runs, _RUNS * len(runs), strict=False):
        for axes, key in zip(both, ("loss", "examples_per_s"), strict=True):
            points = [(float(each["step"]), float(each[key])) for each in run.steps]
            if points:
                axes.plot(*zip(*thinned(points, fmean), strict=True), color=colour, label=run.name)
    if len(runs) > 1:
        both[0].legend(frameon=False)
    both[1].set_ylim(bottom=0)
    _dress(both[0], "Training loss", "step")
    _dress(both[1], "Throughput", "step", "examples a second")


def _noise(axes: Any, noise: Mapping[str, Sequence[Point]]) -> None:
    for (name, points), colour in zip(noise.items(), (_RUNS[0], _BUDGET), strict=True):
        axes.plot(*zip(*thinned(points, fmean), strict=True), color=colour, label=name)
    axes.legend(frameon=False)
    axes.set_ylim(bottom=0)
    _dress(axes, "Gradient noise", "step", "variance")


def _side_by_side(both: Sequence[Any], runs: Sequence[Run]) -> None:
    names = [run.name for run in runs]
    colours = [colour for _, colour in zip(runs, _RUNS * len(runs), strict=False)]
    both[0].barh(names, [run.above_floor_bytes / _MB for run in runs], color=colours)
    both[1].barh(names, [run.summary["step_ms_median"] or 0.0 for run in runs], color=colours)
    _dress(both[0], "Peak above the floor", "MB")
    _dress(both[1], "A step, median", "ms")
    for axes in both:
        axes.invert_yaxis()
