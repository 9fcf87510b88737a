"""The layout shows the architecture: order of packages, sizes of folders and files, docstrings."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TypeGuard

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
SOURCE_SUFFIXES = {".py", ".h", ".cpp"}
MOST_FILES = 16
MOST_LINES = 450

# A file imports only from rows beneath its own package's (``CONTRIBUTING.md`` draws the picture).
ORDER = (
    "cli",
    "training",
    "report",
    "integrations",
    "session",
    "sensitivity",
    "profiling",
    "planning",
    "budget",
    "step",
    "capture",
    "operators",
    "recompute",
    "saved_tensors",
    "weights",
    "offload",
    "codecs",
    "pool",
    "memory",
    "kernels",
    "files",
    "torch_compat",
    "core",
    "_native",
)
WITHOUT_TORCH = ("daf.planning", "daf.core")
FACADE = "daf"


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_of(module: str) -> str:
    return module.split(".")[1]


@cache
def syntax(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def modules() -> dict[str, Path]:
    return {module_name(path): path for path in SOURCE.rglob("*.py")}


def imported_names(path: Path, known: set[str]) -> Iterator[str]:
    """Every module that a file imports, at its top or later."""
    for node in ast.walk(syntax(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            base = node.module or ""
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield full if full in known else base


@cache
def import_graph() -> dict[str, set[str]]:
    known = set(modules())
    return {
        name: {each for each in imported_names(path, known) if each.partition(".")[0] == FACADE}
        - {name}
        for name, path in modules().items()
    }


def test_packages_import_only_what_lies_beneath_them() -> None:
    rank = {package: row for row, package in enumerate(ORDER)}
    assert len(import_graph()) > 200
    upward = [
        f"{name} -> {target}"
        for name, targets in import_graph().items()
        if name.startswith(f"{FACADE}.") and name != "daf.__main__"
        for target in targets
        if target == FACADE or rank[package_of(target)] < rank[package_of(name)]
    ]
    assert upward == []


def test_no_import_is_circular() -> None:
    graph = import_graph()
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail, name))
        if name in done:
            return
        for target in graph.get(name, ()):
            visit(target, (*trail, name))
        done.add(name)

    for name in graph:
        visit(name, ())


def test_nothing_imports_the_benchmarks() -> None:
    """They are a distribution of their own; the command line finds them by their entry point."""
    known = set(modules())
    importing = [
        name
        for name, path in modules().items()
        if any(each.startswith("daf_bench") for each in imported_names(path, known))
    ]
    assert importing == []


@pytest.mark.parametrize("package", WITHOUT_TORCH)
def test_what_decides_needs_no_torch(package: str) -> None:
    graph = import_graph()
    reached = {name for name in graph if name == package or name.startswith(package + ".")}
    while more := {target for name in reached for target in graph.get(name, ())} - reached:
        reached |= more
    assert "daf.core.errors" in reached
    known = set(modules())
    importing = {
        name
        for name in reached & known
        if "torch" in {each.partition(".")[0] for each in imported_names(modules()[name], known)}
    }
    assert importing == set()


def test_the_root_holds_no_loose_modules() -> None:
    loose = {path.name for path in (SOURCE / "daf").glob("*.py")}
    assert loose == {"__init__.py", "__main__.py"}


def source_files(*folders: str) -> Iterator[Path]:
    for folder in folders:
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in SOURCE_SUFFIXES and "build" not in path.relative_to(ROOT).parts:
                yield path


def test_no_folder_holds_more_than_sixteen_files() -> None:
    counts = Counter(path.parent for path in source_files("src", "csrc", "benchmarks", "tests"))
    assert len(counts) > 40
    full = {str(k.relative_to(ROOT)): n for k, n in counts.items() if n > MOST_FILES}
    assert full == {}


@pytest.mark.xfail(reason="vector_neon and render are longer", strict=True)
def test_no_file_is_longer_than_450_lines() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines())
        for path in source_files("src", "csrc", "benchmarks")
    }
    assert {name: n for name, n in lengths.items() if n > MOST_LINES} == {}


def test_every_package_says_what_belongs_in_it() -> None:
    silent = [
        name
        for name, path in modules().items()
        if path.name == "__init__.py" and not ast.get_docstring(syntax(path))
    ]
    assert silent == []


def test_tests_mirror_the_packages() -> None:
    packages = {path.parent.name for path in (SOURCE / "daf").glob("*/__init__.py")}
    tested = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir()}
    assert packages - tested <= {"files"}  # training's run folders test them


def test_every_codec_of_a_gpu_is_called() -> None:
    """No kernel is kept that only its own tests run."""
    path = SOURCE / "daf" / "kernels" / "triton" / "codecs.py"
    offered = {each.name for each in syntax(path).body if is_public(each)}
    assert {"encode_rotated", "apply_mask"} <= offered
    assert offered <= attributes_of("codecs")


def is_public(node: ast.stmt) -> TypeGuard[ast.FunctionDef]:
    return isinstance(node, ast.FunctionDef) and not node.name.startswith("_")


def attributes_of(name: str) -> set[str]:
    """What is written behind ``name.`` anywhere in the source."""
    return {
        each.attr
        for path in modules().values()
        for each in ast.walk(syntax(path))
        if isinstance(each, ast.Attribute)
        and isinstance(each.value, ast.Name)
        and each.value.id == name
    }
