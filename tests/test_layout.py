"""The layout shows the architecture: order of packages, sizes of folders and files, docstrings."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Documented:
    """A public function, its docstring, and those of its class and file, which may speak for it."""

    name: str
    node: ast.FunctionDef
    own: str
    around: str
    bases: tuple[str, ...]


def documented(
    module: str, body: list[ast.stmt], around: str, prefix: str, bases: tuple[str, ...] = ()
) -> Iterator[Documented]:
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            inner = around + (ast.get_docstring(node) or "")
            above = tuple(each.id for each in node.bases if isinstance(each, ast.Name))
            yield from documented(module, node.body, inner, f"{prefix}{node.name}.", above)
        elif isinstance(node, ast.FunctionDef) and (is_public(node) or node.name == "__init__"):
            own = ast.get_docstring(node) or ""
            yield Documented(f"{module}.{prefix}{node.name}", node, own, around, bases)


@cache
def public_functions() -> list[Documented]:
    return [
        each
        for module, path in modules().items()
        for each in documented(module, syntax(path).body, ast.get_docstring(syntax(path)) or "", "")
    ]


def test_no_function_inside_another_calls_itself() -> None:
    """It would be a cycle with all that it closes over, which lives until cycles are collected."""
    found = [
        f"{path.relative_to(ROOT)}:{inner.lineno}"
        for path in sorted(SOURCE.rglob("*.py"))
        for outer in ast.walk(ast.parse(path.read_text()))
        if isinstance(outer, ast.FunctionDef)
        for inner in ast.walk(outer)
        if isinstance(inner, ast.FunctionDef) and inner is not outer
        if inner.name in {node.id for node in ast.walk(inner) if isinstance(node, ast.Name)}
    ]
    assert found == []


def test_every_public_name_has_a_docstring() -> None:
    """Or inherits one: a backend's methods do what the protocol says."""
    assert len(public_functions()) > 1000
    spoken = {tuple(each.name.split(".")[-2:]) for each in public_functions() if each.own}
    silent = [
        each.name
        for each in public_functions()
        if each.node.name != "__init__"
        and not (each.own or is_overload(each.node) or is_setter(each.node))
        and not any((base, each.node.name) in spoken for base in each.bases)
    ]
    assert silent == []


def is_overload(node: ast.FunctionDef) -> bool:
    return any(isinstance(each, ast.Name) and each.id == "overload" for each in node.decorator_list)


def test_errors_that_a_public_function_raises_stand_in_its_docstring() -> None:
    """Or in its class's or its file's, where all of these raise them."""
    unnamed = {
        each.name: missing
        for each in public_functions()
        if not is_setter(each.node)  # its property speaks for it
        and not each.name.startswith("daf.cli.")  # docstrings there are the commands' help
        and (missing := raised_errors(each.node) - words_of(each.own + each.around))
    }
    assert unnamed == {}


def raised_errors(function: ast.FunctionDef) -> set[str]:
    """Classes that it raises itself: not what it calls, nor functions within it."""
    found: set[str] = set()
    left: list[ast.AST] = list(function.body)
    while left:
        node = left.pop()
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Lambda):
            continue
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            called = node.exc.func
            if isinstance(called, ast.Name) and called.id[0].isupper():
                found.add(called.id)
        left.extend(ast.iter_child_nodes(node))
    return found - {"NotImplementedError", "AssertionError", "StopIteration"}


def words_of(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


def test_every_argument_of_the_library_s_face_is_documented() -> None:
    """Of each function and class that ``daf`` itself offers, and of their public methods."""
    faces = {target.rpartition(".")[2] for target in face_names()}
    assert {"Session", "compress"} <= faces
    unnamed = {
        each.name: missing
        for each in public_functions()
        if faces & set(each.name.split("."))
        and not is_setter(each.node)
        and not is_overload(each.node)
        and (missing := arguments_of(each.node) - words_of(each.own + each.around))
    }
    assert unnamed == {}


def face_names() -> Iterator[str]:
    for node in ast.walk(syntax(SOURCE / "daf" / "__init__.py")):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def arguments_of(function: ast.FunctionDef) -> set[str]:
    spec = function.args
    return {each.arg for each in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs)} - {
        "self",
        "cls",
    }


def is_setter(function: ast.FunctionDef) -> bool:
    return any(
        isinstance(each, ast.Attribute) and each.attr == "setter"
        for each in function.decorator_list
    )


def test_every_codec_of_a_gpu_is_called() -> None:
    """No kernel is kept that only its own tests run."""
    path = SOURCE / "daf" / "kernels" / "triton" / "codecs.py"
    offered = {each.name for each in syntax(path).body if is_public(each)}
    assert {"encode_values", "apply_mask"} <= offered
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
