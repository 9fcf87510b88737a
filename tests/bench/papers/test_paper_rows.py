"""The papers' table: what it names exists, and its figures are those of committed results."""

from __future__ import annotations

import shlex
from pathlib import Path

import paper_tables
import pytest
import render
from daf_bench.papers.row import DAF, SAGE, PaperRow
from daf_bench.papers.table import ROWS

from daf.cli.commands import lazy_commands

ROOT = Path(__file__).parents[3]
NAMES = [f"{row.paper}: {row.what}" for row in ROWS]


def test_the_table_has_a_row_for_every_part_of_both_papers() -> None:
    assert len(ROWS) >= 25
    assert len(set(NAMES)) == len(NAMES)
    assert {row.paper for row in ROWS} == {DAF, SAGE}


@pytest.mark.parametrize("row", ROWS, ids=NAMES)
def test_what_a_row_names_exists(row: PaperRow) -> None:
    assert (ROOT / row.where).is_file()
    assert row.published
    assert row.differs
    assert all(isinstance(paper_tables.value_of(each), int | float) for each in row.ours)


@pytest.mark.parametrize("command", sorted({row.command for row in ROWS}))
def test_a_row_s_command_can_be_asked_for(command: str) -> None:
    program, *words = shlex.split(command)
    if program == "pytest":
        assert (ROOT / words[0]).exists()
        return
    assert program == "daf"
    found = lazy_commands()[words.pop(0)].load()
    if hasattr(found, "commands"):
        found = found.commands[words.pop(0)]
    options = {name for parameter in found.params for name in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= options


@pytest.mark.parametrize("table", render.COLLECTED, ids=lambda table: table[1])
def test_the_document_has_the_table_as_it_is(table) -> None:
    document, name, table_of = table
    text = document.read_text()
    assert render.collected(text, name, table_of) == text
    assert text.count(render.begin(name)) == 1


def test_a_figure_that_no_result_has_is_noticed() -> None:
    row = next(row for row in ROWS if row.ours)
    with pytest.raises(KeyError):
        paper_tables.value_of(type(row.ours[0])(row.ours[0].file, "no such figure", ""))


def test_numbers_keep_what_counts() -> None:
    assert [paper_tables.number(each) for each in (3, 22.91, 0.04567, 106649.2)] == [
        *("3", "22.9", "0.0457", "106,649")
    ]


def test_the_comparison_tells_of_bytes_steps_and_refusals() -> None:
    mb = 10**6
    trained = {"workload": "w6", "contestant": "daf", "floor_bytes": 100 * mb, "examples": 8}
    trained |= {"budget_bytes": 300 * mb, "peak_bytes": 290 * mb, "micro_batch": 8}
    trained |= {"saved_bytes": 20 * mb, "saved_bytes_plain": 80 * mb, "step_vs_plain": 1.5}
    trained |= {"gradient_error": 0.0123, "methods": {"ranged 4": 7, "keep": 2}}
    assert paper_tables.training_line(trained) == (
        "| w6 | as published | 200 MB | 190 MB | 0.250 | 8 | 1.500 | 0.012 | 7 ranged 4, 2 keep |"
    )
    refused = {"workload": "w3", "contestant": "optimal", "refused": "needs 1 GB"}
    assert paper_tables.training_line(refused) == "| w3 | ours | needs 1 GB | | | | | | |"
    plain = {"workload": "w6", "contestant": "plain", "budget_bytes": None, "examples": 8}
    plain |= {"floor_bytes": 100 * mb, "peak_bytes": 500 * mb, "gradient_error": 0.0}
    assert paper_tables.training_line(plain) == "| w6 | plain |  | 400 MB | 1 | 8 | 1.000 | 0 |  |"
