"""``daf bench reduction``: ranges of a tensor or its channels by tree, atomics and both.

The reduction micro-benchmark of DAF (arXiv 2507.07149) on the CPU, beside
PyTorch's own reduction. Every strategy gives the same bits; a round in which
one does not ends the benchmark.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from daf.bench.result import BenchResult
from daf.bench.timing import interleaved_ms
from daf.errors import KernelError
from daf.kernels import ElementType, RangeStrategy
from daf.kernels.cpu_measure import measure_ranges, range_strategy, ranges_workspace_bytes

Shape = tuple[
    int, int, int
]  # outer, channels, inner: element i is of channel (i // inner) % channels


@dataclass(frozen=True, slots=True)
class ReductionJob:
    """What is run: a whole tensor, few channels, many channels; small and large."""

    shapes: tuple[Shape, ...] = (
        *((1, 1, 2**14), (1, 1, 2**20), (1, 1, 2**24)),
        *((128, 64, 1024), (128, 512, 16), (2**14, 1024, 1)),
    )
    rounds: int = 21


def quick_job() -> ReductionJob:
    """The same in seconds, on small tensors."""
    return ReductionJob(((1, 1, 2**14), (1, 1, 2**18), (16, 64, 64), (2**8, 256, 1)), 5)


def run(job: ReductionJob, on_progress: Callable[[str], None] = lambda _: None) -> BenchResult:
    """Time every strategy on every shape, on all cores.

    Raises:
        KernelError: a strategy's ranges are not PyTorch's.
    """
    rows = [_row(shape, job.rounds, on_progress) for shape in job.shapes]
    figures = {
        "hybrid_vs_best_worst": max(row["hybrid_ms"] / row["best_ms"] for row in rows),
        "rule_vs_best_worst": max(row["rule_ms"] / row["best_ms"] for row in rows),
        "rule_speed_vs_torch_least": min(row["torch_ms"] / row["rule_ms"] for row in rows),
    }
    notes = (
        f"float32, {os.cpu_count()} cores, medians of {job.rounds} interleaved rounds",
        "rule: the strategy that is taken where none is asked for; best: the fastest of the three; "
        "worst and least: over all shapes",
    )
    return BenchResult("reduction", rows, figures, notes)


def _row(shape: Shape, rounds: int, on_progress: Callable[[str], None]) -> dict[str, Any]:
    on_progress("×".join(map(str, shape)))
    outer, channels, inner = shape
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    threads = os.cpu_count() or 1
    wanted = torch.stack(_by_torch(values))
    calls: dict[str, Callable[[], object]] = {"torch": lambda: _by_torch(values)}
    for strategy in RangeStrategy:
        call, result = _by_strategy(values, strategy, threads)
        call()
        if not torch.equal(result, wanted):
            raise KernelError(f"{strategy.name} gave other ranges than PyTorch on shape {shape}")
        calls[strategy.name.lower()] = call
    ms = {name: statistics.median(taken) for name, taken in interleaved_ms(calls, rounds).items()}
    rule = range_strategy(values.numel(), threads, channels, inner).name.lower()
    return {
        "part": "reduction",
        "outer": outer,
        "channels": channels,
        "inner": inner,
        "threads": threads,
        **{f"{name}_ms": taken for name, taken in ms.items()},
        "rule": rule,
        "rule_ms": ms[rule],
        "best_ms": min(ms[strategy.name.lower()] for strategy in RangeStrategy),
    }


def _by_torch(values: Tensor) -> tuple[Tensor, Tensor]:
    return values.amin(dim=(0, 2)), values.amax(dim=(0, 2))


def _by_strategy(
    values: Tensor, strategy: RangeStrategy, threads: int
) -> tuple[Callable[[], object], Tensor]:
    """A call, and where it writes: least and greatest of each channel, ``[2, channels]``."""
    _, channels, inner = values.shape
    result = torch.empty(2, channels)
    count = values.numel()
    size_bytes = ranges_workspace_bytes(count, threads, channels, inner, strategy)
    workspace = torch.empty(max(1, size_bytes), dtype=torch.uint8)

    def call() -> None:
        measure_ranges(
            *(values.data_ptr(), ElementType.FLOAT32, count),
            *(result[0].data_ptr(), result[1].data_ptr(), workspace.data_ptr(), threads),
            *(channels, inner, strategy),
        )

    return call, result


def draw_reduction(rows: list[dict[str, Any]], path: Path) -> None:
    """A group of bars a shape: every strategy's time over PyTorch's."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # heavy, and wanted only here
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.8), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    colours = {"tree": "#2a78b8", "atomics": "#c2570c", "hybrid": "#1a7f5a"}
    for offset, (name, colour) in enumerate(colours.items()):
        places = [4 * index + offset for index in range(len(rows))]
        heights = [row[f"{name}_ms"] / row["torch_ms"] for row in rows]
        axes.bar(places, heights, color=colour, label=name)
    axes.axhline(1.0, color="#22303c", linewidth=1, label="PyTorch")
    names = [f"{row['outer']}×{row['channels']}×{row['inner']}" for row in rows]
    axes.set_xticks([4 * index + 1 for index in range(len(rows))], names, fontsize=8)
    axes.set_yscale("log")
    axes.set_ylabel("time ÷ PyTorch's")
    axes.set_title("Ranges: outer × channels × inner", loc="left", fontweight="bold")
    axes.legend(frameon=False, ncols=4)
    figure.savefig(path)
