"""The notebook of the documents runs, shows what it promises, and fits every screen."""

from __future__ import annotations

from typing import Any

import pytest
from notebook import NOTEBOOK, executed, outputs_of

RUNS = pytest.mark.thorough  # all cells, which takes as long as any test


@pytest.fixture(scope="module")
def outputs() -> list[Any]:
    return outputs_of(executed())


@RUNS
def test_every_object_shows_itself_as_a_card(outputs: list[Any]) -> None:
    cards = [each.data["text/html"] for each in outputs if each.output_type == "execute_result"]
    titles = [card.split("</strong>")[0].rpartition(">")[2].split(" within ")[0] for card in cards]
    assert titles == [
        *("Sequential", "Step", "Sequential", "Plan", "Step"),
        *("Sequential", "Saved for backward"),
    ]
    assert "Not planned yet" in cards[0]
    assert "budget" in cards[2]


@RUNS
def test_measuring_is_told_and_a_refusal_names_the_least_budget(outputs: list[Any]) -> None:
    told = [each.data["text/plain"] for each in outputs if each.output_type == "display_data"]
    assert told[0] == "DAF has measured"
    (refusal,) = [each.text for each in outputs if each.output_type == "stream"]
    assert "100 MB" in refusal


def test_what_is_committed_was_shown_by_these_cells() -> None:
    import nbformat

    committed = nbformat.read(NOTEBOOK, as_version=4)
    assert [c for c in committed.cells if c.cell_type == "code" and not c.execution_count] == []
