"""The text parts of a report's page: a run's key figures, and what was trained."""

from __future__ import annotations

from typing import Any

from daf.core.units import format_bytes
from daf.report.markup import Markup, element
from daf.report.run_charts import last_noise
from daf.report.runs import Record, Run
from daf.report.scale import number


def tiles(run: Run) -> Markup:
    """Return the run's key figures."""
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
    whose = run.whose_memory
    if budget is None:
        return format_bytes(peak), f"peak of {whose}; no budget was given"
    way = "spare" if peak <= budget else "too much"
    words = f"peak of {whose}; budget {format_bytes(budget)}, "
    return format_bytes(peak), f"{words}{format_bytes(abs(budget - peak))} {way}"


def facts(summary: Record) -> str:
    """Return one line on what was trained, and with what."""
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
