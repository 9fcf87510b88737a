"""``daf bench reduce``: ranges by every strategy, by PyTorch, by CUB, by the chosen one.

The reduction micro-benchmark of DAF (arXiv 2507.07149): the least and greatest value of a tensor,
or of its channels, by a tree, by atomics alone and by both (*hybrid reduction*).
On a CUDA device the strategies are Triton's, and times are those
of events; else they are the native ones of the processor. CUB is reached through CuPy where that
can be imported. Contestants take turns; rows are medians. Every strategy gives the
same bits; one that does not ends the benchmark.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from daf.bench.result import BenchResult
from daf.bench.timing import device_seconds
from daf.errors import KernelError
from daf.kernels import ElementType, RangeStrategy
from daf.kernels.calibration import Chooser
from daf.kernels.cpu_measure import measure_ranges, range_strategy, ranges_workspace_bytes

Progress = Callable[[str], None]
Work = Callable[[], object]
CHOSEN, TORCH, CUB = "chosen", "torch", "cub"
TIMED_SECONDS = 2e-4
_MOST_TIMES = 100
STRATEGIES = tuple(strategy.name.lower() for strategy in RangeStrategy)


class Shape(NamedTuple):
    """Element i is of channel (i // inner) % channels; a range for every channel."""

    outer: int
    channels: int
    inner: int

    def __str__(self) -> str:
        return "×".join(map(str, self))


def whole(elements: int) -> Shape:
    """One range for all of a tensor."""
    return Shape(1, 1, elements)


@dataclass(frozen=True, slots=True)
class ReduceJob:
    """What is run: whole tensors of 1 K to 256 M floats; few channels, many, and one a column."""

    shapes: tuple[Shape, ...] = (
        *(whole(2**power) for power in range(10, 29, 2)),
        *(Shape(128, 64, 1024), Shape(128, 512, 16), Shape(2**14, 1024, 1)),
    )
    rounds: int = 15
    device: str = "cuda" if torch.cuda.is_available() else "cpu"


def quick_job() -> ReduceJob:
    """The same in seconds, on small tensors."""
    shapes = (whole(2**10), whole(2**16), whole(2**20), Shape(16, 64, 64), Shape(2**8, 256, 1))
    return ReduceJob(shapes, 5)


def run(job: ReduceJob, on_progress: Progress = lambda _: None) -> BenchResult:
    """Time every contestant on every shape, on all cores.

    Raises:
        KernelError: a strategy's ranges are not PyTorch's.
    """
    device = torch.device(job.device)
    chooser = Chooser(_device_name(device), STRATEGIES)
    rows = []
    for shape in job.shapes:
        on_progress(str(shape))
        values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)
        rows.append(_row(values, job.rounds, chooser))
    return BenchResult("reduce", rows, figures_of(rows), _notes(device, job.rounds))


def _row(values: Tensor, rounds: int, chooser: Chooser) -> dict[str, Any]:
    work = _contestants(values)
    shape = Shape(*values.shape)
    shape_class = str(shape) if shape.channels > 1 else str(values.numel().bit_length())

    def seconds_of(name: str) -> float:
        return device_seconds(work[name], values.device)

    chooser.choose(shape_class, seconds_of)
    chosen = ""

    def reduce_by_choice() -> object:
        nonlocal chosen
        chosen = chooser.choose(shape_class, seconds_of)
        return work[chosen]()

    taken = _in_turn({**work, CHOSEN: reduce_by_choice}, rounds, values.device)
    return {
        "part": "reduce",
        **shape._asdict(),
        "threads": torch.get_num_threads(),
        "choice": chosen,
        "rule": _rule(shape) if values.device.type == "cpu" else None,
        "microseconds": {name: 1e6 * statistics.median(found) for name, found in taken.items()},
    }


def _in_turn(work: dict[str, Work], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds of one call by round, each contestant first as often as any other.

    One call that is not timed goes before, for caches that whoever ran last has left otherwise;
    then as many as fill what a clock can tell.
    """
    names = list(work)
    least = min(device_seconds(work[name], device) for name in names for _ in range(2))
    times = max(1, min(_MOST_TIMES, math.ceil(TIMED_SECONDS / least)))
    taken: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            work[name]()
            seconds = device_seconds(partial(_repeat, work[name], times), device)
            taken[name].append(seconds / times)
    return taken


def _repeat(call: Work, times: int) -> None:
    for _ in range(times):
        call()


def _rule(shape: Shape) -> str:
    """The strategy that the processor's kernels take where none is asked for."""
    count = shape.outer * shape.channels * shape.inner
    found = range_strategy(count, torch.get_num_threads(), shape.channels, shape.inner)
    return found.name.lower()


def _contestants(values: Tensor) -> dict[str, Work]:
    """Each writes both ends; all are checked against PyTorch before any is timed."""
    ours = _on_gpu(values) if values.device.type == "cuda" else _on_cpu(values)
    expected = torch.stack(_by_torch(values)).flatten().tolist()
    for name, reduce in ours.items():
        found = [float(end) for part in reduce() for end in part.flatten()]
        if found != expected:
            raise KernelError(
                f"asked {name} for the ranges {str(expected)[:80]}, found {str(found)[:80]}; "
                "report this"
            )
    return {**ours, TORCH: lambda: _by_torch(values), **_cub(values)}


def _by_torch(values: Tensor) -> tuple[Tensor, Tensor]:
    if values.shape[1] == 1:
        least, greatest = torch.aminmax(values)
        return least.view(1), greatest.view(1)
    return values.amin(dim=(0, 2)), values.amax(dim=(0, 2))


def _on_cpu(values: Tensor) -> dict[str, Callable[[], Tensor]]:
    return {strategy.name.lower(): _native(values, strategy) for strategy in RangeStrategy}


def _native(values: Tensor, strategy: RangeStrategy) -> Callable[[], Tensor]:
    _, channels, inner = values.shape
    count, threads = values.numel(), torch.get_num_threads()
    size_bytes = ranges_workspace_bytes(count, threads, channels, inner, strategy)
    workspace = torch.empty(max(1, size_bytes), dtype=torch.uint8)
    ends = torch.empty(2, channels)

    def reduce() -> Tensor:
        measure_ranges(
            *(values.data_ptr(), ElementType.FLOAT32, count),
            *(ends[0].data_ptr(), ends[1].data_ptr(), workspace.data_ptr(), threads),
            *(channels, inner, strategy),
        )
        return ends

    return reduce


def _on_gpu(values: Tensor) -> dict[str, Callable[[], tuple[Tensor, Tensor]]]:
    from daf.kernels import gpu_reduce  # needs triton, which processors alone do not

    flat, (_, channels, inner) = values.view(-1), values.shape

    def by(strategy: RangeStrategy) -> Callable[[], tuple[Tensor, Tensor]]:
        return lambda: gpu_reduce.measure_ranges(flat, strategy, channels, inner)

    return {strategy.name.lower(): by(strategy) for strategy in RangeStrategy}


def _cub(values: Tensor) -> dict[str, Work]:
    """CUB's device reduction of whole tensors through CuPy: the least, then the greatest."""
    is_whole = values.shape[1] == 1
    if values.device.type != "cuda" or not is_whole or find_spec("cupy") is None:
        return {}
    import cupy

    cupy._core.set_routine_accelerators(["cub"])
    array = cupy.from_dlpack(values.view(-1))
    stream = cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)

    def reduce() -> object:
        with stream:
            return array.min(), array.max()

    return {CUB: reduce}


def figures_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Worst over shapes of the chosen's time to the best strategy's, PyTorch's and CUB's.

    Of hybrid reduction and of the processor's rule too, to the best strategy's.
    """
    times = [row["microseconds"] for row in rows]
    best = [min(found[name] for name in STRATEGIES) for found in times]

    def worst(name: str) -> float:
        return float(max(found[name] / least for found, least in zip(times, best, strict=True)))

    figures = {
        "worst_vs_best": worst(CHOSEN),
        "worst_vs_torch": max(found[CHOSEN] / found[TORCH] for found in times),
        "hybrid_worst_vs_best": worst("hybrid"),
    }
    ruled = [
        (row["microseconds"], row["rule"], least) for row, least in zip(rows, best, strict=True)
    ]
    if all(rule is not None for _, rule, _ in ruled):
        figures["rule_worst_vs_best"] = max(found[rule] / least for found, rule, least in ruled)
    if ratios := [found[CHOSEN] / found[CUB] for found in times if CUB in found]:
        figures |= {"worst_vs_cub": max(ratios), "best_vs_cub": min(ratios)}
    return figures


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _notes(device: torch.device, rounds: int) -> tuple[str, ...]:
    missing = () if find_spec("cupy") else ("cub: not compared, CuPy is not installed",)
    return (
        f"float32, device: {_device_name(device)}, medians of {rounds} rounds",
        "ratios: below 1 the one named first is faster; best: the fastest of the three strategies",
        "chosen: picked while it runs, from times; rule: what the processor's kernels take where "
        "none is asked for",
        *missing,
    )
