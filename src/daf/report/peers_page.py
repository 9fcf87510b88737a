"""A side-by-side as a page: who won what in words, bars, and the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from daf.report.markup import Markup, element
from daf.report.page import document
from daf.report.scale import number
from daf.report.table import table
from daf.units import format_bytes

Row = Mapping[str, Any]
COLUMNS = (
    *("contestant", "peak above floor", "÷ plain's", "without first steps", "predicted peak"),
    *("saved for backward", "step", "÷ plain's", "examples/s", "last loss", "gradient error"),
)


def peers_page(rows: Sequence[Row], notes: Sequence[str]) -> str:
    """The whole page, as text."""
    heading = f"DAF beside its peers, {notes[0]}"
    said = [element("li", sentence) for sentence in verdicts(rows)]
    body = element(
        "main",
        element("h1", heading),
        element("ul", *said, class_="findings"),
        _bars(rows, "peak_ratio", "Peak above the floor ÷ plain's"),
        _bars(rows, "step_ratio", "Time a step ÷ plain's"),
        table(COLUMNS, [cells(row) for row in rows]),
        *(element("p", note, class_="quiet") for note in notes[1:]),
        id="report",
    )
    return document(heading, body)


def cells(row: Row) -> list[str]:
    """A contestant's cells under ``COLUMNS``; one that did not run says why."""
    if "step_ratio" not in row:
        why = "refused" if "refused" in row else "failed"
        return [row["contestant"], why, *["–"] * (len(COLUMNS) - 2)]
    return [
        row["contestant"],
        format_bytes(row["peak_bytes"] - row["floor_bytes"]),
        f"{row['peak_ratio']:.2f}",
        f"{row['steady_peak_ratio']:.2f}",
        _bytes(row["predicted_peak_bytes"]),
        _bytes(row["saved_bytes_peak"]),
        f"{row['step_ms']:,.0f} ms",
        f"{row['step_ratio']:.2f}",
        number(row["examples_per_s"]),
        f"{row['loss']:.4f}",
        "–" if row["gradient_error"] is None else f"{row['gradient_error']:.2g}",
    ]


def verdicts(rows: Sequence[Row]) -> list[str]:
    """Who is fastest, who smallest, and for every run of DAF which peers beat it."""
    ran = [row for row in rows if "step_ratio" in row]
    fastest = min(ran, key=lambda row: float(row["step_ratio"]))
    smallest = min(ran, key=lambda row: float(row["peak_ratio"]))
    sentences = [
        f"Fastest: {fastest['contestant']}, {fastest['step_ratio']:.2f} × plain's step at "
        f"{fastest['peak_ratio']:.2f} × its peak.",
        f"Smallest: {smallest['contestant']}, {smallest['peak_ratio']:.2f} × plain's peak at "
        f"{smallest['step_ratio']:.2f} × its step.",
    ]
    peers = [row for row in ran if not row["is_daf"]]
    sentences += [_beside_peers(row, peers) for row in ran if row["is_daf"]]
    sentences += [
        f"{row['contestant']} did not run: {row.get('refused') or row['failed']}"
        for row in rows
        if "step_ratio" not in row
    ]
    return sentences


def _beside_peers(ours: Row, peers: Sequence[Row]) -> str:
    faster = [row for row in peers if row["step_ratio"] < ours["step_ratio"]]
    smaller = [row for row in peers if row["peak_ratio"] < ours["peak_ratio"]]
    both = [row for row in faster if row in smaller]
    return (
        f"Beside {ours['contestant']}: faster {_listed(faster)}; smaller {_listed(smaller)}; "
        f"both {_listed(both)}."
    )


def _listed(rows: Sequence[Row]) -> str:
    names = [f"“{row['contestant']}”" for row in rows]
    if not names:
        return "is nobody"
    if len(names) == 1:
        return f"is {names[0]}"
    return f"are {', '.join(names[:-1])} and {names[-1]}"


def _bars(rows: Sequence[Row], key: str, heading: str) -> Markup:
    ran = [row for row in rows if key in row]
    most = max(float(row[key]) for row in ran)
    items = [
        element(
            "li",
            element("span", row["contestant"]),
            element(
                "span",
                element(
                    "span",
                    class_="bar measured" if row["is_daf"] else "bar floor",
                    style=f"left:0;width:{100 * row[key] / most:.2f}%",
                ),
                class_="track",
                aria_hidden="true",
            ),
            element("span", f"{row[key]:.2f}", class_="size"),
        )
        for row in ran
    ]
    bars = element("ol", *items, class_="waterfall")
    return element("figure", element("figcaption", heading), bars)


def _bytes(count: int | None) -> str:
    return "–" if count is None else format_bytes(count)
