"""Personalisation as a device would do it: a network adapted to a new speaker in few megabytes.

One process teaches the network the other speakers and leaves its weights; a fresh one, whose floor
is read before the model exists, adapts them to the new speaker.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from daf.core.errors import DataError
from daf_bench.accuracy.tasks import Effort
from daf_bench.harness.subprocess_channel import Child

MB = 10**6
PROCESS = "daf_bench.accuracy.personalisation_process"
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class BudgetTask:
    """``path``: the spoken digits; ``megabytes`` above the floor for ``daf``."""

    path: Path
    megabytes: int = 64

    @property
    def name(self) -> str:
        """As rows and figures have it."""
        return "personalisation-budget"

    @property
    def policies(self) -> tuple[str, ...]:
        """Plainly without a limit, and within the megabytes."""
        return "plain", f"within-{self.megabytes}MB"

    def measure(self, policy: str, seed: int, effort: Effort) -> Row:
        """Accuracy on the new speaker before and after, and the peak above the floor (bytes).

        Raises:
            DataError: the data are not there.
        """
        if not self.path.exists():
            raise DataError(f"asked for spoken digits in {self.path}; there is no such file")
        with tempfile.TemporaryDirectory(prefix="daf-") as folder:
            weights = Path(folder) / "general.pt"
            told = {
                "path": str(self.path),
                "weights": str(weights),
                "seed": seed,
                "effort": asdict(effort),
                "above_floor": None if policy == "plain" else self.megabytes * MB,
            }
            for command, label in (("learn", "the other speakers"), ("adapt", policy)):
                process = Child(PROCESS, told, label)
                answer = process.ask(command)
                process.end()
        return answer

    def figures(self, rows: Iterable[Row]) -> dict[str, float]:
        """Means over seeds, and the highest peak."""
        found = {}
        listed = list(rows)
        for policy in dict.fromkeys(row["policy"] for row in listed):
            group = [row for row in listed if row["policy"] == policy]
            name = f"{self.name}/{policy}"
            found[f"{name}/before_percent"] = mean(row["before_percent"] for row in group)
            found[f"{name}/after_percent"] = mean(row["after_percent"] for row in group)
            above = max(row["peak_bytes"] - row["floor_bytes"] for row in group)
            found[f"{name}/peak_above_floor_mb"] = above / MB
        return found
