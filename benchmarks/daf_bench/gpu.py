"""``daf bench gpu``: what codes give on a GPU beside plain PyTorch, in fp32 and bf16.

Every model and number type: plain, DAF's codes, and these in fused and chunked operators stepped
in turn, each a process of its own on the one device: reserved bytes at their peak, bytes saved for
backward, step time. Then, with what the device may hold set as a hard limit, the largest batch
that each of them can train.

It runs on a processor too, where the memory is the process's: small jobs there are for tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from daf.core.units import format_bytes
from daf.memory.device_memory import DeviceMemory
from daf_bench.harness.interleaving import interleave, median_ms, warm_ms
from daf_bench.harness.result import BenchResult, median_ratio
from daf_bench.harness.worker import Entry, contestants

FLOAT32, BFLOAT16 = "float32", "bfloat16"
PLAIN = "plain"
# What DAF does, by contender.
OURS: Mapping[str, tuple[str, ...]] = {
    "daf": ("codes",),
    "daf_fused": ("codes", "fused", "chunked"),
}
# The largest batch is found to one part in so many.
PRECISION = 16
# Beyond so many times the batch that is timed, nothing larger is tried.
MOST_TIMES = 256


@dataclass(frozen=True, slots=True)
class GpuJob:
    """What is run. ``entries`` are plain's, in fp32; ``limit_bytes``: what the largest batch fits.

    The defaults of the numbers are the full benchmark.
    """

    entries: tuple[Entry, ...]
    number_types: tuple[str, ...] = (FLOAT32, BFLOAT16)
    bits: int = 1
    steps: int = 20
    limit_bytes: int = 8 * 2**30


def full_job(device: str, images: str, text: str | None) -> GpuJob:
    """ResNet-18 at batch 1024, ResNet-50 at 224² and 64, GPT-2 Medium with LoRA at 1024 symbols.

    Args:
        device: PyTorch's name of it.
        images: data set of images, in ``training.data``'s names.
        text: the same of text, or None: then there is no language model.
    """
    large: dict[str, Any] = {"image_size": 224, "learning_rate": 0.01}
    entries = [
        Entry("w1", "resnet18", images, 1024, device=device),
        Entry("resnet50", "resnet50", images, 64, device=device, **large),
    ]
    if text is not None:
        model = "daf_bench.workloads.gpt2:gpt2_medium_lora"
        shape: dict[str, Any] = {"context": 1024, "memory_format": "contiguous"}
        shape |= {"learning_rate": 1e-4, "optimizer": "adamw"}
        entries.append(Entry("gpt2_medium_lora", model, text, 8, device=device, **shape))
    return GpuJob(tuple(entries))


def quick_job(device: str, images: str) -> GpuJob:
    """A ResNet-20 with few steps, in half a gigabyte."""
    entry = Entry("resnet20", "resnet20", images, 256, device=device)
    return GpuJob((entry,), steps=6, limit_bytes=2**29)


def run(job: GpuJob, on_progress: Callable[[str], None] = lambda _: None) -> BenchResult:
    """Run it; some minutes on a GPU."""
    rows: list[dict[str, Any]] = []
    figures: dict[str, float] = {}
    for entry in _in_number_types(job):
        compared = compare(job, entry, on_progress)
        largest = {
            name: largest_batch(each, on_progress) for name, each in _limited(job, entry).items()
        }
        rows += [row | {"largest_batch": largest[row["contestant"]]} for row in compared.rows]
        ratios = {f"{name}_batch_ratio": largest[name] / max(1, largest[PLAIN]) for name in OURS}
        found = compared.figures | ratios
        figures |= {f"{entry.label}_{name}": value for name, value in found.items()}
    return BenchResult("gpu", rows, figures, _notes(job))


def _in_number_types(job: GpuJob) -> Iterator[Entry]:
    for entry in job.entries:
        for kind in job.number_types:
            autocast = None if kind == FLOAT32 else kind
            yield replace(entry, label=f"{entry.label}_{kind}", autocast=autocast)


def _contenders(job: GpuJob, entry: Entry) -> dict[str, Entry]:
    """Plain, with codes at every site, and with fused operators besides; none splits its batch."""
    ours = {name: replace(entry, bits=job.bits, levers=levers) for name, levers in OURS.items()}
    return {PLAIN: entry} | ours


def _limited(job: GpuJob, entry: Entry) -> dict[str, Entry]:
    return {
        name: replace(each, limit_bytes=job.limit_bytes)
        for name, each in _contenders(job, entry).items()
    }


# --- side by side ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Comparison:
    """A row of each contender, and the figures of DAF's."""

    rows: tuple[dict[str, Any], ...]
    figures: dict[str, float]


def compare(job: GpuJob, entry: Entry, on_progress: Callable[[str], None]) -> Comparison:
    """Plain and DAF's, stepped in turn."""
    contenders = _contenders(job, entry)
    with contestants(list(contenders.values())) as group:
        interleave(group, job.steps, on_progress, entry.label)
        facts = dict(zip(contenders, (each.facts() for each in group), strict=True))
        rows = tuple(
            {
                "workload": entry.label,
                "contestant": name,
                "batch_size": entry.batch_size,
                "step_ms": median_ms(each),
                "loss": each.steps[-1].loss,
                **facts[name],
            }
            for name, each in zip(contenders, group, strict=True)
        )
        times = dict(zip(contenders, map(warm_ms, group), strict=True))
    figures: dict[str, float] = {}
    for name in OURS:
        own = facts[name]
        figures[f"{name}_step_ratio"] = median_ratio(times[name], times[PLAIN])
        figures[f"{name}_saved_ratio"] = own["saved_bytes_plain"] / own["saved_bytes_peak"]
        figures[f"{name}_peak_ratio"] = _above_floor(facts[PLAIN]) / _above_floor(own)
    return Comparison(rows, figures)


def _above_floor(fact: dict[str, Any]) -> int:
    return max(1, int(fact["peak_bytes"] - fact["floor_bytes"]))


# --- the largest batch ----------------------------------------------------------------------


def largest_batch(entry: Entry, on_progress: Callable[[str], None]) -> int:
    """The most examples of which two steps fit the entry's limit, to one part in ``PRECISION``.

    Each size is tried in a fresh process; 0: not even one example fits.
    """

    def fits(count: int) -> bool:
        on_progress(f"{entry.label}: does a batch of {count} fit?")
        with contestants([replace(entry, batch_size=count)]) as (alone,):
            return alone.fits()

    return largest_that(fits, entry.batch_size)


def largest_that(fits: Callable[[int], bool], first: int) -> int:
    """The largest count that fits, if whatever is less than one that fits does too.

    Doubles or halves from ``first``, then halves the gap down to one part in ``PRECISION``.
    """
    most = MOST_TIMES * first
    if fits(first):
        least, above = first, 2 * first
        while above <= most and fits(above):
            least, above = above, 2 * above
        if above > most:
            return least
    else:
        least, above = first // 2, first
        while least > 0 and not fits(least):
            least, above = least // 2, least
    while above - least > max(1, above // PRECISION):
        middle = (least + above) // 2
        least, above = (middle, above) if fits(middle) else (least, middle)
    return least


def _notes(job: GpuJob) -> tuple[str, ...]:
    return (
        f"{job.bits} bits at every site; daf: PyTorch's own operators, daf_fused: fused, chunked "
        f"ones; batches are whole; {job.steps} steps; bfloat16 is torch.autocast's",
        f"largest batches within {format_bytes(job.limit_bytes)}, a hard limit, to one part in "
        f"{PRECISION}",
        *sorted({_device_note(entry.device) for entry in job.entries}),
    )


def _device_note(name: str) -> str:
    device = torch.device(name)
    if device.type == "cpu":
        return "on the processor: peaks are the process's"
    memory = DeviceMemory(device)
    return (
        f"on {torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}: peaks are what "
        f"PyTorch reserves there; its allocator is configured by {memory.settings}"
    )
