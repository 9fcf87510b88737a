"""``daf bench ablations``: SAGE's four techniques and DAF's three mechanisms in a training step.

Each stage trains in a process of its own, the whole batch at once, in turn with plain PyTorch:
peak, bytes held for backward, step. Nothing is planned and no budget holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from daf_bench.ablations.stages import DAF, SAGE
from daf_bench.harness.result import BenchResult
from daf_bench.peers import run as peers
from daf_bench.peers.table import PUBLISHED, Asked, by_peer
from daf_bench.peers.verdicts import Row, Rows, ran
from daf_bench.workloads.sources import Sources, default_sources

WORKLOADS = ("w1", "w3", "w4")  # ResNet-18, BERT-small, GPT-2's shape
WHOLE = "as published"  # what DAF's other stages are compared with
BASE = "plain, no compiler loaded"  # as stages are: plain's optimizer imports torch's compiler


@dataclass(frozen=True, slots=True)
class AblationsJob:
    """What is run; ``steps`` are those timed."""

    workloads: tuple[str, ...] = WORKLOADS
    steps: int = 6
    is_small: bool = False
    sources: Sources = field(default_factory=default_sources)


def quick_job() -> AblationsJob:
    """The smallest workload with small inputs: a minute; times say little."""
    return AblationsJob(("w6",), steps=2, is_small=True)


def run(
    job: AblationsJob, rows_file: Path | None = None, on_progress: peers.Report = lambda *_: None
) -> BenchResult:
    """Run it, going on where ``rows_file`` ends."""
    asked = peers.PeersJob(
        *(job.workloads, (by_peer(BASE, "no-compiler"), *map(_asked, (*SAGE, *DAF)))),
        steps=job.steps,
        step_counts=(),
        has_duels=False,
        is_small=job.is_small,
        sources=job.sources,
    )
    rows = peers.run(asked, rows_file, on_progress).rows
    notes = (
        f"{', '.join(job.workloads)}; {'small' if job.is_small else 'full'} sizes; {job.steps} "
        f"timed steps in turn with plain's; data: {job.sources.described()}",
        f"SAGE's come one after another: {', '.join(SAGE)}; nothing lossy, though "
        "fused operators add in another order",
        f"DAF's differ in one thing each from codes of tensors' ranges with hybrid reduction, one "
        f"native pass and the paged pool ({WHOLE})",
    )
    return BenchResult("ablations", rows, figures_of(rows), notes)


def _asked(name: str) -> Asked:
    return Asked(name, PUBLISHED, {"peer": name})


def figures_of(rows: Rows) -> dict[str, float]:
    """Of each workload: saved bytes and peak, plain's ÷ the stage's, and its step ÷ plain's.

    Plain's peak is that without torch's compiler.

    ``without_*``: a stage of DAF's, its step or bytes ÷ those of the whole.
    """
    figures: dict[str, float] = {"rows": len(rows), "failed": len(rows) - len(ran(rows))}
    for name in dict.fromkeys(row["workload"] for row in rows):
        own = {row["contestant"]: row for row in ran(rows) if row["workload"] == name}
        figures |= dict(_of_workload(name, own, [*SAGE, WHOLE]))
        figures |= dict(_without(name, own))
    return figures


def _of_workload(
    name: str, own: dict[str, Row], stages: Sequence[str]
) -> Iterator[tuple[str, float]]:
    plain = own.get(BASE)
    for stage in stages if plain else ():
        if (row := own.get(stage)) is not None:
            label = f"{name}/{stage}"
            yield f"{label}/saved_ratio", plain["saved_bytes_peak"] / row["saved_bytes_peak"]
            yield f"{label}/peak_ratio", plain["peak_ratio"] / row["peak_ratio"]
            yield f"{label}/step_ratio", row["step_ratio"] / plain["step_ratio"]


def _without(name: str, own: dict[str, Row]) -> Iterator[tuple[str, float]]:
    whole = own.get(WHOLE)
    for stage in DAF if whole else ():
        if stage != WHOLE and (row := own.get(stage)) is not None:
            label = f"{name}/{stage}"
            yield f"{label}/step_vs_whole", row["step_ratio"] / whole["step_ratio"]
            yield f"{label}/saved_vs_whole", row["saved_bytes_peak"] / whole["saved_bytes_peak"]
            yield f"{label}/peak_vs_whole", row["peak_ratio"] / whole["peak_ratio"]
