"""``daf bench reduce --varying``: is it worth timing strategies again while training?

Other load comes and goes, the number of threads changes, and sizes follow one another. Three ways
to pick a strategy take turns on the same tensors: *kept*, the choice made once on an idle machine
for each device, thread count and size; *retimed*, the same choice, checked while running
(:class:`RetimingChooser`); *rule*, what the processor's kernels take unasked. PyTorch's own
reduction runs beside them. Times contain all that picking costs.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from daf.codecs.ranged import WHOLE, Cut
from daf.codecs.ranges import PYTORCH, Ranges, device_name, ends_by
from daf.kernels.cpu.reductions import range_strategy
from daf_bench.harness.result import BenchResult, median_ratio
from daf_bench.harness.timing import device_seconds
from daf_bench.kernels.reductions import Progress, Shape, whole
from daf_bench.kernels.retiming import RetimingChooser

KEPT, RETIMED, RULE, TORCH = "kept", "retimed", "rule", "torch"
ALONE, BUSY, COPYING = "alone", "all cores compute", "one core copies memory"
# What must be gained before strategies are timed again: the margin that noise is given elsewhere.
WORTHWHILE = 0.97
# Picks a strategy, reduces the tensor by it, and returns its name.
Way = Callable[[Tensor], str]
_BATCH_SECONDS = 2e-3  # of calls that are timed together
_LOADS = {
    BUSY: "a, b = (torch.randn(512, 512, device=device) for _ in 'ab')\nwhile True: a @ b",
    COPYING: "a, b = (torch.zeros(2**25, device=device) for _ in 'ab')\nwhile True: a.copy_(b)",
}


@dataclass(frozen=True, slots=True)
class Phase:
    """One stretch of time: the threads that reduce and what else the machine does."""

    threads: int
    load: str


@dataclass(frozen=True, slots=True)
class VaryingJob:
    """What is run; about eight minutes on two cores."""

    shapes: tuple[Shape, ...] = (
        *(whole(2**16), whole(2**20), whole(2**24)),
        *(Shape(128, 64, 1024), Shape(2**10, 1024, 1)),
    )
    phases: tuple[Phase, ...] = tuple(
        Phase(threads, load)
        for threads in (torch.get_num_threads(), 1)
        for load in (ALONE, BUSY, ALONE, COPYING, ALONE)
    )
    seconds: float = 8.0  # for one shape in one phase
    device: str = "cuda" if torch.cuda.is_available() else "cpu"


def quick_varying_job() -> VaryingJob:
    """The same in seconds, on small tensors."""
    threads = torch.get_num_threads()
    phases = (Phase(threads, ALONE), Phase(threads, BUSY), Phase(1, COPYING))
    return VaryingJob((whole(2**16), Shape(16, 64, 64)), phases, 0.5)


def run_varying(job: VaryingJob, on_progress: Progress = lambda _: None) -> BenchResult:
    """Time every way to pick through all phases, in turn."""
    device, threads = torch.device(job.device), torch.get_num_threads()
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator).to(device) for shape in job.shapes]
    rows = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            ways = _ways(Path(folder), tensors, {phase.threads for phase in job.phases})
            for number, phase in enumerate(job.phases):
                on_progress(f"{phase.load}, {phase.threads} threads")
                torch.set_num_threads(phase.threads)
                with _load(phase.load, device):
                    rows += [_row(number, phase, ways, each, job.seconds) for each in tensors]
    finally:
        torch.set_num_threads(threads)
    return BenchResult("reduce_varying", rows, varying_figures(rows), _notes(device, job))


def varying_figures(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return *retimed*'s seconds over *kept*'s: geometric mean over rows, best row, worst row.

    ``strategies_changed``: the rows in which re-timing left the strategy of before.
    """
    ratios = [row["ratios"][RETIMED] for row in rows]
    return {
        "retimed_vs_kept": statistics.geometric_mean(ratios),
        "retimed_vs_kept_best": min(ratios),
        "retimed_vs_kept_worst": max(ratios),
        "kept_vs_torch": 1 / statistics.geometric_mean(row["ratios"][TORCH] for row in rows),
        "strategies_changed": float(sum(row["strategies"][RETIMED] > 1 for row in rows)),
        "is_worthwhile": float(statistics.geometric_mean(ratios) <= WORTHWHILE),
    }


def _ways(folder: Path, tensors: list[Tensor], threads: set[int]) -> dict[str, Way]:
    """Make every choice now, on a machine at rest; *kept* and *retimed* begin with the same."""
    first, second = folder / "kept", folder / "retimed"
    first.mkdir()
    for count in threads:
        torch.set_num_threads(count)
        beginning = Ranges(first)
        for tensor in tensors:
            beginning.strategy_for(tensor, _cut(tensor))
    shutil.copytree(first, second)
    kept, retimed = Ranges(first), Ranges(second, RetimingChooser)
    return {
        KEPT: _reduces_by(lambda tensor: kept.strategy_for(tensor, _cut(tensor))),
        RETIMED: _reduces_by(lambda tensor: retimed.strategy_for(tensor, _cut(tensor))),
        RULE: _reduces_by(_rule),
        TORCH: _reduces_by(lambda _: PYTORCH),
    }


def _reduces_by(pick: Callable[[Tensor], str]) -> Way:
    def reduce(tensor: Tensor) -> str:
        strategy = pick(tensor)
        ends_by(tensor, _cut(tensor), strategy)
        return strategy

    return reduce


def _cut(tensor: Tensor) -> Cut:
    _, channels, inner = tensor.shape
    return Cut(channels, inner) if channels > 1 else WHOLE


def _rule(tensor: Tensor) -> str:
    if tensor.device.type != "cpu":
        return PYTORCH
    cut = _cut(tensor)
    return range_strategy(tensor.numel(), torch.get_num_threads(), *cut).name.lower()


def _row(
    number: int, phase: Phase, ways: Mapping[str, Way], tensor: Tensor, seconds: float
) -> dict[str, Any]:
    taken: dict[str, list[float]] = {name: [] for name in ways}
    picked: dict[str, dict[str, None]] = {name: {} for name in ways}
    names, end_s = [*ways], time.perf_counter() + seconds
    while time.perf_counter() < end_s or len(taken[KEPT]) < len(names):
        first = len(taken[KEPT]) % len(names)
        for name in names[first:] + names[:first]:
            taken[name].append(_seconds(ways[name], tensor))
            picked[name][ways[name](tensor)] = None
    return {
        "part": "reduce_varying",
        "phase": number,
        "load": phase.load,
        "threads": phase.threads,
        **Shape(*tensor.shape)._asdict(),
        "rounds": len(taken[KEPT]),
        "strategies": {name: len(found) for name, found in picked.items()},
        "last_strategy": {name: [*found][-1] for name, found in picked.items()},
        "microseconds": {name: 1e6 * statistics.median(each) for name, each in taken.items()},
        "ratios": {name: median_ratio(each, taken[KEPT]) for name, each in taken.items()},
        "in_all": {name: sum(each) / sum(taken[KEPT]) for name, each in taken.items()},
    }


def _seconds(way: Way, tensor: Tensor) -> float:
    """Return the seconds of one call, from as many as fill what a clock can tell; one before."""
    once = device_seconds(lambda: way(tensor), tensor.device)
    times = max(1, min(64, round(_BATCH_SECONDS / once)))

    def repeat() -> None:
        for _ in range(times):
            way(tensor)

    return device_seconds(repeat, tensor.device) / times


@contextmanager
def _load(kind: str, device: torch.device) -> Iterator[None]:
    """Keep the machine busy inside, from processes of their own."""
    count = {BUSY: os.cpu_count() or 1, COPYING: 1}.get(kind, 0)
    running = [_start(_LOADS[kind], device) for _ in range(count)]
    try:
        for process in running:
            assert process.stdout is not None
            process.stdout.readline()  # it is at work
        yield
    finally:
        for process in running:
            process.kill()
            process.communicate()


def _start(work: str, device: torch.device) -> subprocess.Popen[str]:
    begin = f"import torch\ntorch.set_num_threads(1)\ndevice = {str(device)!r}\n"
    code = begin + "print('ready', flush=True)\n" + work
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def _notes(device: torch.device, job: VaryingJob) -> tuple[str, ...]:
    return (
        f"float32, device: {device_name(device)}; {job.seconds:g} s for a shape in a phase",
        "ratios: times over those of the choice kept per device, threads and size, medians of "
        "rounds; in all: of the sums, in which a few rounds that waited for a processor outweigh",
        f"worthwhile: retimed ÷ kept at most {WORTHWHILE}, in the geometric mean over rows",
    )
