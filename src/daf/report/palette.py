"""Colours by style for light and dark backgrounds: the page's and the PNG's."""

from __future__ import annotations

from collections.abc import Mapping

from daf.report.treatments import COLOURS

INK, QUIET, RULE = "#22303c", "#6d7a86", "#dfe4e8"  # of the PNG; page.css has the page's

STYLES: Mapping[str, tuple[str, str]] = {  # of data outside the plan: (light, dark)
    "memory": ("#2a78b8", "#5aa6e6"),
    "measured": ("#2a78b8", "#5aa6e6"),
    "budget": ("#c0392b", "#ff7b6b"),
    "predicted": ("#b26a00", "#e9a83f"),
    "floor": ("#6d7a86", "#93a1ae"),
    "term": ("#7fa6c9", "#4c7ba5"),
    "profile": ("#f3ecd9", "#2c2819"),
    "evaluate": ("#e6edf4", "#1e2a36"),
    "run-0": ("#2a78b8", "#5aa6e6"),
    "run-1": ("#c2570c", "#f0955a"),
    "run-2": ("#1a7f5a", "#4fc496"),
    "run-3": ("#8b3fa8", "#c98be0"),
    "run-4": ("#9a7400", "#dcb53c"),
    "run-5": ("#c2477f", "#ee7fb0"),
}


def style_sheet() -> str:
    """Return CSS: a variable and a class for each style, a background for each treatment."""
    classes = "".join(f".{name}{{color:var(--{name})}}" for name in STYLES)
    dark = f"{_rules(1)}.cell{{color:#12171c}}"
    return f"{_rules(0)}@media (prefers-color-scheme: dark){{{dark}}}{classes}"


def _rules(shade: int) -> str:
    variables = "".join(f"--{name}:{colours[shade]};" for name, colours in STYLES.items())
    backgrounds = "".join(
        f".cell.{method.value},.swatch.treated.{method.value}{{background:{colours[shade]}}}"
        for method, (_, *colours) in COLOURS.items()
    )
    return f":root{{{variables}}}{backgrounds}"
