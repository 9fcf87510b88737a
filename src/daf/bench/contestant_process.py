"""The process behind a ``Contestant``: builds its workload and obeys commands of a line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from daf.bench.child import serve
from daf.bench.contestant import Entry
from daf.bench.workload import Workload
from daf.errors import BudgetError, PlatformError


class _Work:
    """Builds its workload at the first command, so that a refusal to build is an answer too."""

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        self._workload: Workload | None = None

    def answer(self, command: str, *words: str) -> dict[str, Any]:
        """Carry out ``ready``, ``step``, ``facts`` or ``gradient FILE``."""
        try:
            self._workload = self._workload or Workload(self._entry)
            return _carried_out(self._workload, command, " ".join(words))
        except (BudgetError, PlatformError) as error:
            return {"refused": str(error)}


def _carried_out(workload: Workload, command: str, argument: str) -> dict[str, Any]:
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
    serve(_Work(Entry(**json.loads(sys.argv[1]))).answer)
