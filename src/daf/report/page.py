"""One or several runs as one HTML file that needs nothing else, not even a network."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources

from daf.report.chart import LineChart, Series
from daf.report.comparison import COLUMNS, findings, row
from daf.report.markup import Markup, element
from daf.report.memory_picture import title
from daf.report.plan_section import plan_figure, treatment_style
from daf.report.runs import Run
from daf.report.scale import thinned
from daf.report.sections import (
    curve,
    facts,
    memory_chart,
    tiles,
    training_charts,
    waterfall_figure,
)
from daf.report.table import table

_COLOURS_OF_RUNS = 6


def page(runs: Sequence[Run]) -> str:
    """The whole page, as text.

    Raises:
        ValueError: there is no run.
    """
    if not runs:
        raise ValueError("a report needs at least one run")
    heading = headline(runs)
    many = len(runs) > 1
    body = element(
        "main",
        element("h1", heading),
        *((comparison(runs),) if many else ()),
        *(run_section(run, alone=not many) for run in runs),
        element(
            "footer",
            "Bytes are those of the whole process, or of PyTorch on a device where one is named: "
            "MB = 10⁶. Written by `daf report`.",
        ),
        id="report",
    )
    return document(heading, body)


def document(heading: str, body: Markup) -> str:
    """A complete HTML document with the report's style and script inside it."""
    files = resources.files("daf.report")
    style = (files / "page.css").read_text("utf-8") + treatment_style()
    head = element(
        "head",
        Markup('<meta charset="utf-8">'),
        Markup('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        Markup('<link rel="icon" href="data:,">'),
        element("title", heading),
        element("style", Markup(style)),
    )
    script = element("script", Markup((files / "page.js").read_text("utf-8")))
    skip = element("a", "Skip to the report", class_="skip", href="#report")
    return "<!doctype html>\n" + element(
        "html", head, element("body", skip, body, script), lang="en"
    )


def headline(runs: Sequence[Run]) -> str:
    """What the page says, in a sentence."""
    if len(runs) == 1:
        return title(runs[0].summary, runs[0].memory.budgets)
    names = [run.name for run in runs]
    return f"{', '.join(names[:-1])} and {names[-1]}: {len(runs)} runs side by side"


def comparison(runs: Sequence[Run]) -> Markup:
    """All runs in one table, in sentences, and in the same charts."""
    said = [element("li", sentence) for sentence in findings(runs)]
    return element(
        "section",
        table(COLUMNS, [row(run) for run in runs]),
        element("ul", *said, class_="findings"),
        _memory_of_all(runs),
        _losses_of_all(runs),
        aria_label="Comparison",
    )


def _memory_of_all(runs: Sequence[Run]) -> Markup:
    series = [
        Series(
            run.name,
            thinned(list(zip(run.memory.seconds, run.memory.megabytes, strict=True)), max),
            style,
        )
        for run, style in _styled(runs)
    ]
    return LineChart("Memory over time", "seconds", "MB", series).html()


def _losses_of_all(runs: Sequence[Run]) -> Markup:
    series = [
        each
        for run, style in _styled(runs)
        if len(run.steps) > 1
        for each in curve(run, "loss", style, run.name)[-1:]
    ]
    if not series:
        return Markup("")
    return LineChart("Training loss", "step", "loss", series, low=None).html()


def _styled(runs: Sequence[Run]) -> list[tuple[Run, str]]:
    return [(run, f"run-{index % _COLOURS_OF_RUNS}") for index, run in enumerate(runs)]


def run_section(run: Run, *, alone: bool) -> Markup:
    """Everything about one run; with a heading of its own where there are several."""
    name = (
        () if alone else (element("h2", f"{run.name}: {title(run.summary, run.memory.budgets)}"),)
    )
    return element(
        "section",
        *name,
        element("p", facts(run.summary), class_="facts"),
        tiles(run),
        memory_chart(run),
        waterfall_figure(run),
        plan_figure(run),
        training_charts(run),
        aria_label=f"Run {run.name}",
    )
