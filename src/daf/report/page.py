"""One or several runs as one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources

from daf.report.comparison import COLUMNS, findings, row
from daf.report.markup import Markup, element, table
from daf.report.palette import style_sheet
from daf.report.plan_section import plan_figure
from daf.report.run_charts import (
    account_chart,
    losses_of_all,
    memory_chart,
    memory_of_all,
    training_charts,
)
from daf.report.runs import Run
from daf.report.sections import facts, tiles


def page(runs: Sequence[Run]) -> str:
    """Return the whole page of at least one run.

    Raises:
        ValueError: ``runs`` is empty.
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
    """Return a complete HTML document with the report's style and script inside."""
    files = resources.files("daf.report")
    style = (files / "page.css").read_text("utf-8") + style_sheet()
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
    """Return the page's headline sentence."""
    if len(runs) == 1:
        return runs[0].title
    names = [run.name for run in runs]
    return f"{', '.join(names[:-1])} and {names[-1]}: {len(runs)} runs side by side"


def comparison(runs: Sequence[Run]) -> Markup:
    """Return all runs in one table, in sentences, and in shared charts."""
    said = [element("li", sentence) for sentence in findings(runs)]
    return element(
        "section",
        table(COLUMNS, [row(run) for run in runs]),
        element("ul", *said, class_="findings"),
        memory_of_all(runs).html(),
        *(chart.html() for chart in losses_of_all(runs)),
        aria_label="Comparison",
    )


def run_section(run: Run, *, alone: bool) -> Markup:
    """Return one run's section, with its own heading unless ``alone``."""
    name = () if alone else (element("h2", f"{run.name}: {run.title}"),)
    return element(
        "section",
        *name,
        element("p", facts(run.summary), class_="facts"),
        tiles(run),
        memory_chart(run).html(),
        account_chart(run).html(),
        plan_figure(run),
        _training(run),
        aria_label=f"Run {run.name}",
    )


def _training(run: Run) -> Markup:
    charts = [chart.html() for chart in training_charts(run)]
    if not charts:
        return element("p", "Too few steps for curves.", class_="quiet")
    return element("div", *charts, class_="pair")
