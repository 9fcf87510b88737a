"""HTML and SVG as text: elements that escape their children, and tables."""

from collections.abc import Iterable, Sequence


class Markup(str):
    """Text that is already markup and is not escaped again."""

    __slots__ = ()


def _escaped(text: str) -> str:
    from html import escape  # half a megabyte, which a training process would hold unused

    return escape(text)


def element(tag: str, *children: str, **attributes: str | float | None) -> Markup:
    """Return ``<tag attributes>children</tag>``; children that are not :class:`Markup` are escaped.

    Attribute names lose a trailing underscore (``class_``); other underscores become dashes. An
    attribute of None is omitted; an empty one has no value.
    """
    written = "".join(
        f" {name.rstrip('_').replace('_', '-')}"
        + (f'="{_escaped(str(value))}"' if value != "" else "")
        for name, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{tag}{written}>{joined(*children)}</{tag}>")


def joined(*children: str) -> Markup:
    """Return the children concatenated, escaped where they are not markup."""
    return Markup(
        "".join(each if isinstance(each, Markup) else _escaped(each) for each in children)
    )


def quiet(text: str) -> Markup:
    """Return a paragraph in small grey letters."""
    return element("p", text, class_="quiet")


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Markup:
    """Return a table that scrolls on narrow screens; ``why`` and ``plan`` columns wrap."""
    classes = ["words" if name in ("why", "plan") else None for name in header]

    def cells(tag: str, texts: Sequence[str], **attributes: str) -> Markup:
        pairs = zip(texts, classes, strict=True)
        return element("tr", *(element(tag, text, **attributes, class_=c) for text, c in pairs))

    head = element("thead", cells("th", header, scope="col"))
    body = element("tbody", *(cells("td", row) for row in rows))
    names = {"class_": "scroll", "tabindex": "0", "role": "region", "aria_label": "Table"}
    return element("div", element("table", head, body), **names)
