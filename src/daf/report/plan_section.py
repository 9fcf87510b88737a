"""The plan on a report's page: a coloured cell for every saved tensor, with its reason."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from daf.core.markup import Markup, element, joined, quiet, table
from daf.core.units import format_bytes
from daf.report.chart import legend_entry
from daf.report.comparison import LEVER_COLUMNS, lever_row
from daf.report.runs import Run
from daf.report.treatments import COLOURS, Cell, ModuleStrip, strips_of, totals_by_method


def plan_figure(run: Run) -> Markup:
    """Return a cell for every saved tensor: width by bytes, colour by treatment."""
    strips = strips_of(run)
    if not strips:
        return quiet("The folder holds no whole sites.jsonl, which a run leaves at its end.")
    most = max(strip.plain_bytes for strip in strips) or 1
    rows = [_strip_row(strip, most, strips[0].cells[0]) for strip in strips]
    count = sum(len(strip.cells) for strip in strips)
    return joined(
        element(
            "figure",
            element("figcaption", f"The plan: {count} saved tensors in {len(strips)} modules"),
            quiet(
                "A cell is as wide as what plain PyTorch would hold, coloured by what was done "
                "instead, and numbered with the bits an element. Arrow keys go from cell to cell."
            ),
            _plan_legend(strips),
            element(
                "div",
                quiet("Point at a cell, or reach it with the keyboard, to read why."),
                class_="detail",
                aria_live="polite",
            ),
            element("div", *rows, class_="strips", role="group", aria_label="The plan by module"),
        ),
        _plan_words(run),
        _left_alone(run),
        _site_table(strips),
    )


def _strip_row(strip: ModuleStrip, most: int, first: Cell) -> Markup:
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


def _cell(cell: Cell, most: int, *, focusable: bool) -> Markup:
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


def _plan_legend(strips: Sequence[ModuleStrip]) -> Markup:
    return element(
        "ul",
        *(
            legend_entry(
                f"{COLOURS[method][0]}: {count}, {format_bytes(plain)} → {format_bytes(held)}",
                f"treated {method.value}",
            )
            for method, (count, plain, held) in totals_by_method(strips).items()
        ),
        class_="legend",
    )


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
    """Return a table of the levers that were not pulled, and what each would have saved."""
    refused = (run.plan or {}).get("left_alone", ())
    if not refused:
        return joined()
    summary = element("summary", f"{len(refused)} levers left alone: nothing has proven them")
    return element("details", summary, table(LEVER_COLUMNS, map(lever_row, refused)))


def _site_table(strips: Iterable[ModuleStrip]) -> Markup:
    rows = [
        (cell.site, cell.treatment, *_sizes(cell), cell.reason)
        for strip in strips
        for cell in strip.cells
    ]
    header = ("saved tensor", "treatment", "plain", "held", "why")
    return element("details", element("summary", "The same as a table"), table(header, rows))


def _sizes(cell: Cell) -> tuple[str, str]:
    if not cell.plain_bytes:
        return "shared", "shared"
    return format_bytes(cell.plain_bytes), format_bytes(cell.held_bytes)
