"""Runs the cases, keeps the record of an earlier version, and counts."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from daf_bench.conformance import families, modules, operators, vision
from daf_bench.conformance.case import Case
from daf_bench.conformance.pool import run_apart
from daf_bench.conformance.situations import SITUATIONS
from daf_bench.conformance.sizable import sizable_cases
from daf_bench.conformance.trial import LEVERS, try_case
from daf_bench.harness.result import BenchResult
from daf_bench.harness.row_log import RowLog

Row = dict[str, Any]
Report = Callable[[str, int, int], None]
RECORD = Path(__file__).parents[2] / "results" / "conformance_0_1_0.json"
GROUPS = ("situations", "operators", "modules", "transformers", "timm", "torchvision", "sizable")
PACKAGES = ("torch", "transformers", "timm", "torchvision")
# Which ways show that a lever acted, and that the result was right.
_SHOWN_BY = {
    "split": ("split", "every", "tight"),
    "replay": ("replay", "every", "tight"),
    "recomputed": ("exact", "compress exact", "tight"),
    "fused": ("fused", "compress fused", "tight"),
    "coded": ("coded session", "coded compress"),
}
# Proofs are timed on steps of at least this long and batches of at least so many.
SLOW_MS, LARGE_BATCH = 50.0, 16


@dataclass(frozen=True, slots=True)
class ConformanceJob:
    """Which groups, the seed of weights and data, and how cases are run.

    ``stride``: every how many-th case of a group is tried; ``limit_s``: of one case.
    """

    groups: tuple[str, ...] = GROUPS
    seed: int = 0
    stride: int = 1
    workers: int = 2
    limit_s: float = 600.0


def quick_job() -> ConformanceJob:
    """Every twentieth case: some minutes."""
    return ConformanceJob(stride=20)


def cases_of(group: str) -> tuple[list[Case], str]:
    """Return a group's cases, and why there are none if a package is missing."""
    try:
        return _GROUPS[group](), ""
    except ImportError as error:
        return [], f"{group} skipped: {error}"


_GROUPS: dict[str, Callable[[], list[Case]]] = {
    "situations": lambda: list(SITUATIONS),
    "operators": operators.operator_cases,
    "modules": modules.module_cases,
    "transformers": families.family_cases,
    "timm": vision.timm_cases,
    "torchvision": vision.torchvision_cases,
    "sizable": sizable_cases,
}


def run(
    job: ConformanceJob,
    rows_file: Path | None = None,
    on_progress: Report = lambda *_: None,
    record: Path = RECORD,
) -> BenchResult:
    """Try every case, going on where ``rows_file`` ends; ``record``: what 0.1.0 did."""
    torch.set_num_threads(1)  # before anything forks
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    warnings.simplefilter("ignore")
    cases, notes = [], []
    for group in job.groups:
        found, reason = cases_of(group)
        cases += found[:: job.stride]
        notes += [reason] if reason else []
    log = RowLog(rows_file, {"seed": job.seed})
    left = [case for case in cases if not log.has(case.name)]
    done = len(cases) - len(left)
    by_name = {case.name: case for case in left}
    attempt = partial(_attempt, by_name, job.seed)
    for place, (name, row) in enumerate(
        run_apart(attempt, list(by_name), job.workers, job.limit_s)
    ):
        kept = {"case": name, "group": by_name[name].group, **row}
        log.row(name, partial(dict, kept))
        on_progress(name, done + place + 1, len(cases))
    order = {case.name: place for place, case in enumerate(cases)}
    rows = sorted((row for row in log.rows if row["case"] in order), key=lambda r: order[r["case"]])
    notes.append(f"seed {job.seed}; {len(cases)} cases listed")
    notes.append(f"with {', '.join(_versions())}")
    return BenchResult("conformance", rows, figures_of(rows, read_record(record)), tuple(notes))


def _versions() -> Iterable[str]:
    """Yield the packages whose models are tried, with their versions."""
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            yield f"{name} {version(name)}"


def _attempt(cases: dict[str, Case], seed: int, name: str) -> Row:
    return try_case(cases[name], seed)


def figures_of(rows: Sequence[Row], record: dict[str, list[str]]) -> dict[str, float]:
    """Count; ``record``: the levers that acted rightly before, by case."""
    tried = [row for row in rows if row["outcome"] != "skipped"]
    trained = [row for row in tried if "ways" in row]
    acted = {lever: [row for row in trained if lever in acted_levers(row)] for lever in LEVERS}
    figures: dict[str, float] = {
        "tried": len(tried),
        "deferred": sum(row["outcome"] == "deferred" for row in rows),
        "skipped": sum(row["outcome"] == "skipped" for row in rows),
        "silent_differences": sum(is_different(row) for row in trained),
        "crashes": sum(row["outcome"] in ("crashed", "hung", "failed") for row in tried),
        "refused_wrongly": sum(bool(ended(row, "raised")) for row in trained),
        "over_budget": sum(is_over_budget(row) for row in trained),
        **{f"{lever}_acted": len(found) for lever, found in acted.items()},
        "not_bitwise": sum(any(w.get("bitwise") is False for w in _ways(r)) for r in trained),
        "prepare_changed": sum(any("prepare_changed" in w for w in _ways(r)) for r in trained),
        "coded_not_finite": sum(bool(ended(row, "not finite")) for row in trained),
        "coded_far": sum(any(way.get("far") for way in _ways(row)) for row in trained),
        "not_judged": sum(bool(ended(row, "not judged")) for row in trained),
    }
    lost = levers_lost(trained, record)
    if record:
        before = [lever for row in trained for lever in record.get(row["case"], ())]
        figures["levers_before"] = len(before)
        figures["levers_lost_share"] = len(lost) / len(before) if before else 0.0
    costs = [cost for row in trained if (cost := proof_cost(row)) is not None]
    return figures | ({"proof_cost_worst": max(costs)} if costs else {})


def _ways(row: Row) -> Iterable[Row]:
    return row["ways"].values()


def ended(row: Row, outcome: str) -> list[str]:
    """Return the ways of a case that ended so."""
    return [name for name, way in row["ways"].items() if way["outcome"] == outcome]


def is_different(row: Row) -> bool:
    """True if a way changed what is trained without a word."""
    return bool(ended(row, "wrong"))


def is_over_budget(row: Row) -> bool:
    """True if a session held more than its budget."""
    return any(way.get("overrun_bytes") or way.get("above_bytes") for way in _ways(row))


def acted_levers(row: Row) -> list[str]:
    """Return the levers that acted in a case."""
    return [lever for lever in LEVERS if any(lever in way for way in _shown(row, lever))]


def _shown(row: Row, lever: str) -> list[list[str]]:
    named = (row["ways"].get(name, {}) for name in _SHOWN_BY[lever])
    return [way.get("acted", []) for way in named]


def rightly_acted(row: Row) -> list[str]:
    """Return the levers that acted, where every way in which they did was right."""
    return [
        lever
        for lever in acted_levers(row)
        if all(
            way["outcome"] in ("right", "not judged")
            for name in _SHOWN_BY[lever]
            if lever in (way := row["ways"].get(name, {})).get("acted", [])
        )
    ]


def levers_lost(rows: Sequence[Row], record: dict[str, list[str]]) -> list[tuple[str, str]]:
    """Return (case, lever) where a lever acted rightly before and does not act now."""
    return [
        (row["case"], lever)
        for row in rows
        for lever in record.get(row["case"], ())
        if lever not in acted_levers(row)
    ]


def proof_cost(row: Row) -> float | None:
    """Return the time of proofs over that of a plain step; None where it is not asked or told.

    Of several measurements the least: load only adds time.
    """
    times = [way["proof_ms"] for way in _ways(row) if way.get("proof_ms") is not None]
    if not times or row["plain_ms"] < SLOW_MS or row["examples"] < LARGE_BATCH:
        return None
    return float(min(times) / row["plain_ms"])


def troubles(rows: Sequence[Row]) -> list[str]:
    """Return a line for every way that ended otherwise than it should."""
    found = []
    for row in rows:
        if row["outcome"] in ("crashed", "hung", "failed"):
            found.append(f"{row['case']}: {row['outcome']}: {row.get('words', '')}")
        for name, way in row.get("ways", {}).items():
            if way["outcome"] in ("wrong", "raised", "not finite"):
                found.append(f"{row['case']}, {name}: {way['outcome']}: {way.get('words', '')}")
    return found


def as_record(result: BenchResult) -> str:
    """Return the record of a version: per case the levers that acted, rightly, and what failed."""
    cases = {
        row["case"]: {
            "outcome": row["outcome"],
            "acted": acted_levers(row),
            "rightly": rightly_acted(row),
            "ways": {name: way["outcome"] for name, way in row["ways"].items()},
        }
        if "ways" in row
        else {"outcome": row["outcome"]}
        for row in result.rows
    }
    head = json.loads(replace(result, rows=[]).as_json())
    content = {**head, "cases": cases}
    del content["rows"]
    return json.dumps(content, indent=1) + "\n"


def read_record(path: Path) -> dict[str, list[str]]:
    """Return the levers that acted rightly, by case; empty without the file."""
    if not path.exists():
        return {}
    cases: dict[str, Row] = json.loads(path.read_text())["cases"]
    return {name: case["rightly"] for name, case in cases.items() if "rightly" in case}
