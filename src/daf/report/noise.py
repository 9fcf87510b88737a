"""What a run says of gradient noise: variances (squared lengths) that codes added, and its own.

``metrics.jsonl`` holds both in those steps in which they are known.
"""

from __future__ import annotations

from daf.report.runs import Run
from daf.report.scale import Point

ADDED, OWN = "added_variance", "batch_variance"
NAMES = {OWN: "the batch's own", ADDED: "added by codes"}


def points_of(run: Run, key: str) -> list[Point]:
    """(step, value) of every step that has the quantity."""
    return [
        (float(record["step"]), float(record[key]))
        for record in run.steps
        if record.get(key) is not None
    ]


def noise_of(run: Run) -> dict[str, list[Point]]:
    """Both variances over steps by name; empty unless both were known more than once."""
    found = {name: points_of(run, key) for key, name in NAMES.items()}
    return found if all(len(points) > 1 for points in found.values()) else {}


def last_noise(run: Run) -> float | None:
    """Added variance over the batch's own, as it was last; None if it was not measured."""
    added, own = points_of(run, ADDED), points_of(run, OWN)
    return added[-1][1] / own[-1][1] if added and own and own[-1][1] else None
