"""``daf bench levers``: of each treatment, its fields and each policy, where a plan chooses it.

Every workload is measured by default, exactly (a tolerance of 0) and with PyTorch's own operators,
and planned at five budgets, with all allowed that a user must allow.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from daf.core.policy import PLANNED_OPERATORS, Method
from daf.planning.planner import policy_names
from daf.session.arguments import Operators
from daf_bench.harness.result import BenchResult
from daf_bench.harness.row_log import Row, RowLog
from daf_bench.harness.subprocess_channel import Child, ContestantError
from daf_bench.levers.child import OPTIMAL, Planned
from daf_bench.workloads import WORKLOADS
from daf_bench.workloads.sources import Sources, default_sources

Report = Callable[[str, int, int], None]
NEAR = 1.01  # of the optimum's predicted step: its own search ends within one per cent
# What no plan of a model on the processor can choose by itself, and where it is chosen.
ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {
        Method.RANGED: "by the policies `daf` and `daf-channels` only, as published",
        Method.REGISTERED: "by `compress` and sessions that name a registered codec",
        "ranged: by_channel": "by the policy `daf-channels` only",
        "on_host": "for a model on a GPU, with `host_bytes`",
    }
)
_BITS = {Method.ROTATED: range(1, 5), Method.MINMAX: (8,), Method.DERIVATIVE: (2, 3, 4)}


def known_levers() -> list[str]:
    """Every lever that there is, by the names that rows give them."""
    found = ["micro-batches", "released gradients", "replayed modules"]
    found += [f"operator {name}" for name in sorted(PLANNED_OPERATORS)]
    for method in (each for each in Method if each is not Method.REPLAY):  # of modules, above
        bits = _BITS.get(method, ())
        found += [f"{method} {each}" for each in bits] or [str(method)]
    return [*found, "rotated: whole", "ranged: by_channel", "on_host"]


@dataclass(frozen=True, slots=True)
class LeversJob:
    """``shares`` of plain's peak are the budgets; ``tolerances``: None is the default.

    ``without_ours``: are PyTorch's operators asked for once, too?
    """

    workloads: tuple[str, ...] = tuple(WORKLOADS)
    shares: tuple[float, ...] = (0.75, 0.5, 0.35, 0.25, 0.2)
    tolerances: tuple[float | None, ...] = (None, 0.0)
    without_ours: bool = True
    is_small: bool = False
    sources: Sources = field(default_factory=default_sources)


def quick_job() -> LeversJob:
    """Small inputs of one workload at two budgets: under a minute."""
    return LeversJob(("w6",), shares=(0.95, 0.9), without_ours=False, is_small=True)


def run(
    job: LeversJob, rows_file: Path | None = None, on_progress: Report = lambda *_: None
) -> BenchResult:
    """Run it, going on where ``rows_file`` ends."""
    described = {**asdict(replace(job, sources=Sources())), "sources": job.sources.described()}
    del described["workloads"], described["without_ours"]  # later runs may ask for more
    log = RowLog(rows_file, described)
    points = [(name, *way) for way in _ways(job) for name in job.workloads]
    for place, (name, tolerance, operators) in enumerate(points):
        usual = "exact" if tolerance == 0.0 else "by default"
        what = f"{name}, {usual if operators == 'auto' else 'PyTorch operators'}"
        on_progress(what, place, len(points))
        log.row(what, lambda: _row(job, name, tolerance, operators))  # noqa: B023
    notes = (
        f"budgets: {', '.join(f'{share:.0%}' for share in job.shares)} of plain's peak, below 100 "
        "%; what is refused is no plan",
        "a plan takes the fused and chunked operators together, where one of them pays",
        f"a policy is as good where its plan is predicted within {NEAR - 1:.1%} of the optimum",
        *(f"{name}: {where}" for name, where in ELSEWHERE.items()),
    )
    return BenchResult("levers", log.rows, figures_of(log.rows), notes)


def _ways(job: LeversJob) -> list[tuple[float | None, Operators]]:
    """Tolerances and whose operators: everything else is allowed in any case."""
    ways: list[tuple[float | None, Operators]] = [
        (tolerance, "auto") for tolerance in job.tolerances
    ]
    return [*ways, (None, "pytorch")] if job.without_ours else ways


def _row(job: LeversJob, name: str, tolerance: float | None, operators: Operators) -> Row:
    row: Row = {"workload": name, "tolerance": tolerance, "operators": operators}
    folder = None if job.sources.folder is None else str(job.sources.folder)
    planned = Planned(name, folder, job.is_small, tolerance, operators)
    try:
        peak_bytes = _asked(planned, "plain")["peak_bytes"]
        budgets = [int(share * peak_bytes) for share in job.shares]
        found = _asked(planned, "plans", *budgets)
    except ContestantError as error:
        return row | {"failed": str(error), "plans": []}
    return row | {"plain_peak_bytes": peak_bytes, "shares": list(job.shares)} | found


def _asked(planned: Planned, command: str, *words: int) -> dict[str, Any]:
    child = Child("daf_bench.levers.child", asdict(planned), f"plans of {planned.workload}")
    try:
        return child.ask(command, *words)
    finally:
        child.end()


def plans_of(rows: Sequence[Row]) -> list[Row]:
    """The plans that were made, each with its workload and share."""
    return [
        plan | {"workload": row["workload"], "share": share, "tolerance": row["tolerance"]}
        for row in rows
        for share, plan in zip(row.get("shares", ()), row["plans"], strict=False)
        if "levers" in plan
    ]


def chosen(rows: Sequence[Row]) -> Counter[str]:
    """In how many plans each lever is pulled; a lever that none pulls counts 0."""
    found = Counter(dict.fromkeys(known_levers(), 0))
    for plan in plans_of(rows):
        names = {"on_host" if name.endswith(": on_host") else name for name in plan["levers"]}
        found.update(names)
    return found


def as_good(rows: Sequence[Row]) -> Counter[str]:
    """In how many plans each named policy is predicted as fast as the optimum."""
    found = Counter({name: 0 for name in policy_names() if name != OPTIMAL})
    for plan in plans_of(rows):
        times = plan["policies_ms"]
        found.update(
            name
            for name in found
            if name in times and times[name] <= NEAR * times.get(OPTIMAL, 0.0)
        )
    return found


def figures_of(rows: Sequence[Row]) -> dict[str, float]:
    """The figures: plans, levers, and those that no plan pulls though it could."""
    counts, plans = chosen(rows), plans_of(rows)
    every = [plan["policies_ms"] for plan in plans if plan["policies_ms"]]
    faster = sum(min(each.values()) < each.get(OPTIMAL, math.inf) / NEAR for each in every)
    return {
        "plans": len(plans),
        "refused": sum(len(row["plans"]) for row in rows) - len(plans),
        "failed": sum("failed" in row for row in rows),
        "levers": len(counts),
        "never_chosen": sum(not count and name not in ELSEWHERE for name, count in counts.items()),
        "policies_predicted_faster": faster,
    }
