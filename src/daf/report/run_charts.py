"""The charts of one run, or of several together, as values for the page and the PNG."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from daf.core.notebook import ACCOUNT_TERMS
from daf.report.chart import Bar, BarChart, LevelLine, LineChart, Series, Shade
from daf.report.runs import Budgets, Run
from daf.report.scale import Point, thinned
from daf.report.treatments import COLOURS, strips_of, totals_by_method

ADDED, OWN = "added_variance", "batch_variance"  # variances of the gradient: squared lengths
_NOISE_STYLES = {"the batch's own": (OWN, "memory"), "added by codes": (ADDED, "budget")}
_LEVELS = (  # (key in the summary, name, style)
    ("floor_bytes", "floor", "floor"),
    ("peak_bytes", "measured peak", "memory"),
    ("predicted_peak_bytes", "predicted peak", "predicted"),
    ("budget_bytes", "budget", "budget"),
)
_PHASES = {"profile": "measuring", "evaluate": "testing"}
_BY_MOMENT = (  # (key in the plan, name, style, whether filled)
    ("plain", "plain PyTorch", "floor", False),
    ("held", "this plan", "memory", True),
    ("again", "of it computed again", "run-1", True),
)
_SMOOTHED_FROM_STEPS = 20
_STYLES_OF_RUNS = 6
_MB = 1e6


def charts_of(runs: Sequence[Run]) -> list[LineChart | BarChart]:
    """Return every chart of one picture of the runs, in the page's order."""
    if len(runs) > 1:
        return [*memory_of_all(runs), *peaks_and_steps(runs), *losses_of_all(runs)]
    return [
        *memory_charts(runs[0]),
        account_chart(runs[0]),
        *moments_chart(runs[0]),
        *treatment_chart(runs[0]),
        *training_charts(runs[0]),
    ]


def memory_charts(run: Run) -> list[LineChart]:
    """Return memory over time, with floor, peaks and the budget; empty without samples."""
    memory = run.memory
    if not memory.points:
        return []
    series = [
        Series(f"memory of {run.whose_memory}", thinned(memory.points, max), "memory", filled=True)
    ]
    levels = levels_of(run.summary)
    if memory.budget_moved:  # peaks under earlier budgets do not compare with the last budget
        series += _budget_series(memory.budgets, memory.points[-1][0])
        levels = [level for level in levels if level.name == "floor"]
    title = "Memory over time, against the budget" if run.budget_bytes else "Memory over time"
    return [LineChart(title, "seconds", "MB", series, levels, _shades(run))]


def levels_of(summary: Mapping[str, Any]) -> list[LevelLine]:
    """Return the levels that a run has (MB), lowest first."""
    known = (each for each in _LEVELS if summary.get(each[0]) is not None)
    found = [LevelLine(name, summary[key] / _MB, style) for key, name, style in known]
    return sorted(found, key=lambda level: level.value)


def _budget_series(budgets: Budgets, end_s: float) -> list[Series]:
    """Return the budget as stepped lines; a stretch without a budget is a gap."""
    stretches: list[list[Point]] = [[]]
    for at, size in budgets:
        if size is None:
            stretches[-1] += [(at, stretches[-1][-1][1])] if stretches[-1] else []
            stretches.append([])
        else:
            stretches[-1].append((at, size))
    if stretches[-1]:
        stretches[-1].append((end_s, stretches[-1][-1][1]))
    return [Series("budget", each, "budget", stepped=True) for each in stretches if each]


def _shades(run: Run) -> list[Shade]:
    memory = run.memory
    ends = [at for at, _ in memory.marks[1:]] + [memory.points[-1][0]]
    return [
        Shade(_PHASES[label], start, end, label)
        for (start, label), end in zip(memory.marks, ends, strict=False)  # damage: no marks
        if label in _PHASES
    ]


def account_chart(run: Run) -> BarChart:
    """Return the terms of the peak, stacked, on one scale with the budget."""
    return BarChart("The account: what the peak is made of", waterfall(run), run.budget_bytes)


def waterfall(run: Run) -> list[Bar]:
    """Return the predicted terms stacked, then the predicted (if any) and the measured peak."""
    account = (run.plan or {}).get("account") or {"floor": run.summary["floor_bytes"] or 0}
    bars, level = [], 0
    for name, nbytes in account.items():
        if name != "predicted_peak":
            kind = "floor" if name == "floor" else "term"
            bars.append(
                Bar(ACCOUNT_TERMS.get(name, name.replace("_", " ")), kind, level, level + nbytes)
            )
            level += nbytes
    if predicted := run.summary["predicted_peak_bytes"]:
        bars.append(Bar("predicted before step 1", "predicted", 0, predicted))
    return [*bars, Bar("measured peak", "measured", 0, run.summary["peak_bytes"] or 0)]


def moments_chart(run: Run) -> list[LineChart]:
    """Return what a micro-batch holds for backward, moment by moment; empty without a plan's."""
    plan = run.plan or {}
    rows = plan.get("saved_by_moment") or {}
    if not rows.get("held"):
        return []
    series = [
        Series(name, [(at, size / _MB) for at, size in enumerate(rows[key])], style, filled, True)
        for key, name, style, filled in _BY_MOMENT
    ]
    forward, count = plan["forward_moments"], len(rows["held"])
    shades = [
        Shade("forward", 0, forward, "evaluate"),
        Shade("backward", forward, count, "profile"),
    ]
    title = "Held for backward in a micro-batch, as planned"
    return [LineChart(title, "moment", "MB", series, (), shades)]


def treatment_chart(run: Run) -> list[BarChart]:
    """Return saved bytes by treatment; empty without records of the plan."""
    bars = [
        Bar(COLOURS[method][0], method.value, 0, held)
        for method, (_, _, held) in totals_by_method(strips_of(run)).items()
    ]
    return [BarChart("Saved for backward, by treatment", bars)] if bars else []


def training_charts(run: Run) -> list[LineChart]:
    """Return loss, throughput and measured gradient noise; empty below two steps."""
    if len(run.steps) < 2:
        return []
    rates = curve(run, "examples_per_s", "run-2")
    return [
        LineChart("Training loss", "step", "loss", curve(run, "loss", "memory"), low=None),
        LineChart("Throughput", "step", "examples a second", rates),
        *noise_chart(run),
    ]


def noise_chart(run: Run) -> list[LineChart]:
    """Return the codes' gradient noise and the batch's own; empty unless both are known."""
    series = [
        Series(name, thinned(run.points_of(key), fmean), style)
        for name, (key, style) in _NOISE_STYLES.items()
    ]
    if any(len(each.points) < 2 for each in series):
        return []
    title = "Gradient noise: what codes add, beside the batch's own"
    return [LineChart(title, "step", "variance", series)]


def last_noise(run: Run) -> float | None:
    """Return the last measured added variance ÷ the batch's own; None if not measured."""
    added, own = run.points_of(ADDED), run.points_of(OWN)
    return added[-1][1] / own[-1][1] if added and own and own[-1][1] else None


def last_bias(run: Run) -> float | None:
    """Return codes' last squared bias ÷ the gradient's square; None if not measured."""
    found = run.points_of("squared_bias")
    return found[-1][1] if found else None


def curve(run: Run, key: str, style: str, name: str | None = None) -> list[Series]:
    """Return a quantity over steps; a long one as a faint line and its running mean."""
    if not (points := run.points_of(key)):
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


def memory_of_all(runs: Sequence[Run]) -> list[LineChart]:
    """Return memory over time, a line for each run with samples; empty if there is none."""
    series = [
        Series(run.name, thinned(run.memory.points, max), style)
        for run, style in _styled(runs)
        if run.memory.points
    ]
    return [LineChart("Memory over time", "seconds", "MB", series)] if series else []


def losses_of_all(runs: Sequence[Run]) -> list[LineChart]:
    """Return training losses, a line for each run of two steps or more; empty if there is none."""
    series = [
        each
        for run, style in _styled(runs)
        if len(run.steps) > 1
        for each in curve(run, "loss", style, run.name)[-1:]
    ]
    return [LineChart("Training loss", "step", "loss", series, low=None)] if series else []


def peaks_and_steps(runs: Sequence[Run]) -> list[BarChart]:
    """Return bars for each run's peak above the floor and median step."""
    peaks = [Bar(run.name, style, 0, run.above_floor_bytes or 0) for run, style in _styled(runs)]
    steps = [
        Bar(run.name, style, 0, round(run.summary["step_ms_median"] or 0))
        for run, style in _styled(runs)
    ]
    return [BarChart("Peak above the floor", peaks), BarChart("A step, median", steps, unit="ms")]


def _styled(runs: Sequence[Run]) -> list[tuple[Run, str]]:
    return [(run, f"run-{index % _STYLES_OF_RUNS}") for index, run in enumerate(runs)]
