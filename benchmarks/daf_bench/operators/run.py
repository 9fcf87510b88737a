"""``daf bench operators``: what fused and chunked operators, and what goes with them, give.

Every model: plain PyTorch, plain under DAF's allocator settings, and DAF with
every lever, interleaved in one run. Then, for a waterfall, the levers one after
another, each in a process of its own. Then the training loss of a ResNet-20
against plain's over several seeds.

The batch is never split, and nothing is planned: levers are on wherever they apply.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from daf.memory.recycling_allocator import unsupported_reason
from daf_bench.harness.ablation_loop import LEVERS
from daf_bench.harness.interleaving import interleave, mean_loss, median_ms, warm_ms
from daf_bench.harness.result import BenchResult, median_ratio
from daf_bench.harness.worker import Contestant, Entry, contestants

ALLOCATOR = "allocator"
STAGES = ("plain", ALLOCATOR, *LEVERS)
FORMATS = ("channels_last", "contiguous")


@dataclass(frozen=True, slots=True)
class OperatorsJob:
    """What is run. ``entries`` are plain's, the first of them W1; ``formats``: image layouts tried.

    The defaults of the numbers are the full benchmark. Everybody is compared in ``groups``
    fresh processes of ``steps`` steps: a plain process' peak and speed stray by a tenth with
    where glibc happens to lay its blocks, and stay as they are for as long as it lives.
    """

    entries: tuple[Entry, ...]
    loss_entry: Entry | None
    bits: int = 1
    groups: int = 3
    steps: int = 9
    format_steps: int = 6
    stage_steps: int = 4
    loss_steps: int = 300
    loss_from_step: int = 200
    loss_seeds: tuple[int, ...] = (0, 1, 2)


def full_job(images: str, text: str | None) -> OperatorsJob:
    """W1; MobileNet-v2, ResNet-50 and DenseNet-121 at 224² and batch 16; BERT-small and a GPT-2.

    Args:
        images: data set of images, in ``training.data``'s names.
        text: the same of text, or None: then there are no language models.
    """
    large = ("mobilenet_v2", "resnet50", "densenet121")
    shape: dict[str, Any] = {"image_size": 224, "learning_rate": 0.01}
    entries = [w1(images), *(Entry(name, name, images, 16, **shape) for name in large)]
    if text is not None:
        bert = Entry("bert_small", "bert_small", text, 64, memory_format="contiguous")
        bert = replace(bert, optimizer="adamw", learning_rate=1e-4)
        decoder = "daf_bench.workloads.gpt2:gpt2_lora"
        entries += [
            bert,
            replace(bert, label="gpt2_lora", model=decoder, batch_size=8, context=512),
        ]
    return OperatorsJob(tuple(entries), Entry("resnet20", "resnet20", images, 128))


def quick_job(images: str) -> OperatorsJob:
    """W1 alone with few steps, and no loss."""
    return OperatorsJob((w1(images),), None, groups=1, steps=6, format_steps=4, stage_steps=2)


def w1(images: str) -> Entry:
    """ResNet-18 at batch 128 with SGD and momentum: the design's first workload."""
    return Entry("w1", "resnet18", images, 128)


def run(job: OperatorsJob, on_progress: Callable[[str], None] = lambda _: None) -> BenchResult:
    """Run it; some minutes in quick form, hours in full on two cores."""
    rows: list[dict[str, Any]] = []
    figures: dict[str, float] = {}
    for place, entry in enumerate(job.entries):
        best, format_rows = best_format(job, entry, on_progress)
        compared = compare(job, best, on_progress)
        found = figures_of(compared)
        rows += [*format_rows, *compared.rows, *waterfall(job, best, on_progress)]
        prefix = "" if place == 0 else f"{entry.label}_"
        figures |= {prefix + name: value for name, value in found.items()}
    if job.loss_entry is not None:
        loss_rows = compare_losses(job, job.loss_entry, on_progress)
        rows += loss_rows
        figures |= loss_figures(loss_rows)
    return BenchResult("operators", rows, figures, _notes(job))


def _notes(job: OperatorsJob) -> tuple[str, ...]:
    return (
        f"{job.bits} bits, levers {', '.join(LEVERS)}; batches are whole; {job.steps} steps in "
        f"each of {job.groups} processes",
        "peaks are whole-process high-water marks above the floor, from before the model existed; "
        "of several processes that with the median peak",
        "peak_ratio: plain as everybody's; _same_allocator: plain under DAF's allocator settings "
        "and without torch's compiler, which plain's optimizer imports",
        "rest_ratio: of peaks above floor without parameters, gradients and optimizer state",
        "step_ratio: DAF's step to plain's under glibc's defaults, at plain's best memory format",
    )


# --- one model ------------------------------------------------------------------------------


def best_format(
    job: OperatorsJob, entry: Entry, on_progress: Callable[[str], None]
) -> tuple[Entry, list[dict[str, Any]]]:
    """The entry in plain's fastest memory format; text has one only."""
    if entry.data.startswith("text:"):
        return entry, []
    tried = [replace(entry, memory_format=name) for name in FORMATS]
    with contestants(tried) as group:
        interleave(group, job.format_steps, on_progress, f"{entry.label}: memory format")
        times = [median_ms(each) for each in group]
    rows = [
        {"part": "memory format", "workload": entry.label, "memory_format": name, "step_ms": ms}
        for name, ms in zip(FORMATS, times, strict=True)
    ]
    return tried[times.index(min(times))], rows


@dataclass(frozen=True, slots=True)
class Comparison:
    """Rows of plain, of plain under DAF's allocator settings, and of DAF; their warm step times."""

    rows: list[dict[str, Any]]
    times: tuple[Sequence[float], ...]


def compare(job: OperatorsJob, entry: Entry, on_progress: Callable[[str], None]) -> Comparison:
    """The three contestants, stepped in turn, in several groups of processes."""
    labels = ("plain", "plain, same allocator", "daf")
    groups = [_one_group(job, entry, on_progress) for _ in range(job.groups)]
    pairs = zip(*(group.rows for group in groups), strict=True)
    times = tuple(
        [ms for part in parts for ms in part]
        for parts in zip(*(group.times for group in groups), strict=True)
    )
    rows = [
        typical(found) | {"contestant": label, "step_ms": statistics.median(steps_ms)}
        for found, label, steps_ms in zip(pairs, labels, times, strict=True)
    ]
    return Comparison(rows, times)


def _one_group(job: OperatorsJob, entry: Entry, on_progress: Callable[[str], None]) -> Comparison:
    """One process for each."""
    stages = (STAGES[0], ALLOCATOR, STAGES[-1])
    with contestants([stage_entry(job, entry, stage) for stage in stages]) as group:
        interleave(group, job.steps, on_progress, entry.label)
        rows = [_row("compare", entry.label, each, each.facts()) for each in group]
        return Comparison(rows, tuple(warm_ms(each) for each in group))


def typical(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of several processes that did the same, the one with the median peak above its floor."""
    return sorted(rows, key=above_floor)[len(rows) // 2]


def figures_of(compared: Comparison) -> dict[str, float]:
    """Peaks, saved bytes and step time of plain and DAF."""
    plain, same, ours = compared.rows
    return {
        "peak_ratio": above_floor(plain) / above_floor(ours),
        "peak_ratio_same_allocator": above_floor(same) / above_floor(ours),
        "rest_ratio": _rest(plain) / _rest(ours),
        "step_ratio": median_ratio(compared.times[2], compared.times[0]),
        "saved_ratio": ours["saved_bytes_plain"] / ours["saved_bytes_peak"],
    }


def above_floor(row: dict[str, Any]) -> int:
    """The process's peak above its floor (bytes)."""
    return int(row["peak_bytes"] - row["floor_bytes"])


def _rest(row: dict[str, Any]) -> int:
    named = row["parameter_bytes"] + row["gradient_bytes"] + row["state_bytes"]
    # A peak early in the step has no gradients in it yet; nothing is then left to divide by.
    return max(1, above_floor(row) - int(named))


def stage_entry(job: OperatorsJob, entry: Entry, stage: str) -> Entry:
    """Everything up to ``stage`` switched on."""
    reached = STAGES[: STAGES.index(stage) + 1]
    levers = tuple(lever for lever in LEVERS if lever in reached)
    found = replace(entry, label=f"{entry.label}: {stage}")
    if ALLOCATOR in reached:
        recycles = unsupported_reason() is None
        found = replace(
            found,
            return_freed_blocks=True,
            recycle=recycles,
            recycle_tightly=recycles,
            keep_compiler_out=True,
        )
    return replace(found, bits=job.bits, levers=levers) if levers else found


def waterfall(
    job: OperatorsJob, entry: Entry, on_progress: Callable[[str], None]
) -> list[dict[str, Any]]:
    """One row for each stage, each stage in a process of its own, alone."""
    rows = []
    for stage in STAGES:
        with contestants([stage_entry(job, entry, stage)]) as (alone,):
            interleave([alone], job.stage_steps, on_progress, alone.entry.label)
            fact = alone.facts()
            rows.append(_row("waterfall", entry.label, alone, fact) | {"stage": stage})
    return with_terms(rows)


def with_terms(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of one waterfall, with plain's own saved bytes and each one's ``terms``.

    The account's terms, as far as they are exact: what is alive at the peak
    beside parameters, buffers, optimizer state and saved tensors is the transient, whose part
    the gradients are; what the process holds beyond that is slack. Plain's saved
    bytes are those that the coded stages counted. Plain under glibc's defaults
    has what plain has under ours, and more slack.
    """
    saved_plain = max(row["saved_bytes_plain"] or 0 for row in rows)
    alive = next((row["live_peak_bytes"] for row in rows if row.get("live_peak_bytes")), None)
    return [row | {"terms": _terms(row, saved_plain, alive)} for row in rows]


def _terms(row: dict[str, Any], saved_plain: int, plain_alive: int | None) -> dict[str, int]:
    saved = row["saved_bytes_peak"] if row["saved_bytes_peak"] is not None else saved_plain
    terms = {
        "parameters, buffers": row["parameter_bytes"],
        "optimizer state": row["state_bytes"],
        "saved": saved,
    }
    total = above_floor(row)
    alive = row.get("live_peak_bytes", plain_alive)
    if alive is not None:
        terms["transient, gradients"] = max(0, min(alive, total) - sum(terms.values()))
    terms["slack" if alive is not None else "other"] = max(0, total - sum(terms.values()))
    return terms


def _row(part: str, label: str, each: Contestant, fact: dict[str, Any]) -> dict[str, Any]:
    return {
        "part": part,
        "workload": label,
        "step_ms": median_ms(each),
        "loss": each.steps[-1].loss,
        "memory_format": each.entry.memory_format,
        **fact,
    }


# --- training loss --------------------------------------------------------------------------


def compare_losses(
    job: OperatorsJob, entry: Entry, on_progress: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Late training loss of plain and DAF, for every seed."""
    rows = []
    for seed in job.loss_seeds:
        plain = replace(entry, seed=seed)
        with contestants([plain, stage_entry(job, plain, STAGES[-1])]) as group:
            interleave(group, job.loss_steps, on_progress, f"loss, seed {seed}")
            losses = [mean_loss(each, job.loss_from_step) for each in group]
        row = {"part": "loss", "workload": entry.label, "seed": seed}
        rows.append(row | {"plain_loss": losses[0], "daf_loss": losses[1]})
    return rows


def loss_figures(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The ratio of mean losses, and plain's spread from seed to seed, relative to its mean."""
    plain = [row["plain_loss"] for row in rows]
    ours = [row["daf_loss"] for row in rows]
    return {
        "loss_ratio": statistics.mean(ours) / statistics.mean(plain),
        "plain_loss_spread": (max(plain) - min(plain)) / statistics.mean(plain),
    }
