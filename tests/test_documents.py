"""The documents say what the committed results say, and point at files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import papers
import pytest
import render

ROOT = Path(__file__).parents[1]
FOLDERS = ("", "docs/", "benchmarks/", "src/daf/*/")
DOCUMENTS = sorted(path for folder in FOLDERS for path in ROOT.glob(f"{folder}*.md"))

TABLES = render.TABLES


@pytest.mark.parametrize("table", TABLES, ids=[name for _, name, _ in TABLES])
def test_figures_are_those_of_the_results(table) -> None:
    document, name, table_of = table
    text = document.read_text()
    assert render.rendered(text, name, table_of) == text


@pytest.mark.parametrize("table", TABLES, ids=[name for _, name, _ in TABLES])
def test_a_figure_typed_by_hand_would_be_noticed(table) -> None:
    document, name, table_of = table
    text = document.read_text()
    begin = render.begin(name)
    altered = text.replace(begin, f"{begin}\n| saved for backward | 1 | 1/99.9 |")
    assert altered != text
    assert render.rendered(altered, name, table_of) == text


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text())
    missing = [target for target in targets if not (document.parent / target).exists()]
    assert missing == []


CODE = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"(?<![*\w])\w[\w./-]*\.(?:py|cpp|h)\b")
MODULE = re.compile(r"\bdaf(?:_bench)?(?:\.\w+)+")
CODE_FOLDERS = ("src/**/*.py", "csrc/**/*.*", "tests/**/*.*", "benchmarks/**/*.*", "scripts/**/*.*")
FOR_EXAMPLE = {"script.py", "vector_NAME.h", "daf.models", "daf.data"}


def exists(module: str) -> bool:
    """True if a dotted name is a module, or a module mentions what stands behind its own name."""
    place = ROOT / ("src" if module.startswith("daf.") else "benchmarks")
    parts = module.split(".")
    while parts and (place / parts[0]).is_dir():
        place /= parts.pop(0)
    if parts and (place / f"{parts[0]}.py").exists():
        place /= f"{parts.pop(0)}.py"
    text = (place if place.is_file() else place / "__init__.py").read_text()
    return all(re.search(rf"\b{part}\b", text) for part in parts)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_files_and_modules_that_are_named_exist(document: Path) -> None:
    if document.name == "CHANGELOG.md":
        pytest.skip("names what was")
    code = " ".join(CODE.findall(document.read_text()))
    files = set(FILE.findall(code)) - FOR_EXAMPLE
    modules = set(MODULE.findall(code)) - FOR_EXAMPLE
    there = tuple(f"/{path.relative_to(ROOT)}" for top in CODE_FOLDERS for path in ROOT.glob(top))
    assert {name for name in files if not any(path.endswith(f"/{name}") for path in there)} == set()
    assert {name for name in modules if not exists(name)} == set()


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
    lines = render.sweep_figures(result | {"figures": {"overshoots": 0}}).splitlines()
    assert "| overshoots | 0 |" in lines
    assert "| w1 | 50 % | 500 | 490 | 470 | 1.040 |" in lines
    assert "| w1 | 25 % | 100 | refused, least 150 |  |  |" in lines
    assert "| w1 | checkpoint | 300 | 1.300 |" in lines


# Numbers with units that documents may say of themselves: what was asked, what was set in the code,
# what a paper claims, what follows from a format. What was measured comes out of a result.
STATED = {
    "README.md": set(),
    "allocator.md": {"128 KiB", "16 times", "25 %", "2 MiB", "16 KiB", "1 GiB"},
    "budget.md": {"16 MiB", "64 MiB", "20 ms", "1 GB", "4 MiB"},
    "format.md": {"0.4 %"},
    "gpu.md": {"70 %"},
    "limits.md": {"128 KiB"},
    "kernels.md": {"0.4 %"},
    "operators.md": {"8 MiB"},
    "planning.md": {"12 %", "64 MiB"},
    "papers.md": {"100 MB", "3.2 times"},
    "peers.md": {"28 minutes"},
    "pool.md": {"100 MB", "4 KiB", "128 KiB"},
    "quickstart.md": {"700 MB"},
    "report.md": {"50 ms", "480 points"},
    "sensitivity.md": {"2 %"},
    "sweep.md": {"25 %", "10 %", "50 MB"},
    "src/daf/capture/README.md": {"70 MB"},
    "src/daf/memory/README.md": {"128 KiB"},
    "src/daf/torch_compat/README.md": {"70 MB"},
}
UNITS = r"%|[kMG]B|[KMG]iB|ms|µs|ns|s|seconds|minutes|×|times|points?"
QUANTITY = re.compile(rf"(?<![\w.,])\d[\d,]*(?:\.\d+)?\s?(?:{UNITS})(?!\w)")
NOT_PROSE = re.compile(r"<!-- figures: [\w-]+ -->.*?<!-- /figures -->|```.*?```|`[^`]*`", re.DOTALL)


def quantities(text: str) -> set[str]:
    """Numbers with units outside of rendered tables and code."""
    return {" ".join(found.split()) for found in QUANTITY.findall(NOT_PROSE.sub("", text))}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_no_measured_figure_is_typed_by_hand(document: Path) -> None:
    if document.name in ("CHANGELOG.md", "CONTRIBUTING.md"):
        pytest.skip("says nothing of measurements")
    place = document.relative_to(ROOT).as_posix()
    stated = STATED.get(place if place.startswith("src/") else document.name, set())
    assert quantities(document.read_text()) <= stated


def test_a_quantity_is_found_in_prose_and_not_in_tables_or_code() -> None:
    said = "It takes 1.25 times as long, 3 ms, and 10 % less.\n`40 ms`\n"
    table = "<!-- figures: main -->\n| 7 ms |\n<!-- /figures -->\n"
    assert quantities(said + table) == {"1.25 times", "3 ms", "10 %"}


def test_every_result_has_its_command_in_the_readme_and_every_table_its_result() -> None:
    told = (ROOT / "benchmarks" / "README.md").read_text()
    named = set(re.findall(r"`results/([\w-]+)\.json`", told))
    assert {name for _, name, _ in TABLES} <= named
    assert {path.stem for path in (ROOT / "benchmarks" / "results").glob("*.json")} <= named


# What no result draws: a run's own picture, and drawings of how things work.
OTHER_PICTURES = {"memory.png", "how-step.svg", "how-treatments.svg"}


@pytest.mark.thorough
def test_every_picture_in_the_documents_is_drawn_from_a_result(tmp_path: Path) -> None:
    drawn = {path.name for path in render.draw(tmp_path)}
    assert drawn >= {"roofline.png", "pool_times.png", "allocator.png", "sweep.png"}
    assert all((tmp_path / name).stat().st_size > 10_000 for name in drawn)
    texts = [document.read_text() for document in DOCUMENTS]
    shown = {Path(name).name for text in texts for name in re.findall(r"!\[[^]]*\]\(([^)]+)", text)}
    assert shown - OTHER_PICTURES <= drawn


def test_what_was_seen_of_the_papers_experiments_is_said() -> None:
    def point(policy: str, percent: int, step: float | None) -> dict[str, object]:
        found = {"part": "budget", "workload": "w1", "policy": policy, "percent": percent}
        return found | ({"outcome": "refused"} if step is None else {"step_ratio": step})

    rows = [point("optimal", 50, 1.1), point("checkpoint", 50, 1.3), point("optimal", 25, 1.2)]
    rows += [point("checkpoint", 25, None)]
    lines = papers.policy_lines(rows)
    assert "| w1 | 50 | 1.100 | 1.300 |" in lines
    assert "| w1 | 25 | 1.200 | refused |" in lines
    assert "Seen here: the fastest of these at 2 budgets was DAF 2." in lines
    assert papers.policy_lines(rows[:1]) == []
    times = [
        {"tree": 2.0, "atomics": 3.0, "hybrid": 1.0, "torch": 1.5},
        {"tree": 1.0, "atomics": 3.0, "hybrid": 2.0, "torch": 1.5},
        {"tree": 1.0, "atomics": 3.0, "hybrid": 2.0, "torch": 0.5},
    ]
    figures = {"hybrid_worst_vs_best": 2.0, "worst_vs_best": 1.05}
    result = {"rows": [{"microseconds": each} for each in times], "figures": figures}
    said = papers.reduce_seen(result)
    assert "of 3 shapes, best is tree on 1, atomics on 0, hybrid on 1, PyTorch's own on 1" in said
    assert "at most 2.00 times" in said
