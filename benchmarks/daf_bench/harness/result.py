"""What every benchmark returns: the machine, rows of measurements, and named figures."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch

from daf.budget.limits import cgroup_limit_bytes
from daf.budget.system import THIS_SYSTEM


@dataclass(frozen=True, slots=True)
class BenchResult:
    """One benchmark's outcome; ``figures`` are the numbers that documents may quote."""

    name: str
    rows: list[dict[str, Any]]
    figures: dict[str, float]
    notes: tuple[str, ...] = ()

    def as_json(self) -> str:
        """One JSON object: machine, rows, figures, notes."""
        content = {
            "benchmark": self.name,
            "machine": machine_facts(),
            "rows": self.rows,
            "figures": self.figures,
            "notes": list(self.notes),
        }
        return json.dumps(content, indent=1)


def machine_facts() -> dict[str, Any]:
    """What a reader must know of the machine to compare numbers."""
    return {
        "processor": _processor_name(),
        "cores": os.cpu_count(),
        "memory_bytes": THIS_SYSTEM.machine()["MemTotal"],
        "cgroup_limit_bytes": cgroup_limit_bytes(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "torch_threads": torch.get_num_threads(),
    }


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median over interleaved pairs of ours ÷ theirs."""
    pairs = zip(ours, theirs, strict=True)
    return statistics.median(one / other for one, other in pairs)
