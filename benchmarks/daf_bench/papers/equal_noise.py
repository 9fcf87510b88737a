"""What DAF as published and our codes hold for backward at equal noise of the gradient.

Each codes a whole batch at several widths, the published one with a range per tensor. Noise is the
error of the gradient, relative to plain PyTorch's, from the same random state; above 1 nothing is
left of the gradient, and a width is not compared. Both run PyTorch's own operators: fused ones
round otherwise, which where channels hardly vary outweighs what codes of eight bits add.

Ours holds at a published width's noise what lies between our two widths about it, bytes over the
logarithm of the noise; no less than our coarsest. Below our finest's, so many of the sites are
exact that the others' noise is as much.

``python -m daf_bench.papers.equal_noise JSON`` measures one workload.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

import daf
from daf.core.policy import ranged_policy
from daf_bench.harness.row_log import Row
from daf_bench.papers.coded_gradients import answer_with, gradient, measured_by, relative_error
from daf_bench.workloads.trainable import Trainable

WIDTHS = (1, 2, 4, 8)
PASSES = 2


class Coded(NamedTuple):
    """What one width holds (bytes at the peak), and the gradient's relative error."""

    bits: int
    saved_bytes: int
    error: float


def measured(workload: str, folder: Path | None, *, is_small: bool) -> Row:
    """Return the row of a workload, measured in a process of its own."""
    found = measured_by("daf_bench.papers.equal_noise", workload, folder, is_small=is_small)
    return {"part": "equal noise", "workload": workload, **found}


def ratios(row: Row) -> list[float]:
    """Return by published width what it holds over what ours holds at its noise, if below 1."""
    ours = [Coded(*each) for each in row["ours"]]
    published = [Coded(*each) for each in row["published"]]
    return [
        each.saved_bytes / bytes_at(each.error, ours, row["exact_bytes"])
        for each in published
        if 0.0 < each.error < 1.0
    ]


def saved_ratio(rows: Iterable[Row]) -> float:
    """Return the median over workloads of each one's median over widths."""
    return median(median(found) for row in rows if (found := ratios(row)))


def bytes_at(error: float, ours: Sequence[Coded], exact_bytes: int) -> float:
    """Return what codes of ours hold at this noise."""
    known = sorted(ours, key=lambda each: -each.error)
    if error >= known[0].error:
        return known[0].saved_bytes
    for coarse, fine in pairwise(known):
        if fine.error <= error:
            share = math.log(coarse.error / error) / math.log(coarse.error / fine.error)
            return coarse.saved_bytes + share * (fine.saved_bytes - coarse.saved_bytes)
    share = (error / known[-1].error) ** 2
    return share * known[-1].saved_bytes + (1.0 - share) * exact_bytes


def _measure(work: Trainable) -> Row:
    plain = gradient(work, daf.compress(work.model, bits="plain"))
    exact = daf.compress(work.model, bits="exact")
    gradient(work, exact)

    def coded(bits: int, ours: daf.compress) -> Coded:
        found = [relative_error(gradient(work, ours), plain) for _ in range(PASSES)]
        root = math.sqrt(sum(each**2 for each in found) / PASSES)
        return Coded(bits, ours.stats.held_peak_bytes, root)

    ranged = [(bits, ranged_policy(bits, "tensor")) for bits in WIDTHS]
    return {
        "exact_bytes": exact.stats.held_peak_bytes,
        "ours": [coded(b, daf.compress(work.model, bits=b)) for b in WIDTHS],
        "published": [coded(b, daf.compress(work.model, policy=each)) for b, each in ranged],
    }


if __name__ == "__main__":
    answer_with(_measure)
