"""What notebooks show in place of text: cards with a memory bar, as HTML without style sheets.

Sizes stand beside the bar in words, and colours are readable on light and dark backgrounds.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from daf.core.markup import Markup, element, joined
from daf.core.units import format_bytes

ACCOUNT_TERMS = {  # of ``Plan.account``, in its order
    "floor": "floor: Python, libraries, data",
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer_state": "optimizer state",
    "saved": "saved for backward",
    "beside_the_model": "buffers and the like",
    "transient": "transient",
    "margin": "margin for what is not foreseen",
}
_SUM = "predicted_peak"  # of the others
_COLOURS = ("#7d8894", "#2f78b7", "#c2630c", "#8457b5", "#2c8a4b", "#a9803a", "#b84a78", "#98a4b0")
_BUDGET = "#d0392b"
_CARD = "max-width:46em;padding:.7em 1em;border:1px solid #8886;border-radius:.5em;line-height:1.45"
_BAR = "position:relative;display:flex;height:1.1em;margin:.5em 0;background:#8883"
_LEGEND = "display:flex;flex-wrap:wrap;gap:.1em 1.2em;margin:.2em 0 .5em;font-size:.9em"
_SWATCH = "display:inline-block;width:.8em;height:.8em;margin-right:.4em;background:{}"
_ROW = "display:flex;flex-wrap:wrap;gap:0 1em"
_NAME, _VALUE = "min-width:11em;opacity:.75", "flex:1;min-width:14em"
_MARK = f"position:absolute;top:-.25em;bottom:-.25em;width:2px;background:{_BUDGET};left:{{}}"

Say = Callable[[str], None]


class Part(NamedTuple):
    """A named part of a memory bar."""

    name: str
    nbytes: int


def parts_of(account: Mapping[str, int]) -> list[Part]:
    """Return the terms of a plan's account that hold anything, in words."""
    return [
        Part(ACCOUNT_TERMS.get(name, name.replace("_", " ")), nbytes)
        for name, nbytes in account.items()
        if nbytes > 0 and name != _SUM
    ]


def memory_bar(parts: Sequence[Part], budget_bytes: int | None = None) -> Markup:
    """Return parts side by side on one scale, the budget as a line, and all of them in words."""
    whole = max(sum(part.nbytes for part in parts), budget_bytes or 0, 1)
    colours = [_COLOURS[index % len(_COLOURS)] for index in range(len(parts))]
    pieces = [
        element("span", style=f"width:{100 * part.nbytes / whole:.3f}%;background:{colour}")
        for part, colour in zip(parts, colours, strict=True)
    ]
    named = [*parts]
    if budget_bytes:
        at = f"calc({100 * budget_bytes / whole:.3f}% - 2px)"
        pieces.append(element("span", style=_MARK.format(at)))
        named.append(Part("budget", budget_bytes))
        colours.append(_BUDGET)
    texts = [f"{part.name} {format_bytes(part.nbytes)}" for part in named]
    swatches = [element("span", style=_SWATCH.format(colour)) for colour in colours]
    legend = [element("span", *each) for each in zip(swatches, texts, strict=True)]
    bar = element("div", *pieces, style=_BAR, role="img", aria_label="; ".join(texts))
    return joined(bar, element("div", *legend, style=_LEGEND))


def facts(known: Mapping[str, object]) -> Markup:
    """Return names with values, those of None left out."""
    rows = [
        (element("span", name, style=_NAME), element("span", str(value), style=_VALUE))
        for name, value in known.items()
        if value is not None
    ]
    return joined(*(element("div", *row, style=_ROW) for row in rows))


def folded(summary: str, lines: Sequence[str]) -> Markup:
    """Return lines that open on a click; nothing where there are none."""
    if not lines:
        return joined()
    items = element("ul", *(element("li", line) for line in lines), style="margin:.3em 0")
    return element("details", element("summary", summary), items)


def card(title: str, *parts: Markup) -> str:
    """Return the whole of what a notebook shows for one object."""
    return element("div", element("strong", title), *parts, style=_CARD)


def optional_bytes(count: int | None) -> str | None:
    """Return a size in words; None stays None."""
    return None if count is None else format_bytes(count)


@contextmanager
def progress_shown(told: Say | None = None) -> Iterator[Say]:
    """Tell what goes on to ``told``, else to a notebook's cell, each line in place of another."""
    ipython: Any = sys.modules.get("IPython")
    if told or not ipython or not hasattr(ipython.get_ipython(), "kernel"):  # or on a terminal
        yield told or (lambda _: None)
        return
    first = {"text/plain": "DAF begins to measure"}
    handle = ipython.display.display(first, raw=True, display_id=True)
    yield lambda what: handle.update({"text/plain": f"DAF measures {what}"}, raw=True)
    handle.update({"text/plain": "DAF has measured"}, raw=True)
