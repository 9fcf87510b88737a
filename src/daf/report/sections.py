"""The parts of a report's page about one run: figures, memory, account, plan, training."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from daf.core.units import format_bytes
from daf.report.account import Bar, waterfall
from daf.report.chart import LevelLine, LineChart, Series, Shade
from daf.report.markup import Markup, element
from daf.report.memory_picture import has_moved, levels_of, whose_memory
from daf.report.noise import last_noise, noise_of, points_of
from daf.report.runs import Record, Run
from daf.report.scale import Point, number, thinned

_STYLES = {
    "floor": "floor",
    "measured peak": "memory",
    "predicted peak": "predicted",
    "budget": "budget",
}
_PHASES = {"profile": "measuring", "evaluate": "testing"}
_SMOOTHED_FROM_STEPS = 20


def tiles(run: Run) -> Markup:
    """The run in a few numbers."""
    summary = run.summary
    cells = [_peak_tile(run)]
    error = run.prediction_error
    if error is not None:
        size = format_bytes(summary["predicted_peak_bytes"])
        cells.append(
            (size, f"predicted before the first step: {100 * error:+.1f} % off, above the floor")
        )
    if run.saved_ratio is not None:
        words = (
            f"of what plain PyTorch saves for backward: {format_bytes(summary['saved_bytes_peak'])}"
        )
        cells.append((f"1/{run.saved_ratio:.1f}", words))
    if summary["step_ms_median"] is not None:
        rate = f"a step, median; {number(summary['examples_per_s'])} examples a second"
        cells.append((f"{summary['step_ms_median']:,.0f} ms", rate))
        cells.append((f"{summary['loss']:.4f}", "training loss, mean of the last steps"))
    noise = last_noise(run)
    if noise is not None:
        cells.append((f"{noise:.3f}", "noise that codes add to the gradient ÷ the batch's own"))
    if summary["metric"] is not None:
        name = str(summary["metric_name"]).replace("_percent", " (percent)").replace("_", " ")
        cells.append((f"{summary['metric']:.4g}", f"{name} at the end"))
    items = [element("li", element("b", big), element("span", small)) for big, small in cells]
    return element("ul", *items, class_="tiles")


def _peak_tile(run: Run) -> tuple[str, str]:
    peak, budget = run.summary["peak_bytes"], run.budget_bytes
    whose = whose_memory(run.summary)
    if budget is None:
        return format_bytes(peak), f"peak of {whose}; no budget was given"
    way = "spare" if peak <= budget else "too much"
    words = f"peak of {whose}; budget {format_bytes(budget)}, "
    return format_bytes(peak), f"{words}{format_bytes(abs(budget - peak))} {way}"


def memory_chart(run: Run) -> Markup:
    """Resident memory over time, against floor, peaks and the budget as it moved."""
    memory = run.memory
    points = list(zip(memory.seconds, memory.megabytes, strict=True))
    series = [
        Series(
            f"memory of {whose_memory(run.summary)}", thinned(points, max), "memory", filled=True
        )
    ]
    moved = has_moved(memory.budgets)
    if moved:
        series += _budget_pieces(memory.budgets, memory.seconds[-1])
    levels = [
        LevelLine(level.words, level.megabytes, _STYLES[level.words])
        for level in levels_of(run.summary)
        if not moved or level.words == "floor"
    ]
    title = "Memory over time, against the budget" if run.budget_bytes else "Memory over time"
    return LineChart(title, "seconds", "MB", series, levels, _shades(run)).html()


def _budget_pieces(budgets: Sequence[tuple[float, float | None]], end_s: float) -> list[Series]:
    """The budget as steps; a stretch without one is a gap between two lines."""
    pieces: list[list[Point]] = [[]]
    for at, size in budgets:
        if size is None:
            pieces[-1] += [(at, pieces[-1][-1][1])] if pieces[-1] else []
            pieces.append([])
        else:
            pieces[-1].append((at, size))
    if pieces[-1]:
        pieces[-1].append((end_s, pieces[-1][-1][1]))
    return [Series("budget", piece, "budget", stepped=True) for piece in pieces if piece]


def _shades(run: Run) -> list[Shade]:
    memory = run.memory
    ends = [at for at, _ in memory.marks[1:]] + [memory.seconds[-1]]
    return [
        Shade(_PHASES[label], start, end, label)
        for (start, label), end in zip(memory.marks, ends, strict=True)
        if label in _PHASES
    ]


def waterfall_figure(run: Run) -> Markup:
    """The account as bars, one on top of the other, on one scale with the budget."""
    bars = waterfall(run)
    most = max([bar.end_bytes for bar in bars] + [run.budget_bytes or 0]) * 1.02
    rows = [_bar_row(bar, most, run.budget_bytes) for bar in bars]
    key = (
        (
            element(
                "li",
                element("i", class_="swatch budget", aria_hidden="true"),
                f"budget {format_bytes(run.budget_bytes)}",
            ),
        )
        if run.budget_bytes
        else ()
    )
    return element(
        "figure",
        element("figcaption", "The account: what the peak is made of"),
        element("ol", *rows, class_="waterfall"),
        element("ul", *key, class_="legend"),
    )


def _bar_row(bar: Bar, most: float, budget_bytes: int | None) -> Markup:
    start, end = sorted((bar.start_bytes, bar.end_bytes))
    place = f"left:{100 * start / most:.2f}%;width:{100 * (end - start) / most:.2f}%"
    negative = " negative" if bar.nbytes < 0 else ""
    inside = [element("span", class_=f"bar {bar.kind}{negative}", style=place)]
    if budget_bytes is not None:
        inside.append(
            element("span", class_="limit", style=f"left:{100 * budget_bytes / most:.2f}%")
        )
    return element(
        "li",
        element("span", bar.words),
        element("span", *inside, class_="track", aria_hidden="true"),
        element("span", format_bytes(bar.nbytes), class_="size"),
        class_="total" if bar.kind in ("predicted", "measured") else None,
    )


def training_charts(run: Run) -> Markup:
    """Loss, throughput and, where it was logged, gradient noise, over steps."""
    if len(run.steps) < 2:
        return element("p", "Too few steps for curves.", class_="quiet")
    charts = [
        LineChart("Training loss", "step", "loss", curve(run, "loss", "memory"), low=None).html(),
        LineChart(
            "Throughput", "step", "examples a second", curve(run, "examples_per_s", "run-2")
        ).html(),
    ]
    return element("div", *charts, *noise_chart(run), class_="pair")


def noise_chart(run: Run) -> list[Markup]:
    """The gradient's noise that codes add, beside the batch's own; nothing if not measured."""
    styles = ("memory", "budget")
    series = [
        Series(name, thinned(points, fmean), style)
        for (name, points), style in zip(noise_of(run).items(), styles, strict=False)
    ]
    if not series:
        return []
    title = "Gradient noise: what codes add, beside the batch's own"
    return [LineChart(title, "step", "variance", series).html()]


def curve(run: Run, key: str, style: str, name: str | None = None) -> list[Series]:
    """A quantity over steps; where there are many, faint as it was and plain as a running mean."""
    points = points_of(run, key)
    if not points:
        return []
    title = name or key.replace("_", " ").replace(" per s", " a second")
    if len(points) < _SMOOTHED_FROM_STEPS:
        return [Series(title, points, style)]
    window = max(5, len(points) // 20)
    smooth = [
        (x, fmean(value for _, value in points[max(0, index + 1 - window) : index + 1]))
        for index, (x, _) in enumerate(points)
    ]
    return [
        Series(f"{title}, each step", thinned(points, fmean), f"faint {style}"),
        Series(f"{title}, mean of {window}", thinned(smooth, fmean), style),
    ]


def facts(summary: Record) -> str:
    """What was trained, with what, in a line."""
    data = str(summary["data"])
    kind, _, place = data.partition(":")
    named: dict[str, Any] = {
        "data": f"{kind} ({place.rpartition('/')[2]})" if place else kind,
        "batch": summary["batch_size"],
        "steps": summary["steps"],
        "optimizer": summary["optimizer"],
        "seed": summary["seed"],
        "threads": summary["threads"],
    }
    versions = ", ".join(f"{name} {version}" for name, version in summary["versions"].items())
    told = " · ".join(f"{name} {value}" for name, value in named.items())
    return f"{summary['model']}, {summary['parameters']:,} parameters · {told} · {versions}"
