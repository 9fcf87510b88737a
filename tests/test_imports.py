"""Imports point one way: a file imports only from rows beneath its own, and never in a circle."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TypeGuard

SOURCE = Path(__file__).parents[1] / "src"

# From the top of the design's picture to its bottom; the first match wins.
ROWS = (
    ("daf.core", 0),
    ("daf.torch_compat", 1),
    ("daf.budget", 4),
    ("daf.codecs", 2),
    ("daf.pool", 2),
    ("daf.offload", 3),
    ("daf.saved_tensors", 3),
    ("daf.recompute", 3),
    ("daf.operators", 3),
    ("daf.capture", 3),
    ("daf.step", 3),
    ("daf.profiling", 4),
    ("daf.session.session", 5),
    ("daf.cli", 7),
    ("daf.integrations", 7),
    ("daf.__main__", 8),
    ("daf_bench", 7),
    ("daf.training", 7),
    ("daf.report", 6),
    ("daf.session.session", 5),
    ("daf.session.plan_controller", 5),
    ("daf.session.counters", 5),
    ("daf.session.budget_controller", 5),
    ("daf.session.step_retries", 5),
    ("daf.session.step_profiles", 5),
    ("daf.core.step_report", 0),
    ("daf.session.arguments", 5),
    ("daf.session.sensitivity_tracker", 5),
    ("daf.session.noise_controller", 5),
    ("daf.session.rollback", 5),
    ("daf.profiling.model_memory", 3),
    ("daf.profiling.optimizer_probe", 2),
    ("daf.profiling.profiler", 4),
    ("daf.profiling.profile_assembly", 4),
    ("daf.session.plan_selector", 5),
    ("daf.session.plan_autotuner", 4),
    ("daf.core.json_dataclasses", 0),
    ("daf.profiling.device_speeds", 4),
    ("daf.planning", 4),
    ("daf.budget", 4),
    ("daf.sensitivity.result", 2),
    ("daf.sensitivity.site_groups", 2),
    ("daf.sensitivity", 4),
    ("daf_bench.accuracy.bit_allocation", 4),
    ("daf.sensitivity.monitors", 2),
    ("daf.execution", 3),
    ("daf.files", 2),
    ("daf.store", 2),
    ("daf.memory", 2),
    ("daf.kernels", 1),
    ("daf.core.plan", 0),
    ("daf.core.profile", 0),
    ("daf.core.errors", 0),
    ("daf.core.units", 0),
    ("daf._native", 0),
)
FACADE = "daf"


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(path: Path, known: set[str]) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            base = node.module or ""
            found |= {
                full if (full := f"{base}.{alias.name}") in known else base for alias in node.names
            }
    return {name for name in found if name == FACADE or name.startswith("daf.")}


def import_graph() -> dict[str, set[str]]:
    paths = {module_name(path): path for path in SOURCE.rglob("*.py")}
    known = set(paths)
    return {name: imported_modules(path, known) - {name} for name, path in paths.items()}


def row(name: str) -> int:
    for prefix, rank in ROWS:
        if name == prefix or name.startswith(prefix + "."):
            return rank
    raise AssertionError(f"{name} has no row; add it to ROWS where the design puts it")


def test_no_import_points_upward() -> None:
    graph = import_graph()
    assert len(graph) > 5
    upward = [
        f"{name} -> {target}"
        for name, targets in graph.items()
        if name != FACADE
        for target in targets
        if target == FACADE or row(target) > row(name)
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


def test_a_package_s_own_facade_is_not_imported_from_within() -> None:
    inside = {
        f"{name} -> {target}"
        for name, targets in import_graph().items()
        for target in targets
        if target == FACADE and name != "daf.__main__"
    }
    assert inside == set()


def test_the_planner_needs_no_torch() -> None:
    graph = import_graph()
    paths = {module_name(path): path for path in SOURCE.rglob("*.py")}
    reached = {name for name in graph if name.startswith("daf.planning")}
    while more := {target for name in reached for target in graph[name]} - reached:
        reached |= more
    assert "daf.core.profile" in reached
    importing = {name for name in reached if "torch" in top_level_imports(paths[name])}
    assert importing == set()


def top_level_imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
    return found


def test_every_codec_of_a_gpu_is_called() -> None:
    """No kernel is kept that only its own tests run."""
    path = SOURCE / "daf" / "kernels" / "triton" / "codecs.py"
    offered = {each.name for each in ast.parse(path.read_text()).body if is_public(each)}
    assert {"encode_rotated", "apply_mask"} <= offered
    assert offered <= attributes_of("triton_codecs", SOURCE)


def is_public(node: ast.stmt) -> TypeGuard[ast.FunctionDef]:
    return isinstance(node, ast.FunctionDef) and not node.name.startswith("_")


def attributes_of(name: str, folder: Path) -> set[str]:
    """What is written behind ``name.`` anywhere in a folder's files."""
    nodes = (
        each for path in folder.rglob("*.py") for each in ast.walk(ast.parse(path.read_text()))
    )
    return {
        each.attr
        for each in nodes
        if isinstance(each, ast.Attribute)
        and isinstance(each.value, ast.Name)
        and each.value.id == name
    }
