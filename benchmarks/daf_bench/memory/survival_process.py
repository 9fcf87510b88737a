"""One attempt to train a random model; ``python -m daf_bench.memory.survival_process JSON``.

Its outcome is one JSON object on standard output; the system's kill leaves none.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from daf.core.errors import BudgetError
from daf.memory import process_memory
from daf.session.session import Session
from daf.torch_compat import compiler
from daf_bench.harness.peer_methods import plain_step
from daf_bench.memory.random_models import Built, build, draw
from daf_bench.memory.survival import Attempt


def attempt(asked: Attempt) -> dict[str, Any]:
    """Train some steps, plain or within the budget: finished, refused, or raised while training."""
    process_memory.warm_up()
    compiler.keep_out()
    floor = process_memory.resident_bytes()
    work = build(draw(asked.seed))
    found = _plain(work, asked) if asked.budget_bytes is None else _session(work, asked, floor)
    return {"floor_bytes": floor, **found}


def _plain(work: Built, asked: Attempt) -> dict[str, Any]:
    process_memory.reset_peak()
    for _ in range(asked.steps):
        plain_step(work.model, work.optimizer, work.batch, work.loss)
    return {"outcome": "finished", "peak_bytes": process_memory.peak_bytes()}


def _session(work: Built, asked: Attempt, floor: int) -> dict[str, Any]:
    session = Session(
        work.model, work.optimizer, asked.budget_bytes, seed=asked.seed, baseline_bytes=floor
    )
    with session:
        try:
            session.prepare(work.batch, work.loss)
        except BudgetError as error:
            return {"outcome": "refused", "least_bytes": error.least_bytes, "words": str(error)}
        predicted = session.predicted_peak_bytes
        try:
            reports = [session.step(work.batch, work.loss) for _ in range(asked.steps)]
        except BudgetError as error:
            return {"outcome": "raised", "words": str(error)}
        return {
            "outcome": "finished",
            "peak_bytes": max(session.peak_bytes, *(each.charged_peak_bytes for each in reports)),
            "predicted_peak_bytes": predicted,
            "micro_batch": session.plan.micro_batch if session.plan else None,
        }


if __name__ == "__main__":
    print(json.dumps(attempt(Attempt(**json.loads(sys.argv[1])))))
