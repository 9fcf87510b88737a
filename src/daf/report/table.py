"""A table on a report's page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from daf.report.markup import Markup, element


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Markup:
    """A table that scrolls by itself where the screen is narrow; a ``why`` or ``plan`` wraps."""
    wraps = [name in ("why", "plan") for name in header]
    return element(
        "div",
        element(
            "table",
            element(
                "thead",
                element(
                    "tr",
                    *(
                        element("th", name, scope="col", class_="words" if wrap else None)
                        for name, wrap in zip(header, wraps, strict=True)
                    ),
                ),
            ),
            element(
                "tbody",
                *(
                    element(
                        "tr",
                        *(
                            element("td", text, class_="words" if wrap else None)
                            for text, wrap in zip(row, wraps, strict=True)
                        ),
                    )
                    for row in rows
                ),
            ),
        ),
        class_="scroll",
        tabindex="0",
        role="region",
        aria_label="Table",
    )
