"""``daf bench reduce``: the range of a tensor by every strategy, by PyTorch, by CUB, by the chosen.

On a CUDA device the strategies are Triton's and times are those of events; else
they are the native ones of the processor. CUB is reached through CuPy where
that can be imported. Contestants take turns; rows are medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from daf.bench.result import BenchResult
from daf.errors import KernelError
from daf.kernels import ElementType, RangeStrategy, cpu_measure
from daf.kernels.calibration import Chooser

Progress = Callable[[str], None]
Work = Callable[[], object]
CHOSEN, TORCH, CUB = "chosen", "torch.aminmax", "cub"
STRATEGIES = tuple(strategy.name.lower() for strategy in RangeStrategy)


@dataclass(frozen=True, slots=True)
class ReduceJob:
    """What is run: elements (1 K to 256 M) of float32, and how many rounds of turns."""

    counts: tuple[int, ...] = tuple(2**power for power in range(10, 29, 2))
    rounds: int = 15
    device: str = "cuda" if torch.cuda.is_available() else "cpu"


def quick_job() -> ReduceJob:
    """The same at three sizes."""
    return ReduceJob((2**10, 2**16, 2**20), 5)


def run(job: ReduceJob, on_progress: Progress = lambda _: None) -> BenchResult:
    """Time every contestant at every size."""
    device = torch.device(job.device)
    chooser = Chooser(_device_name(device), STRATEGIES)
    rows = []
    for count in job.counts:
        on_progress(f"{count:,} elements")
        rows.append(_row(torch.randn(count, device=device), job.rounds, chooser))
    return BenchResult("reduce", rows, figures_of(rows), _notes(device))


def _row(source: Tensor, rounds: int, chooser: Chooser) -> dict[str, Any]:
    work = _contestants(source)
    shape_class = str(source.numel().bit_length())

    def seconds_of(name: str) -> float:
        return _seconds(work[name], source.device)

    chooser.choose(shape_class, seconds_of)
    chosen = ""

    def reduce_by_choice() -> object:
        nonlocal chosen
        chosen = chooser.choose(shape_class, seconds_of)
        return work[chosen]()

    taken: dict[str, list[float]] = {name: [] for name in (*work, CHOSEN)}
    for _ in range(rounds):
        for name in work:
            taken[name].append(seconds_of(name))
        taken[CHOSEN].append(_seconds(reduce_by_choice, source.device))
    microseconds = {name: 1e6 * statistics.median(values) for name, values in taken.items()}
    return {"elements": source.numel(), "choice": chosen, "microseconds": microseconds}


def _seconds(work: Work, device: torch.device) -> float:
    """One run; on a GPU between two events, which is waited for."""
    if device.type != "cuda":
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin
    first = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    last = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    first.record()
    work()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3


def _contestants(source: Tensor) -> dict[str, Work]:
    """Each writes both ends; all are checked against PyTorch before any is timed."""
    ours = _on_gpu(source) if source.device.type == "cuda" else _on_cpu(source)
    work: dict[str, Work] = {**ours, TORCH: lambda: torch.aminmax(source)}
    expected = torch.stack(torch.aminmax(source)).tolist()
    for name, reduce in ours.items():
        found = [float(end) for end in reduce()]
        if found != expected:
            raise KernelError(f"asked {name} for the range {expected}, found {found}; report this")
    return work | _cub(source)


def _on_cpu(source: Tensor) -> dict[str, Callable[[], Tensor]]:
    return {strategy.name.lower(): _native(source, strategy) for strategy in RangeStrategy}


def _native(source: Tensor, strategy: RangeStrategy) -> Callable[[], Tensor]:
    count, threads = source.numel(), torch.get_num_threads()
    size = cpu_measure.ranges_workspace_bytes(count, threads, strategy=strategy)
    workspace = torch.empty(size + 1, dtype=torch.uint8)
    ends = torch.empty(2)

    def reduce() -> Tensor:
        cpu_measure.measure_ranges(
            source.data_ptr(),
            ElementType.FLOAT32,
            count,
            ends.data_ptr(),
            ends.data_ptr() + ends.itemsize,
            workspace.data_ptr(),
            threads,
            strategy=strategy,
        )
        return ends

    return reduce


def _on_gpu(source: Tensor) -> dict[str, Callable[[], tuple[Tensor, Tensor]]]:
    from daf.kernels import gpu_reduce  # needs triton, which processors alone do not

    def by(strategy: RangeStrategy) -> Callable[[], tuple[Tensor, Tensor]]:
        return lambda: gpu_reduce.measure_ranges(source, strategy)

    return {strategy.name.lower(): by(strategy) for strategy in RangeStrategy}


def _cub(source: Tensor) -> dict[str, Work]:
    """CUB's device reduction through CuPy: the least, then the greatest."""
    if source.device.type != "cuda" or find_spec("cupy") is None:
        return {}
    import cupy

    cupy._core.set_routine_accelerators(["cub"])
    array = cupy.from_dlpack(source)
    stream = cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)

    def reduce() -> object:
        with stream:
            return array.min(), array.max()

    return {CUB: reduce}


def figures_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Worst over sizes of the chosen's time to the best strategy's and to CUB's; best to CUB's."""
    times = [row["microseconds"] for row in rows]
    best = [min(found[name] for name in STRATEGIES) for found in times]
    figures = {
        "worst_vs_best": max(
            found[CHOSEN] / least for found, least in zip(times, best, strict=True)
        ),
        "worst_vs_torch": max(found[CHOSEN] / found[TORCH] for found in times),
    }
    if all(CUB in found for found in times):
        ratios = [found[CHOSEN] / found[CUB] for found in times]
        figures |= {"worst_vs_cub": max(ratios), "best_vs_cub": min(ratios)}
    return figures


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _notes(device: torch.device) -> tuple[str, ...]:
    missing = () if find_spec("cupy") else ("cub: not compared, CuPy is not installed",)
    return (f"device: {_device_name(device)}", "ratios: below 1 the chosen is faster", *missing)
