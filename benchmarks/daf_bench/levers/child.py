"""One process that measures a workload once, and plans it within one budget after another.

``python -m daf_bench.levers.child JSON`` is that process.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from tempfile import TemporaryDirectory
from typing import Any

import daf
from daf.core.errors import BudgetError
from daf.core.plan import Plan
from daf.core.policy import Method, Policy, Treatment
from daf.memory import process_memory
from daf.offload.spill import SpillOptions
from daf.planning import planner
from daf.planning.bit_widths import is_lossy
from daf.session.arguments import Operators
from daf.session.plan_selector import PlanSelector
from daf_bench.harness.peer_methods import plain_step
from daf_bench.harness.subprocess_channel import serve
from daf_bench.workloads import built_workload
from daf_bench.workloads.trainable import Trainable

STEPS = 3  # at each budget
OPTIMAL = "optimal"
_CODED = frozenset({Method.ROTATED, Method.MINMAX, Method.DERIVATIVE})


@dataclass(frozen=True, slots=True)
class Planned:
    """What one process plans; ``tolerance``: None is the default; ``operators``: a session's."""

    workload: str
    folder: str | None
    is_small: bool
    tolerance: float | None = None
    operators: Operators = "auto"


def levers_of(plan: Plan, examples: int) -> dict[str, int]:
    """The levers that a plan pulls: at how many sites, or 1."""
    policy = plan.policy
    treatments = (*policy.by_site.values(), *(() if policy.by_site else policy.by_need.values()))
    found = Counter(name for each in treatments for name in _of_treatment(each))
    found.update(_of_policy(policy))
    found["micro-batches"] += plan.micro_batch < examples
    found["released gradients"] += plan.release_gradients
    return {name: count for name, count in sorted(found.items()) if count}


def _of_treatment(treatment: Treatment) -> Iterator[str]:
    method = treatment.method
    yield f"{method} {treatment.bits}" if method in _CODED else str(method)
    for field in ("by_channel", "on_host", "whole"):
        if getattr(treatment, field):
            yield f"{method}: {field}"


def _of_policy(policy: Policy) -> dict[str, int]:
    operators = {f"operator {name}": 1 for name in policy.operators}
    return operators | {"replayed modules": len(policy.replayed)}


def answer(work: Trainable, planned: Planned, command: str, *words: str) -> dict[str, Any]:
    """Carry out ``plain`` (its peak) or ``plans BYTES …`` (the largest budget first)."""
    process_memory.reset_peak()
    if command == "plain":
        for step in range(2):
            plain_step(work.model, work.optimizer, work.batch(step), work.task.loss)
        return {"peak_bytes": process_memory.peak_bytes()}
    if command == "plans":
        return {"plans": [*_plans(work, planned, [int(word) for word in words])]}
    raise ValueError(f"unknown command {command!r}; there are plain and plans")


def _plans(work: Trainable, planned: Planned, budgets: list[int]) -> Iterator[dict[str, Any]]:
    """One row a budget, after steps in which a search beside them may have found a better plan.

    All may be pulled that a user must allow: what does not fit may go to disk, and gradients may
    be released within backward.
    """
    with TemporaryDirectory() as folder:
        session = daf.Session(
            work.model,
            work.optimizer,
            budgets[0],
            tolerance=planned.tolerance,
            operators=planned.operators,
            release_gradients="auto",
            spill=SpillOptions(folder, allow_memory=True),
            cache=False,
        )
        least_bytes: int | None = 0  # None: refused, and no least is known
        for place, budget_bytes in enumerate(budgets):
            row: dict[str, Any] = {"budget_bytes": budget_bytes}
            batches = [work.batch(place * STEPS + step) for step in range(STEPS)]
            try:
                if least_bytes is None or budget_bytes < least_bytes:
                    raise BudgetError("a larger budget was refused", least_bytes)
                session.budget = budget_bytes
                for batch in batches:
                    report = session.step(batch, work.task.loss)
            except BudgetError as error:
                session.budget, least_bytes = budgets[0], error.least_bytes
                yield row | {"least_bytes": least_bytes}
                continue
            selector = session._plan_controller.selector
            plan, profile = selector.plan, selector._measured.own
            assert plan is not None
            yield row | {
                "levers": levers_of(plan, profile.batch_size),
                "micro_batch": plan.micro_batch,
                "predicted_step_ms": plan.predicted_step_ms,
                "peak_bytes": report.charged_peak_bytes,
                "policies_ms": policies_ms(selector, budget_bytes),
            }


def policies_ms(selector: PlanSelector, budget_bytes: int) -> dict[str, float]:
    """The predicted step of each named policy that fits, by what the session measured.

    All are searched to the end, as plans are beside training. A policy that codes whatever the
    tolerance has none where nothing may be coded.
    """
    found: dict[str, float] = {}
    for name in planner.policy_names():
        constraints = replace(selector.constraints, policy=name)
        profiles = selector._planned if name == OPTIMAL else (selector._measured.own,)
        try:
            plan = planner.make_plans(profiles, selector.modelled(budget_bytes), constraints)[0]
        except BudgetError:
            continue
        if constraints.tolerance != 0.0 or not is_lossy(plan.policy):
            found[name] = plan.predicted_step_ms
    return found


if __name__ == "__main__":
    PLANNED = Planned(**json.loads(sys.argv[1]))
    os.environ["DAF_CACHE"] = ""
    WORK = built_workload(PLANNED.workload, PLANNED.folder, is_small=PLANNED.is_small)
    serve(lambda command, *words: answer(WORK, PLANNED, command, *words))
