"""``daf bench gpu``: what codes give on a GPU beside plain PyTorch, in fp32 and bf16.

Every model and number type: plain and DAF stepped in turn, each a process of its own on the one
device: reserved bytes at their peak, bytes saved for backward, step time. Then, with what the
device may hold set as a hard limit, the largest batch that each of them can train.

It runs on a processor too, where the memory is the process's: small jobs there are for tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from daf.bench.contestant import Entry, contestants
from daf.bench.interleaving import interleave, median_ms, warm_ms
from daf.bench.result import BenchResult, median_ratio
from daf.memory.device import DeviceMemory
from daf.units import format_bytes

FLOAT32, BFLOAT16 = "float32", "bfloat16"
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
        model = "daf.bench.workloads.gpt2:gpt2_medium_lora"
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
        largest = [largest_batch(each, on_progress) for each in _limited(job, entry)]
        for row, count in zip(compared.rows, largest, strict=True):
            rows.append(row | {"largest_batch": count})
        found = compared.figures | {"batch_ratio": largest[1] / max(1, largest[0])}
        figures |= {f"{entry.label}_{name}": value for name, value in found.items()}
    return BenchResult("gpu", rows, figures, _notes(job))


def _in_number_types(job: GpuJob) -> Iterator[Entry]:
    for entry in job.entries:
        for kind in job.number_types:
            autocast = None if kind == FLOAT32 else kind
            yield replace(entry, label=f"{entry.label}_{kind}", autocast=autocast)


def _both(job: GpuJob, entry: Entry) -> tuple[Entry, Entry]:
    """Plain, and with codes at every site; neither splits its batch."""
    return entry, replace(entry, bits=job.bits, levers=("codes",))


def _limited(job: GpuJob, entry: Entry) -> Iterator[Entry]:
    for each in _both(job, entry):
        yield replace(each, limit_bytes=job.limit_bytes)


# --- side by side ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Comparison:
    """A row of plain and one of DAF, and their figures."""

    rows: tuple[dict[str, Any], ...]
    figures: dict[str, float]


def compare(job: GpuJob, entry: Entry, on_progress: Callable[[str], None]) -> Comparison:
    """Plain and DAF, stepped in turn."""
    with contestants(list(_both(job, entry))) as group:
        interleave(group, job.steps, on_progress, entry.label)
        plain, ours = facts = [each.facts() for each in group]
        rows = tuple(
            {
                "workload": entry.label,
                "contestant": name,
                "batch_size": entry.batch_size,
                "step_ms": median_ms(each),
                "loss": each.steps[-1].loss,
                **fact,
            }
            for name, each, fact in zip(("plain", "daf"), group, facts, strict=True)
        )
        times = [warm_ms(each) for each in group]
    above = [max(1, fact["peak_bytes"] - fact["floor_bytes"]) for fact in (plain, ours)]
    figures = {
        "step_ratio": median_ratio(times[1], times[0]),
        "saved_ratio": ours["saved_bytes_plain"] / ours["saved_bytes_peak"],
        "peak_ratio": above[0] / above[1],
    }
    return Comparison(rows, figures)


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
        f"{job.bits} bits at every site, PyTorch's own operators; batches are whole; {job.steps} "
        "steps; bfloat16 is torch.autocast's",
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
        f"on {memory.model_name()}, CUDA {torch.version.cuda}: peaks are what PyTorch reserves "
        f"there; its allocator is configured by {memory.settings}"
    )
