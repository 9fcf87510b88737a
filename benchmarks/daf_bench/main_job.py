"""``daf bench main``: the main job against plain PyTorch, interleaved in one run.

Three questions, each with its own rows: what a step costs in time, in saved
bytes and in loss (glibc's defaults for both sides); what the whole process
holds under a budget of half of plain's peak; and who survives inside a memory
cgroup of that size.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from daf.memory.recycling_allocator import unsupported_reason
from daf_bench.harness import cgroup
from daf_bench.harness.interleaving import interleave, mean_loss, median_ms, warm_ms
from daf_bench.harness.result import BenchResult, median_ratio
from daf_bench.harness.worker import Entry, contestants

SHARED_CIFAR = "cifar10_10k_2k.npz"


@dataclass(frozen=True, slots=True)
class MainJob:
    """What is run. The defaults are the full benchmark: W1 of the design."""

    data: str
    model: str = "resnet18"
    batch_size: int = 128
    bits: int = 2
    seeds: tuple[int, ...] = (0, 1)
    steps: int = 200
    loss_from_step: int = 150
    format_steps: int = 6
    budget_steps: int = 10
    budget_fraction: float = 0.5


def quick_job(data: str) -> MainJob:
    """The same in a few minutes: too few steps for the loss to mean much."""
    return MainJob(data, seeds=(0,), steps=12, loss_from_step=6, format_steps=4, budget_steps=3)


def default_data() -> str:
    """CIFAR-10 from the measuring data where it is at hand, else scikit-learn's digits."""
    folder = Path(os.environ.get("DAF_SHARED_DATA", "../shared/data"))
    file = folder / SHARED_CIFAR
    return f"cifar10:{file}" if file.exists() else "digits"


def run(job: MainJob, on_progress: Callable[[str], None] = lambda _: None) -> BenchResult:
    """Run the whole comparison; minutes in quick form, about an hour in full on two cores."""
    memory_format, format_rows = best_memory_format(job, on_progress)
    seeds = [compare_seed(job, seed, memory_format, on_progress) for seed in job.seeds]
    plain_peak = max(row["peak_bytes"] for row in seeds[0].rows if row["contestant"] == "plain")
    budget = int(job.budget_fraction * plain_peak)
    under_budget = budget_rows(job, memory_format, budget, on_progress)
    same_allocator = same_allocator_row(job, memory_format, on_progress)
    rows = [*format_rows, *(row for seed in seeds for row in seed.rows), same_allocator]
    figures = {
        "saved_ratio": min(seed.saved_ratio for seed in seeds),
        "step_ratio": median_ratio(
            [ms for seed in seeds for ms in seed.ours_ms],
            [ms for seed in seeds for ms in seed.plain_ms],
        ),
        "loss_ratio": max(seed.loss_ratio for seed in seeds),
        "loss_ratio_mean": statistics.mean(seed.loss_ratio for seed in seeds),
        "budget_bytes": budget,
        "peak_bytes": under_budget[0]["peak_bytes"],
        "predicted_peak_bytes": under_budget[0]["predicted_peak_bytes"],
        "plain_peak_bytes": plain_peak,
        "plain_same_allocator_peak_bytes": same_allocator["peak_bytes"],
    }
    return BenchResult("main", [*rows, *under_budget], figures, _notes(job))


def _notes(job: MainJob) -> tuple[str, ...]:
    kind, _, place = job.data.partition(":")
    data = f"{kind}:{Path(place).name}" if place else kind
    return (
        f"{job.model}, {data}, batch {job.batch_size}, {job.bits} bits, {job.steps} steps",
        "loss_ratio: the worst seed's mean loss over the last steps, ours over plain's",
        "peaks are whole-process high-water marks (VmHWM), floor included",
    )


def _entry(job: MainJob, label: str, **changes: Any) -> Entry:
    return Entry(label, job.model, job.data, job.batch_size, **changes)


def best_memory_format(
    job: MainJob, on_progress: Callable[[str], None]
) -> tuple[str, list[dict[str, Any]]]:
    """Plain's faster memory format, by interleaved steps."""
    names = ("channels_last", "contiguous")
    entries = [_entry(job, f"plain {name}", memory_format=name) for name in names]
    with contestants(entries) as both:
        interleave(both, job.format_steps, on_progress, "memory format")
        medians = [median_ms(each) for each in both]
    rows = [
        {"part": "memory format", "contestant": "plain", "memory_format": name, "step_ms": median}
        for name, median in zip(names, medians, strict=True)
    ]
    return names[medians.index(min(medians))], rows


@dataclass(frozen=True, slots=True)
class SeedComparison:
    """Plain and ours for one seed, stepped in turn."""

    rows: list[dict[str, Any]]
    plain_ms: Sequence[float]
    ours_ms: Sequence[float]
    saved_ratio: float
    loss_ratio: float


def compare_seed(
    job: MainJob, seed: int, memory_format: str, on_progress: Callable[[str], None]
) -> SeedComparison:
    """Run both sides of one seed side by side, under glibc's defaults."""
    shared = {"seed": seed, "memory_format": memory_format}
    entries = [_entry(job, "plain", **shared), _entry(job, "daf", bits=job.bits, **shared)]
    with contestants(entries) as both:
        interleave(both, job.steps, on_progress, f"seed {seed}")
        facts = [each.facts() for each in both]
    losses = [mean_loss(each, job.loss_from_step) for each in both]
    rows = [
        {
            "part": "step",
            "contestant": each.entry.label,
            "seed": seed,
            "memory_format": memory_format,
            "step_ms": median_ms(each),
            "late_loss": loss,
            **fact,
        }
        for each, loss, fact in zip(both, losses, facts, strict=True)
    ]
    plain_ms, ours_ms = (warm_ms(each) for each in both)
    saved = facts[1]
    return SeedComparison(
        rows,
        plain_ms,
        ours_ms,
        saved_ratio=saved["saved_bytes_plain"] / saved["saved_bytes_peak"],
        loss_ratio=losses[1] / losses[0],
    )


def same_allocator_row(
    job: MainJob, memory_format: str, on_progress: Callable[[str], None]
) -> dict[str, Any]:
    """Plain PyTorch under the allocator settings that a budget makes (memory/keeper.py)."""
    entry = _entry(
        job,
        "plain",
        memory_format=memory_format,
        return_freed_blocks=True,
        recycle=unsupported_reason() is None,
    )
    with contestants([entry]) as (plain,):
        interleave([plain], job.format_steps, on_progress, "plain, our allocator settings")
        return {
            "part": "same allocator",
            "contestant": "plain",
            "step_ms": median_ms(plain),
            **plain.facts(),
        }


def budget_rows(
    job: MainJob, memory_format: str, budget_bytes: int, on_progress: Callable[[str], None]
) -> list[dict[str, Any]]:
    """``daf train`` under the budget, then it and plain inside a cgroup of that size."""
    on_progress(f"daf train --budget {budget_bytes}")
    free = _train(job, memory_format, str(budget_bytes), None)
    rows = [{"part": "budget", "contestant": "daf", **free}]
    works, reason = cgroup.can_limit()
    if not works:
        return [*rows, {"part": "cgroup", "skipped": reason}]
    for label, budget in (("daf", str(budget_bytes)), ("plain", "none")):
        on_progress(f"{label} inside a cgroup of {budget_bytes} bytes")
        outcome = _train(job, memory_format, budget, budget_bytes)
        rows.append({"part": "cgroup", "contestant": label, **outcome})
    return rows


def _train(
    job: MainJob, memory_format: str, budget: str, limit_bytes: int | None
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "daf", "train", job.model, job.data, "--json"]
        command += ["--budget", budget, "--batch-size", str(job.batch_size), "--seed", "0"]
        command += ["--max-steps", str(job.budget_steps), "--memory-format", memory_format]
        command += ["--out", str(Path(folder) / "run")]
        if limit_bytes is None:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        else:
            with cgroup.limited_group(limit_bytes) as group:
                done = group.run(command)
    return _outcome(done)


def _outcome(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    killed = done.returncode == cgroup.KILLED_BY_SYSTEM
    row: dict[str, Any] = {"exit_code": done.returncode, "killed_by_system": killed}
    if done.returncode == 0:
        summary = json.loads(done.stdout)
        names = ("budget_bytes", "floor_bytes", "peak_bytes", "predicted_peak_bytes")
        row |= {name: summary[name] for name in (*names, "saved_bytes_peak", "step_ms_median")}
    elif not killed:
        row["message"] = done.stderr.strip()[-500:]
        row |= {"peak_bytes": None, "predicted_peak_bytes": None}
    return row
