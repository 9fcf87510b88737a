"""The process behind a ``Contestant``: builds its workload and obeys commands of a word."""

from __future__ import annotations

import json
import sys
from typing import Any

from daf_bench.harness.subprocess_channel import serve
from daf_bench.harness.worker import Entry
from daf_bench.harness.workload import Workload


def answer(workload: Workload, command: str) -> dict[str, Any]:
    """Carry out ``ready``, ``step``, ``fits`` or ``facts``."""
    if command == "step":
        return workload.step()
    if command == "fits":
        return {"fits": workload.fits()}
    if command == "facts":
        return workload.facts()
    if command == "ready":
        return {}
    raise ValueError(f"unknown command {command!r}; there are ready, step, fits and facts")


if __name__ == "__main__":
    WORKLOAD = Workload(Entry(**json.loads(sys.argv[1])))
    serve(lambda command: answer(WORKLOAD, command))
