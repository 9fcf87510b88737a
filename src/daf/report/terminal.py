"""The report as text for a terminal or a log file: tables, bars and the plan's strip."""

from collections.abc import Sequence
from statistics import fmean

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from daf.core.units import format_bytes
from daf.report.comparison import COLUMNS, findings, row
from daf.report.run_charts import ADDED, last_bias, last_noise, waterfall
from daf.report.runs import Run
from daf.report.scale import number, thinned
from daf.report.treatments import COLOURS, strips_of, totals_by_method

_SPARKS = "▁▂▃▄▅▆▇█"
_LINE_WIDTH = 40
_BAR_WIDTH = 40


def show_report(runs: Sequence[Run], console: Console) -> None:
    """Print runs in full, after a comparison if there are several."""
    if len(runs) > 1:
        console.print(_comparison(runs))
    for run in runs:
        console.print(_one(run), highlight=False)


def spark(values: Sequence[float], low: float, high: float) -> str:
    """Return one block a value, in eight heights from ``low`` to ``high``."""
    width = high - low or 1.0
    top = len(_SPARKS) - 1
    shares = (min(max((value - low) / width, 0.0), 1.0) for value in values)
    return "".join(_SPARKS[round(share * top)] for share in shares)


def _comparison(runs: Sequence[Run]) -> RenderableType:
    table = Table(*COLUMNS[:1], *(run.name for run in runs), title="runs side by side")
    for line in list(zip(COLUMNS, *(row(run.name, run.summary) for run in runs), strict=True))[1:]:
        table.add_row(*line)
    return Group(table, *(Text(f"• {sentence}") for sentence in findings(runs)), Text())


def _one(run: Run) -> RenderableType:
    heading = Text(f"{run.name}: {run.title}", style="bold")
    problems = [Text(f"• {sentence}", style="yellow") for sentence in run.problems]
    return Group(
        heading, *problems, _lines(run), Text(), _account(run), Text(), *_plan(run), Text()
    )


def _lines(run: Run) -> Table:
    grid = Table.grid(padding=(0, 2))
    heights = [size for _, size in thinned(run.memory.points, max, _LINE_WIDTH)]
    most = max([*heights, (run.budget_bytes or 0) / 1e6])
    if heights:
        seconds = f"{run.memory.points[-1][0]:.0f} s"
        grid.add_row("memory", spark(heights, 0.0, most), f"0 to {most:,.0f} MB, {seconds}")
    curves = (("loss", "loss"), ("examples_per_s", "examples/s"), (ADDED, "noise of codes"))
    for key, name in curves:
        if points := run.points_of(key):
            values = [value for _, value in thinned(points, fmean, _LINE_WIDTH)]
            low, high = min(values), max(values)
            words = f"{number(low)} to {number(high)}, {len(points)} steps"
            grid.add_row(name, spark(values, low, high), words)
    if (noise := last_noise(run)) is not None:
        grid.add_row("", "", f"{noise:.3f} of the batch's own noise at the end")
    if (bias := last_bias(run)) is not None:
        grid.add_row("", "", f"{bias:.2%} of the gradient's square does not average out")
    return grid


def _account(run: Run) -> Table:
    grid = Table.grid(padding=(0, 2))
    bars = waterfall(run)
    most = max([bar.end_bytes for bar in bars] + [run.budget_bytes or 0]) or 1
    for bar in bars:
        start, end = sorted((bar.start_bytes, bar.end_bytes))
        first = round(_BAR_WIDTH * start / most)
        length = max(1, round(_BAR_WIDTH * end / most) - first)
        grid.add_row(bar.words, " " * first + "█" * length, format_bytes(bar.nbytes))
    if run.budget_bytes is not None:
        marker = "─" * max(0, round(_BAR_WIDTH * run.budget_bytes / most) - 1) + "│"
        grid.add_row("budget", marker, format_bytes(run.budget_bytes))
    return grid


def _plan(run: Run) -> list[RenderableType]:
    if not (strips := strips_of(run)):
        return [Text("the folder holds no whole sites.jsonl, which a run leaves at its end")]
    line = Text("plan, a block for every saved tensor: ")
    for strip in strips:
        for cell in strip.cells:
            line.append("█", style=COLOURS[cell.method][2])
    legend = Table.grid(padding=(0, 2))
    for method, (count, plain, held) in totals_by_method(strips).items():
        name, _, colour = COLOURS[method]
        sizes = f"{format_bytes(plain)} → {format_bytes(held)}"
        legend.add_row(Text("█", style=colour), name, f"{count} tensors", sizes)
    return [line, legend]
