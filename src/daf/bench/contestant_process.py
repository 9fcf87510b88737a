"""The process behind a ``Contestant``: builds its workload and obeys commands of a line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from daf.bench.contestant import Entry
from daf.bench.workload import Workload
from daf.errors import BudgetError, PlatformError


def serve(entry: Entry) -> None:
    """Answer ``ready``, ``step``, ``facts`` and ``gradient FILE`` until standard input ends."""
    workload: Workload | None = None
    for line in sys.stdin:
        try:
            workload = workload or Workload(entry)
            answer = _answer(workload, line.strip())
        except (BudgetError, PlatformError) as error:
            answer = {"refused": str(error)}
        print(json.dumps(answer), flush=True)


def _answer(workload: Workload, line: str) -> dict[str, Any]:
    command, _, argument = line.partition(" ")
    if command == "step":
        return workload.step()
    if command == "facts":
        return workload.facts()
    if command == "gradient":
        workload.write_gradient(Path(argument))
        return {}
    if command == "ready":
        return {}
    raise ValueError(f"unknown command {command!r}; there are ready, step, facts and gradient")


if __name__ == "__main__":
    serve(Entry(**json.loads(sys.argv[1])))
