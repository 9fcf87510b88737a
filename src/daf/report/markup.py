"""HTML and SVG as text: one function that makes an element and escapes what is not markup."""

from __future__ import annotations

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
