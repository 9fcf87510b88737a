"""Charts as a PNG by Matplotlib; ``python -m daf.report.picture RUN`` draws ``memory.png``."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from daf.core.errors import DafError, PlatformError
from daf.files.atomic import replacing
from daf.report.chart import BarChart, LineChart
from daf.report.run_charts import memory_charts
from daf.report.runs import read_run
from daf.report.treatments import COLOURS, INK, QUIET, RULE, STYLES

_COLOURS = {style: light for style, (light, _) in STYLES.items()} | {
    method.value: light for method, (_, light, _) in COLOURS.items()
}
_DASHES = {"predicted": "--", "memory": ":"}  # of levels
_ACROSS_FROM = 3  # number of charts from which two columns are used
_LIMIT_S = 120


def draw(charts: Sequence[LineChart | BarChart], path: Path) -> None:
    """Draw charts into one PNG; raises PlatformError without Matplotlib, OSError if unwritable."""
    try:
        from matplotlib import rc_context  # large, and used only here
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlatformError(
            f"asked to draw {path}, which needs Matplotlib; try: pip install 'daf-train[pictures]'"
        ) from error
    # Names are shown as they are.
    with replacing(path) as file, rc_context({"text.parse_math": False}):
        figure = _figure(charts, Figure)
        FigureCanvasAgg(figure)
        figure.savefig(file, format="png")


def _figure(charts: Sequence[LineChart | BarChart], make: Callable[..., Any]) -> Any:
    columns = 2 if len(charts) >= _ACROSS_FROM else 1
    rows = -(-len(charts) // columns)
    figure = make(figsize=(9 * columns, 4.4 * rows), dpi=160 // columns, layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes in panels[len(charts) :]:
        axes.set_axis_off()
    for axes, chart in zip(panels, charts, strict=False):
        if isinstance(chart, LineChart):
            _draw_lines(axes, chart)
        else:
            _draw_bars(axes, chart)
        axes.set_title(chart.title, loc="left", color=INK, fontsize=12, fontweight="bold", pad=12)
        axes.tick_params(colors=QUIET, labelcolor=INK)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    return figure


def _draw_lines(axes: Any, chart: LineChart) -> None:
    for shade in chart.shades:
        axes.axvspan(shade.start, shade.end, color=_COLOURS[shade.style], linewidth=0, zorder=0)
    for shade in chart.named_shades():
        across = axes.get_xaxis_transform()  # x in seconds, y from 0 to 1
        middle = (shade.start + shade.end) / 2
        name = axes.text(middle, 0.02, shade.name, transform=across, ha="center", color=QUIET)
        name.set_in_layout(False)  # long names beside narrow shades would leave no room for axes
    named: dict[str, Any] = {}
    for series in chart.series:
        faint, colour = "faint " in series.style, _COLOURS[series.style.removeprefix("faint ")]
        xs, ys = zip(*series.corners(), strict=True)
        (line,) = axes.plot(xs, ys, color=colour, alpha=0.35 if faint else 1, linewidth=1.3)
        named.setdefault(series.name, line)
        if series.filled:
            axes.fill_between(xs, ys, color=colour, alpha=0.18, linewidth=0)
    _draw_levels(axes, chart)
    if len(named) > 1 or any(series.filled for series in chart.series):
        axes.legend(named.values(), named.keys(), frameon=False, fontsize=8.5)
    low, high = chart.x_range
    axes.set_xlim(low, high if high > low else low + 0.1)
    axes.set_ylim(*chart.y_range)
    axes.set_xlabel(chart.x_name, color=INK)
    axes.set_ylabel(chart.y_name, color=INK)
    axes.grid(axis="y", color=RULE, linewidth=0.7)
    axes.set_axisbelow(True)


def _draw_levels(axes: Any, chart: LineChart) -> None:
    for level, place in chart.placed_levels():
        colour = _COLOURS[level.style]
        axes.axhline(level.value, color=colour, ls=_DASHES.get(level.style, "-"), linewidth=1.6)
        style = {"color": colour, "va": "center", "fontweight": "bold", "fontsize": 9.5}
        axes.text(1.012, place, chart.words_of(level), transform=axes.transAxes, **style)


def _draw_bars(axes: Any, chart: BarChart) -> None:
    for row, bar in enumerate(chart.bars):
        left, width = min(bar.start_bytes, bar.end_bytes), abs(bar.nbytes)
        axes.barh(row, width, left=left, color=_COLOURS[bar.kind], height=0.66)
        axes.text(left + width, row, f" {chart.words_of(bar)}", va="center", fontsize=8.5)
    if chart.limit_bytes is not None:
        axes.axvline(chart.limit_bytes, color=_COLOURS["budget"], linewidth=1.6)
    axes.set_yticks(range(len(chart.bars)), [bar.words for bar in chart.bars])
    axes.set_xlim(0, 1.1 * chart.most)
    axes.set_xticks([])
    axes.invert_yaxis()


def draw_memory(folder: Path) -> Path:
    """Draw a run's ``memory.png`` and return its path.

    Raises as ``read_run`` and ``draw``, and ValueError if no memory was sampled.
    """
    run = read_run(folder)
    path = folder / "memory.png"
    if not (charts := memory_charts(run)):
        raise ValueError(f"{folder / 'memory.jsonl'} holds no sample")
    draw([replace(charts[0], title=run.title)], path)
    return path


def draw_memory_elsewhere(folder: Path) -> str:
    """Run ``draw_memory`` in another process; return its error message, "" on success."""
    command = [sys.executable, "-m", "daf.report.picture", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return ""
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"the drawing process ended with {done.returncode}"


def main(arguments: Sequence[str]) -> int:
    """Draw for the run folder in ``arguments``; return the exit status."""
    if len(arguments) != 1:
        print("usage: python -m daf.report.picture RUN", file=sys.stderr)
        return 2
    with suppress(OSError):  # not Linux; elsewhere the kernel kills this before a training run
        Path("/proc/self/oom_score_adj").write_text("1000")
    try:
        print(draw_memory(Path(arguments[0])))
    except (DafError, OSError, ValueError, KeyError) as error:
        print(f"cannot draw {arguments[0]}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
