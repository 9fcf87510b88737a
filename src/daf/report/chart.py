"""Charts as values that render themselves as HTML; ``picture`` renders the same values as a PNG.

A line chart's plot is an SVG square of 1000 units that the page stretches. Ticks and names are HTML
beside it, so they stay readable on a phone.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from daf.core.markup import Markup, element
from daf.core.units import format_bytes
from daf.report.scale import Point, number, spread, ticks

_UNITS = 1000.0
_NAMED_FROM = 0.2  # share of the chart's width


@dataclass(frozen=True, slots=True)
class Series:
    """A line, its CSS class, and whether the area below it is filled."""

    name: str
    points: Sequence[Point]
    style: str
    filled: bool = False
    stepped: bool = False

    def corners(self) -> list[Point]:
        """Return the line's vertices; a stepped line holds each height until the next point."""
        points = list(self.points)
        if not self.stepped:
            return points
        return [
            corner
            for (x, y), (next_x, _) in zip(points, [*points[1:], points[-1]], strict=True)
            for corner in ((x, y), (next_x, y))
        ]


@dataclass(frozen=True, slots=True)
class LevelLine:
    """A named horizontal line, such as a budget."""

    name: str
    value: float
    style: str


@dataclass(frozen=True, slots=True)
class Shade:
    """A named interval of the x axis."""

    name: str
    start: float
    end: float
    style: str


@dataclass(frozen=True, slots=True)
class LineChart:
    """A line chart; ``low`` is where the y axis begins (None: just below the least value)."""

    title: str
    x_name: str
    y_name: str
    series: Sequence[Series]
    levels: Sequence[LevelLine] = ()
    shades: Sequence[Shade] = ()
    low: float | None = 0.0

    @property
    def x_range(self) -> tuple[float, float]:
        """The least and the greatest x."""
        places = [x for each in self.series for x, _ in each.points]
        return min(places), max(places)

    @property
    def y_range(self) -> tuple[float, float]:
        """From ``low`` to 8 % above the greatest y."""
        values = [y for each in self.series for _, y in each.points]
        values += [level.value for level in self.levels]
        least, most = min(values), max(values)
        margin = 0.08 * (most - least) or 0.08 * abs(most) or 1.0
        return (least - margin if self.low is None else self.low), most + margin

    def named_shades(self) -> list[Shade]:
        """Return the shades wide enough for their names."""
        low, high = self.x_range
        return [each for each in self.shades if each.end - each.start > _NAMED_FROM * (high - low)]

    def placed_levels(self, top: float = 1.0) -> list[tuple[LevelLine, float]]:
        """Return levels, lowest first, and their names' places (shares); ``top`` scales gaps."""
        rising = sorted(self.levels, key=lambda level: level.value)
        places = spread([self._up(level.value) for level in rising], top)
        return list(zip(rising, places, strict=True))

    def words_of(self, level: LevelLine) -> str:
        """Return a level's name with its value."""
        return f"{level.name} {level.value:,.0f} {self.y_name}"

    def html(self) -> Markup:
        """Return the chart as HTML, its points embedded as JSON for the page's cursor script."""
        return element(
            "figure",
            element("figcaption", self.title),
            self._frame(),
            self._legend(),
            element("p", Markup("&nbsp;"), class_="readout", aria_live="polite"),
            element("script", Markup(self._data()), type="application/json"),
            class_="chart",
            tabindex="0",
            role="group",
            aria_label=f"{self.title}. {self._summary()} Arrow keys move along the line.",
        )

    def _summary(self) -> str:
        parts = []
        for each in self.series:
            values = [y for _, y in each.points]
            parts.append(
                f"{each.name}: from {number(values[0])} to {number(values[-1])}, "
                f"at least {number(min(values))}, at most {number(max(values))}."
            )
        parts += [f"{level.name}: {number(level.value)}." for level in self.levels]
        return " ".join(parts)

    def _data(self) -> str:
        content = {
            "x": self.x_range,
            "y": self.y_range,
            "x_name": self.x_name,
            "y_name": self.y_name,
            "series": [
                {
                    "name": each.name,
                    "style": each.style,
                    "points": [[float(f"{value:.6g}") for value in p] for p in each.points],
                }
                for each in self.series
            ],
        }
        return json.dumps(content, separators=(",", ":")).replace("<", "\\u003c")

    def _frame(self) -> Markup:
        rows = [_label(number(y), "bottom", self._up(y)) for y in ticks(*self.y_range)]
        columns = [_label(number(x), "left", self._across(x)) for x in ticks(*self.x_range)]
        shades = [
            _label(each.name, "left", self._across((each.start + each.end) / 2), "shade-name")
            for each in self.named_shades()
        ]
        levels = [
            _label(self.words_of(level), "bottom", place, level.style)
            for level, place in self.placed_levels(1.35)
        ]
        return element(
            "div",
            element("div", self.y_name, class_="y-name"),
            element("div", *rows, class_="y-ticks", aria_hidden="true"),
            element("div", self._svg(), *shades, class_="plot"),
            element("div", *levels, class_="level-names", aria_hidden="true"),
            element("div", *columns, class_="x-ticks", aria_hidden="true"),
            element("div", self.x_name, class_="x-name"),
            class_="frame" + (" with-levels" if self.levels else ""),
        )

    def _across(self, x: float) -> float:
        low, high = self.x_range
        return (x - low) / (high - low) if high > low else 0.5

    def _up(self, y: float) -> float:
        low, high = self.y_range
        return (y - low) / (high - low)

    def _svg(self) -> Markup:
        return element(
            "svg",
            *(self._shade(shade) for shade in self.shades),
            *(self._across_line(y, "grid") for y in ticks(*self.y_range)),
            *(mark for each in self.series for mark in self._marks(each)),
            *(self._across_line(level.value, f"level {level.style}") for level in self.levels),
            element("line", class_="cursor", x1=0, x2=0, y1=0, y2=_UNITS),
            viewBox=f"0 0 {_UNITS:.0f} {_UNITS:.0f}",
            preserveAspectRatio="none",
            aria_hidden="true",
        )

    def _across_line(self, y: float, style: str) -> Markup:
        height = _place(1 - self._up(y))
        return element("line", class_=style, x1=0, x2=_UNITS, y1=height, y2=height)

    def _shade(self, shade: Shade) -> Markup:
        start = self._across(max(shade.start, self.x_range[0]))
        width = max(0.0, self._across(min(shade.end, self.x_range[1])) - start)
        style, x = f"shade {shade.style}", _place(start)
        return element("rect", class_=style, x=x, width=_place(width), y=0, height=_UNITS)

    def _marks(self, series: Series) -> list[Markup]:
        corners = series.corners()
        places = [f"{_place(self._across(x))},{_place(1 - self._up(y))}" for x, y in corners]
        path = "M" + "L".join(places)
        marks = [element("path", class_=f"line {series.style}", d=path)]
        if series.filled:
            first, last = self._across(corners[0][0]), self._across(corners[-1][0])
            closed = f"{path}L{_place(last)},{_UNITS:.0f}L{_place(first)},{_UNITS:.0f}Z"
            marks.insert(0, element("path", class_=f"area {series.style}", d=closed))
        return marks

    def _legend(self) -> Markup:
        """Return the legend; empty for a single line, which the title names."""
        if len(self.series) == 1 and not self.levels and not self.shades:
            return Markup("")
        shades = dict.fromkeys((shade.name, shade.style) for shade in self.shades)
        return element(
            "ul",
            *(legend_entry(each.name, each.style) for each in self.series),
            *(legend_entry(self.words_of(level), level.style, "narrow") for level in self.levels),
            *(legend_entry(name, style) for name, style in shades),
            class_="legend",
        )


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar of a waterfall; ``kind`` is term, floor, predicted, measured or plain."""

    words: str
    kind: str
    start_bytes: int
    end_bytes: int

    @property
    def nbytes(self) -> int:
        """The bar's length; negative for a term that corrects those before it."""
        return self.end_bytes - self.start_bytes


@dataclass(frozen=True, slots=True)
class BarChart:
    """Horizontal bars on one scale, in bytes or ``unit``, with an optional limit across them."""

    title: str
    bars: Sequence[Bar]
    limit_bytes: int | None = None
    unit: str = ""

    @property
    def most(self) -> float:
        """The scale's end: 2 % beyond the longest bar or the limit."""
        return max([*(bar.end_bytes for bar in self.bars), self.limit_bytes or 0, 1]) * 1.02

    def words_of(self, bar: Bar) -> str:
        """Return a bar's length with its unit."""
        return f"{bar.nbytes:,} {self.unit}" if self.unit else format_bytes(bar.nbytes)

    def html(self) -> Markup:
        """Return the bars as an HTML list, the limit's name below."""
        limit = self.limit_bytes
        key = [legend_entry(f"budget {format_bytes(limit)}", "budget")] if limit else []
        return element(
            "figure",
            element("figcaption", self.title),
            element("ol", *map(self._row, self.bars), class_="waterfall"),
            element("ul", *key, class_="legend"),
        )

    def _row(self, bar: Bar) -> Markup:
        start, end = sorted((bar.start_bytes, bar.end_bytes))
        place = f"left:{self._share(start)};width:{self._share(end - start)}"
        negative = " negative" if bar.nbytes < 0 else ""
        inside = [element("span", class_=f"bar {bar.kind}{negative}", style=place)]
        if self.limit_bytes is not None:
            limit = f"left:{self._share(self.limit_bytes)}"
            inside.append(element("span", class_="limit", style=limit))
        return element(
            "li",
            element("span", bar.words),
            element("span", *inside, class_="track", aria_hidden="true"),
            element("span", self.words_of(bar), class_="size"),
            class_="total" if bar.kind in ("predicted", "measured") else None,
        )

    def _share(self, nbytes: int) -> str:
        return f"{100 * nbytes / self.most:.2f}%"


def _label(text: str, side: str, share: float, style: str | None = None) -> Markup:
    return element("span", text, class_=style, style=f"{side}:{100 * share:.2f}%")


def legend_entry(name: str, style: str, width: str | None = None) -> Markup:
    """Return a line of a legend: a swatch of the style, and the name."""
    swatch = element("i", class_=f"swatch {style}", aria_hidden="true")
    return element("li", swatch, name, class_=width)


def _place(share: float) -> str:
    return f"{_UNITS * share:.1f}"
