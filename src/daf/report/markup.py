"""HTML and SVG as text: elements that escape what is not markup, and tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


class Markup(str):
    """Text that is markup already, and is not escaped again."""

    __slots__ = ()


def element(tag: str, *children: str, **attributes: str | float | None) -> Markup:
    """``<tag attributes>children</tag>``.

    A trailing underscore of an attribute's name is dropped (``class_``), the
    others become dashes; an attribute that is None is left out, one that is
    empty stands alone. Children that are not :class:`Markup` are escaped.
    """
    written = "".join(
        f" {name.rstrip('_').replace('_', '-')}"
        + (f'="{escape(str(value))}"' if value != "" else "")
        for name, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{tag}{written}>{joined(*children)}</{tag}>")


def joined(*children: str) -> Markup:
    """Children one after the other, escaped where they are not markup."""
    return Markup(
        "".join(child if isinstance(child, Markup) else escape(child) for child in children)
    )


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Markup:
    """A table that scrolls by itself where the screen is narrow; a ``why`` or ``plan`` wraps."""
    classes = ["words" if name in ("why", "plan") else None for name in header]

    def cells(tag: str, texts: Sequence[str], **attributes: str) -> Markup:
        pairs = zip(texts, classes, strict=True)
        return element("tr", *(element(tag, text, **attributes, class_=c) for text, c in pairs))

    return element(
        "div",
        element(
            "table",
            element("thead", cells("th", header, scope="col")),
            element("tbody", *(cells("td", row) for row in rows)),
        ),
        class_="scroll",
        tabindex="0",
        role="region",
        aria_label="Table",
    )
