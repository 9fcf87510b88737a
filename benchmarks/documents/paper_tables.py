"""The table of both papers, and DAF as published beside ours: tables in Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from daf_bench.accuracy.falling import INVERTED, MEASURED, SHUFFLED, UNIFORM
from daf_bench.papers.equal_noise import Coded, bytes_at
from daf_bench.papers.eviction import WHOLE
from daf_bench.papers.figures import EVICTION, NOISE
from daf_bench.papers.row import DAF, SAGE, Ours, PaperRow
from daf_bench.papers.table import ROWS
from words import MB, ROOT, measured_by

RESULTS = ROOT / "benchmarks" / "results"
TITLES = {DAF: "DAF (arXiv 2507.07149)", SAGE: "SAGE (MobiSys 2022)"}
NAMES = {"plain": "plain", "daf": "as published", "optimal": "ours"}


def experiments_table() -> str:
    """Return the tables of both papers' rows, with figures of the committed results."""
    return "\n\n".join(_table_of(paper) for paper in TITLES)


def _table_of(paper: str) -> str:
    return "\n".join(
        [
            f"**{TITLES[paper]}**",
            "",
            "| what | where | again by | published | here | what differs |",
            "|---|---|---|---|---|---|",
            *(line(row) for row in ROWS if row.paper == paper),
        ]
    )


def line(row: PaperRow) -> str:
    """Return a row of the table."""
    here = "; ".join(map(said, row.ours)) or "no figure"
    cells = (row.what, f"`{row.where}`", f"`{row.command}`", row.published, here, row.differs)
    return f"| {' | '.join(cells)} |"


def said(ours: Ours) -> str:
    """Return a number of ours and what it is."""
    return f"**{number(value_of(ours))}** ({ours.words})"


def value_of(ours: Ours) -> float:
    """Return the figure that the committed result has.

    Raises:
        KeyError: the result has no such figure.
    """
    value: float = _figures(RESULTS / f"{ours.file}.json")[ours.key]
    return value


@cache
def _figures(path: Path) -> dict[str, float]:
    figures: dict[str, float] = json.loads(path.read_text())["figures"]
    return figures


def number(value: float) -> str:
    """Return three digits that count, whole numbers as they are."""
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 1000 else f"{value:.3g}"


def published_figures(result: dict[str, Any]) -> str:
    """Return every workload's row of plain, DAF as published and ours."""
    training = [row for row in result["rows"] if row["part"] == "training"]
    return "\n".join(
        [
            measured_by(result, "papers"),
            "",
            "| workload | | budget | peak | saved ÷ plain's | examples at once | step ÷ plain's "
            "| gradient error | saved tensors by treatment |",
            "|---|---|---|---|---|---|---|---|---|",
            *map(training_line, training),
            "",
            *_noise_lines([row for row in result["rows"] if row["part"] == NOISE]),
            *_eviction_lines([row for row in result["rows"] if row["part"] == EVICTION]),
            *(f"- {note}" for note in result["notes"][1:]),
            "",
            "| | |",
            "|---|---|",
            *(f"| {_words(name)} | {number(value)} |" for name, value in result["figures"].items()),
        ]
    )


def _noise_lines(rows: list[dict[str, Any]]) -> list[str]:
    """Return the table of what both codes hold at equal noise, if that was measured."""
    if not rows:
        return []
    return [
        "| workload, whole batch | as published: bits, bytes, gradient error | ours at that error "
        "| published ÷ ours |",
        "|---|---|---|---|",
        *(line for row in rows for line in _widths_of(row)),
        "",
    ]


def _eviction_lines(rows: list[dict[str, Any]]) -> list[str]:
    """Return the table of what eviction adds to the gradient's error, if that was measured."""
    if not rows:
        return []
    ways = (MEASURED, UNIFORM, SHUFFLED, INVERTED, WHOLE)
    return [
        f"| error that eviction adds, by importance | whole codes | {' | '.join(ways)} |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {row['workload']}, {cap['share']:.0%} of the bytes | {row['error']:.3g} | "
            + " | ".join(f"{cap[way]:.3g}" for way in ways)
            + " |"
            for row in rows
            for cap in row["caps"]
        ),
        "",
    ]


def _widths_of(row: dict[str, Any]) -> Iterator[str]:
    ours = [Coded(*each) for each in row["ours"]]
    for bits, saved_bytes, error in (Coded(*each) for each in row["published"]):
        cells = [row["workload"], f"{bits} bits, {saved_bytes / MB:.1f} MB, {error:.2g}"]
        if 0.0 < error < 1.0:
            held = bytes_at(error, ours, row["exact_bytes"])
            cells += [f"{held / MB:.1f} MB", f"{saved_bytes / held:.2f}"]
        else:
            cells += ["not compared", ""]
        yield f"| {' | '.join(cells)} |"


def _words(name: str) -> str:
    return name.replace("_", " ")


def training_line(row: dict[str, Any]) -> str:
    """Return how one contestant trained, or why it did not."""
    named = f"| {row['workload']} | {NAMES[row['contestant']]} |"
    if reason := row.get("refused") or row.get("failed"):
        return f"{named} {reason} | | | | | | |"
    floor = row["floor_bytes"]
    cells = [
        _above(row.get("budget_bytes"), floor),
        _above(row["peak_bytes"], floor),
        f"{row['saved_bytes'] / row['saved_bytes_plain']:.3f}" if "saved_bytes" in row else "1",
        str(row.get("micro_batch", row["examples"])),
        f"{row.get('step_vs_plain', 1.0):.3f}",
        f"{row['gradient_error']:.2g}",
        ", ".join(f"{count} {method}" for method, count in row.get("methods", {}).items()),
    ]
    return f"{named} {' | '.join(cells)} |"


def _above(size_bytes: int | None, floor_bytes: int) -> str:
    return "" if size_bytes is None else f"{(size_bytes - floor_bytes) / MB:.0f} MB"
