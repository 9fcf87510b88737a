"""The documents say what the committed results say, and point at files that exist."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")])


def renderer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("render", ROOT / "benchmarks" / "render.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TABLES = renderer().TABLES


@pytest.mark.parametrize("table", TABLES, ids=[name for _, name, _ in TABLES])
def test_figures_are_those_of_the_results(table) -> None:
    document, name, table_of = table
    text = document.read_text()
    assert renderer().rendered(text, name, table_of) == text


@pytest.mark.parametrize("table", TABLES, ids=[name for _, name, _ in TABLES])
def test_a_figure_typed_by_hand_would_be_noticed(table) -> None:
    document, name, table_of = table
    text = document.read_text()
    begin = renderer().begin(name)
    altered = text.replace(begin, f"{begin}\n| saved for backward | 1 | 1/99.9 |")
    assert altered != text
    assert renderer().rendered(altered, name, table_of) == text


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text())
    missing = [target for target in targets if not (document.parent / target).exists()]
    assert missing == []


def test_the_sweep_s_table_tells_how_each_point_ended() -> None:
    mb = 10**6
    point = {"part": "budget", "workload": "w1", "policy": "optimal", "floor_bytes": 300 * mb}
    trained = point | {"asked": "50 %", "budget_bytes": 800 * mb, "outcome": "trained"}
    trained |= {"peak_bytes": 790 * mb, "predicted_peak_bytes": 770 * mb, "step_ratio": 1.04}
    refused = point | {"asked": "25 %", "budget_bytes": 400 * mb, "outcome": "refused"}
    refused |= {"least_bytes": 450 * mb}
    by_hand = {"part": "static", "workload": "w1", "strategy": "checkpoint", "step_ratio": 1.3}
    by_hand |= {"peak_bytes": 600 * mb, "floor_bytes": 300 * mb}
    machine = {"processor": "P", "cores": 2, "torch": "2"}
    result = {"rows": [trained, refused, by_hand], "machine": machine, "notes": ["w1"]}
    lines = renderer().sweep_figures(result | {"figures": {"overshoots": 0}}).splitlines()
    assert "| overshoots | 0 |" in lines
    assert "| w1 | 50 % | 500 | 490 | 470 | 1.040 |" in lines
    assert "| w1 | 25 % | 100 | refused, least 150 |  |  |" in lines
    assert "| w1 | checkpoint | 300 | 1.300 |" in lines
