"""A side-by-side as a page: where peers win, in words; then bars and the table of each workload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from daf.core.markup import Markup, element, joined, table
from daf.core.units import format_bytes
from daf.report.page import document
from daf.report.scale import number
from daf_bench.peers.verdicts import OURS, Row, Rows, losses, ran, verdicts, workloads_of

COLUMNS = (
    *("contestant", "peak above floor", "÷ plain's", "without first steps", "predicted"),
    *("saved for backward", "step", "÷ plain's", "examples/s", "last loss", "gradient error"),
)


def peers_page(rows: Rows, figures: Mapping[str, float], notes: Sequence[str]) -> str:
    """The whole page, as text."""
    heading = "DAF beside its peers"
    said = [element("li", sentence) for sentence in losses(rows)]
    body = element(
        "main",
        element("h1", heading),
        element("p", notes[0], class_="facts"),
        element(
            "section",
            element("h2", "Where a peer wins"),
            element("ul", *said, class_="findings"),
            aria_label="Where a peer wins",
        ),
        *(_section(name, own) for name, own in workloads_of(rows).items()),
        element("h2", "Figures"),
        table(("figure", "value"), [(name, f"{value:.3f}") for name, value in figures.items()]),
        *(element("p", note, class_="quiet") for note in notes[1:]),
        id="report",
    )
    return document(heading, body)


def _section(name: str, rows: Rows) -> Markup:
    said = [element("li", sentence) for sentence in verdicts(rows)]
    bars = (
        joined(
            _bars(rows, "peak_ratio", "Peak above the floor ÷ plain's (the line)"),
            _bars(rows, "step_ratio", "Time a step ÷ plain's (the line)"),
        )
        if ran(rows)
        else ""
    )
    return element(
        "section",
        element("h2", name),
        element("ul", *said, class_="findings"),
        element("div", bars, class_="pair"),
        table(COLUMNS, [cells(row) for row in rows]),
        aria_label=name,
    )


def cells(row: Row) -> list[str]:
    """A contestant's cells under ``COLUMNS``; one that did not run says why."""
    if "step_ratio" not in row:
        why = next(word for word in ("refused", "failed", "late") if word in row)
        return [row["contestant"], why, *["–"] * (len(COLUMNS) - 2)]
    return [
        row["contestant"],
        format_bytes(row["peak_bytes"] - row["floor_bytes"]),
        f"{row['peak_ratio']:.2f}",
        f"{row['steady_peak_ratio']:.2f}",
        _above_floor(row["predicted_peak_bytes"], row),
        _bytes(row["saved_bytes_peak"]),
        f"{row['step_ms']:,.0f} ms",
        f"{row['step_ratio']:.2f}",
        number(row["examples_per_s"]),
        f"{row['loss']:.4f}",
        "–" if row["gradient_error"] is None else f"{row['gradient_error']:.2g}",
    ]


def _bars(rows: Rows, key: str, heading: str) -> Markup:
    done = ran(rows)
    most = max(float(row[key]) for row in done)
    items = [
        element(
            "li",
            element("span", row["contestant"]),
            element(
                "span",
                element(
                    "span",
                    class_="bar measured" if row["kind"] == OURS else "bar floor",
                    style=f"left:0;width:{100 * row[key] / most:.2f}%",
                ),
                element("span", class_="limit", style=f"left:{100 / most:.2f}%"),
                class_="track",
                aria_hidden="true",
            ),
            element("span", f"{row[key]:.2f}", class_="size"),
        )
        for row in done
    ]
    bars = element("ol", *items, class_="waterfall")
    return element("figure", element("figcaption", heading), bars)


def _above_floor(nbytes: int | None, row: Row) -> str:
    return "–" if nbytes is None else format_bytes(nbytes - row["floor_bytes"])


def _bytes(count: int | None) -> str:
    return "–" if count is None else format_bytes(count)
