"""One or several runs as one self-contained HTML file."""

from collections.abc import Iterable, Sequence
from importlib import resources
from typing import Any

from daf.core.markup import Markup, element, joined, quiet, table
from daf.core.units import format_bytes
from daf.report import run_charts, treatments
from daf.report.chart import legend_entry
from daf.report.comparison import COLUMNS, LEVER_COLUMNS, findings, lever_row, row
from daf.report.runs import Record, Run
from daf.report.scale import number


def page(runs: Sequence[Run]) -> str:
    """Return the whole page of at least one run; raises ValueError if ``runs`` is empty."""
    if not runs:
        raise ValueError("a report needs at least one run")
    many = len(runs) > 1
    *names, last = (run.name for run in runs)
    side_by_side = f"{', '.join(names)} and {last}: {len(runs)} runs side by side"
    heading = side_by_side if many else runs[0].title
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
    style = (files / "page.css").read_text("utf-8") + treatments.style_sheet()
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


def comparison(runs: Sequence[Run]) -> Markup:
    """Return all runs in one table, in sentences, and in shared charts."""
    said = [element("li", sentence) for sentence in findings(runs)]
    return element(
        "section",
        table(COLUMNS, [row(run.name, run.summary) for run in runs]),
        element("ul", *said, class_="findings"),
        *(chart.html() for chart in run_charts.memory_of_all(runs)),
        *(chart.html() for chart in run_charts.losses_of_all(runs)),
        aria_label="Comparison",
    )


def run_section(run: Run, *, alone: bool) -> Markup:
    """Return one run's section, with its own heading unless ``alone``."""
    name = () if alone else (element("h2", f"{run.name}: {run.title}"),)
    return element(
        "section",
        *name,
        element("p", _facts(run.summary), class_="facts"),
        _problems(run),
        _tiles(run),
        *(chart.html() for chart in run_charts.memory_charts(run)),
        run_charts.account_chart(run).html(),
        *(chart.html() for chart in run_charts.moments_chart(run)),
        plan_figure(run),
        _training(run),
        aria_label=f"Run {run.name}",
    )


def _problems(run: Run) -> Markup:
    if not run.problems:
        return joined()
    items = [element("li", sentence) for sentence in run.problems]
    return joined(quiet("What is missing or damaged:"), element("ul", *items, class_="findings"))


def _training(run: Run) -> Markup:
    if not (charts := [chart.html() for chart in run_charts.training_charts(run)]):
        return quiet("Too few steps for curves.")
    return element("div", *charts, class_="pair")


def _tiles(run: Run) -> Markup:
    summary, cells = run.summary, [_peak_tile(run)]
    if (error := run.prediction_error) is not None:
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
    if summary["loss"] is not None:
        cells.append((f"{summary['loss']:.4f}", "training loss, mean of the last steps"))
    if (noise := run_charts.last_noise(run)) is not None:
        cells.append((f"{noise:.3f}", "noise that codes add to the gradient ÷ the batch's own"))
    if (bias := run_charts.last_bias(run)) is not None:
        words = "of the gradient's square are errors of codes that do not average out"
        cells.append((f"{bias:.2%}", words))
    if summary["metric"] is not None:
        name = str(summary["metric_name"]).replace("_percent", " (percent)").replace("_", " ")
        cells.append((f"{summary['metric']:.4g}", f"{name} at the end"))
    items = [element("li", element("b", big), element("span", small)) for big, small in cells]
    return element("ul", *items, class_="tiles")


def _peak_tile(run: Run) -> tuple[str, str]:
    peak, budget = run.summary["peak_bytes"], run.budget_bytes
    whose = run.whose_memory
    if peak is None:
        return "unknown", f"peak of {whose}"
    if budget is None:
        return format_bytes(peak), f"peak of {whose}; no budget was given"
    way = "spare" if peak <= budget else "too much"
    words = f"peak of {whose}; budget {format_bytes(budget)}, "
    return format_bytes(peak), f"{words}{format_bytes(abs(budget - peak))} {way}"


def _facts(summary: Record) -> str:
    kind, _, place = str(summary["data"]).partition(":")
    named: dict[str, Any] = {
        "data": f"{kind} ({place.rpartition('/')[2]})" if place else kind,
        "batch": summary["batch_size"],
        "steps": summary["steps"],
        "optimizer": summary["optimizer"],
        "seed": summary["seed"],
        "threads": summary["threads"],
    }
    versions = [f"{name} {version}" for name, version in (summary["versions"] or {}).items()]
    listed = [f"{name} {value}" for name, value in named.items() if value is not None]
    size = summary["parameters"]
    model = str(summary["model"]) + ("" if size is None else f", {size:,} parameters")
    return " · ".join([model, *listed, ", ".join(versions)]).removesuffix(" · ")


def plan_figure(run: Run) -> Markup:
    """Return a cell for every saved tensor: width by bytes, colour by treatment."""
    if not (strips := treatments.strips_of(run)):
        return quiet("The folder holds no whole sites.jsonl, which a run leaves at its end.")
    most = max(strip.plain_bytes for strip in strips) or 1
    rows = [_strip_row(strip, most, strips[0].cells[0]) for strip in strips]
    count = sum(len(strip.cells) for strip in strips)
    detail = quiet("Point at a cell, or reach it with the keyboard, to read why.")
    figure = element(
        "figure",
        element("figcaption", f"The plan: {count} saved tensors in {len(strips)} modules"),
        quiet(
            "A cell is as wide as what plain PyTorch would hold, coloured by what was done "
            "instead, and numbered with the bits an element. Arrow keys go from cell to cell."
        ),
        _plan_legend(strips),
        element("div", detail, class_="detail", aria_live="polite"),
        element("div", *rows, class_="strips", role="group", aria_label="The plan by module"),
    )
    return joined(figure, _plan_words(run), _left_alone(run), _site_table(strips))


def _strip_row(strip: treatments.ModuleStrip, most: int, first: treatments.Cell) -> Markup:
    cells = [_cell(cell, most, focusable=cell is first) for cell in strip.cells]
    sizes = f"{format_bytes(strip.plain_bytes)} → {format_bytes(strip.held_bytes)}"
    name = element("bdi", strip.module or "<model>")
    return element(
        "div",
        element("span", name, class_="module", title=strip.module),
        element("div", *cells, class_="cells", role="list"),
        element("span", sizes if strip.plain_bytes else "shared", class_="sizes"),
        class_="strip",
    )


def _cell(cell: treatments.Cell, most: int, *, focusable: bool) -> Markup:
    share = 100 * cell.plain_bytes / most
    return element(
        "span",
        str(cell.bits) if cell.bits and share > 3 else "",
        class_=f"cell {cell.method.value}" + ("" if cell.plain_bytes else " shared"),
        style=f"width:calc({share:.3f}% - 9px)",
        role="listitem",
        tabindex="0" if focusable else "-1",
        aria_label=f"{cell.site}: {cell.treatment}; {cell.sizes}; {cell.reason}",
        data_site=cell.site,
        data_treatment=cell.treatment,
        data_sizes=cell.sizes,
        data_reason=cell.reason,
    )


def _plan_legend(strips: Sequence[treatments.ModuleStrip]) -> Markup:
    entries = []
    for method, (count, plain, held) in treatments.totals_by_method(strips).items():
        sizes = f"{format_bytes(plain)} → {format_bytes(held)}"
        words = f"{treatments.COLOURS[method][0]}: {count}, {sizes}"
        entries.append(legend_entry(words, f"treated {method.value}"))
    return element("ul", *entries, class_="legend")


def _plan_words(run: Run) -> Markup:
    plan = run.plan or {}
    lines = [element("li", str(line)) for line in plan.get("choices", ())]
    names = ", ".join(plan.get("replayed", ()))
    replayed = element("p", f"Replayed in backward, nothing inside held: {names}.") if names else ""
    reason = element("p", f"The planner's reason: {plan['reason']}.") if plan.get("reason") else ""
    if not lines:
        return joined(reason, replayed)
    summary = element("summary", f"The planner's {len(lines)} choices")
    return joined(
        reason, replayed, element("details", summary, element("ul", *lines, class_="findings"))
    )


def _left_alone(run: Run) -> Markup:
    if not (refused := (run.plan or {}).get("left_alone", ())):
        return joined()
    summary = element("summary", f"{len(refused)} levers left alone: nothing has proven them")
    return element("details", summary, table(LEVER_COLUMNS, map(lever_row, refused)))


def _site_table(strips: Iterable[treatments.ModuleStrip]) -> Markup:
    rows = []
    for cell in (each for strip in strips for each in strip.cells):
        both = [format_bytes(size) for size in (cell.plain_bytes, cell.held_bytes)]
        sizes = both if cell.plain_bytes else ["shared", "shared"]
        rows.append((cell.site, cell.treatment, *sizes, cell.reason))
    header = ("saved tensor", "treatment", "plain", "held", "why")
    return element("details", element("summary", "The same as a table"), table(header, rows))
