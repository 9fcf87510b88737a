"""``daf bench reduce``: ranges by every strategy, by PyTorch, by CUB, by the chosen one.

The reduction micro-benchmark of DAF (arXiv 2507.07149): the least and greatest value of a tensor,
or of its channels, by a tree, by atomics alone and by both (*hybrid reduction*).
On a CUDA device the strategies are Triton's, and times are those
of events; else they are the native ones of the processor. A call is a session's, with its own
memory for the ends. CUB is reached through CuPy where that
can be imported. What is chosen is chosen as in sessions, by ``daf.codecs.ranges``.
Contestants take turns; rows are medians, ratios those of times of the same round. Every
strategy gives the same bits; one that does not ends the benchmark.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from daf.codecs.ranged import WHOLE, Cut
from daf.codecs.ranges import PYTORCH, Ranges, device_name, ends_by
from daf.core.errors import KernelError
from daf.kernels import RangeStrategy
from daf.kernels.cpu.reductions import range_strategy
from daf_bench.harness.result import BenchResult
from daf_bench.harness.timing import device_seconds

Progress = Callable[[str], None]
Work = Callable[[], object]
CHOSEN, TORCH, CUB, BEST = "chosen", "torch", "cub", "best"
TIMED_SECONDS = 2e-4
_MOST_TIMES = 100
LOOK_UPS = 300
LEAST_JUDGED = 2**16  # elements: below, PyTorch's own is taken unmeasured
STRATEGIES = tuple(strategy.name.lower() for strategy in RangeStrategy)
CANDIDATES = (*STRATEGIES, TORCH)  # what may be chosen, as in sessions


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
    device, rows = torch.device(job.device), []
    with tempfile.TemporaryDirectory() as folder:
        ranges = Ranges(Path(folder))
        for shape in job.shapes:
            on_progress(str(shape))
            values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)
            rows.append(_row(values, job.rounds, ranges))
    return BenchResult("reduce", rows, figures_of(rows), _notes(device, job.rounds))


def _pick(ranges: Ranges, values: Tensor) -> str:
    """One of CANDIDATES for one call, as sessions choose."""
    found = ranges.strategy_for(values, _cut(values))
    return TORCH if found == PYTORCH else found


def _row(values: Tensor, rounds: int, ranges: Ranges) -> dict[str, Any]:
    work = _contestants(values)
    begin_s = time.perf_counter()
    chosen = _pick(ranges, values)
    first_use_ms = 1e3 * (time.perf_counter() - begin_s)

    def reduce_by_choice() -> object:
        nonlocal chosen
        chosen = _pick(ranges, values)
        return work[chosen]()

    taken = _in_turn({**work, CHOSEN: reduce_by_choice}, rounds, values.device)
    return {
        "part": "reduce",
        **Shape(*values.shape)._asdict(),
        "threads": torch.get_num_threads(),
        "choice": chosen,
        "rule": _rule(values),
        "first_use_ms": first_use_ms,
        "look_up_us": _look_up_us(ranges, values),
        "microseconds": {name: 1e6 * statistics.median(found) for name, found in taken.items()},
        "ratios": ratios_of(taken),
        "picked_vs_best": picked_vs_best(taken, chosen),
    }


def _look_up_us(ranges: Ranges, values: Tensor) -> float:
    """Microseconds to find a choice that was made: the least of a few thousand look-ups."""
    taken, cut = [], _cut(values)
    for _ in range(10):
        begin_s = time.perf_counter()
        for _ in range(LOOK_UPS):
            ranges.strategy_for(values, cut)
        taken.append(time.perf_counter() - begin_s)
    return 1e6 * min(taken) / LOOK_UPS


def picked_vs_best(taken: Mapping[str, list[float]], picked: str) -> float:
    """Time of the strategy picked over the best one's: near end of the median's 95 % interval.

    The look-up is not in it. The interval is that of order statistics, by the binomial.
    """
    medians = {name: statistics.median(taken[name]) for name in CANDIDATES}
    best = min(CANDIDATES, key=medians.__getitem__)
    ratios = sorted(a / b for a, b in zip(taken[picked], taken[best], strict=True))
    beyond, count = 0.0, len(ratios)
    for rank in range(count // 2):
        beyond += math.comb(count, rank) / 2**count
        if beyond > 0.025:
            return ratios[max(0, rank - 1)]
    return ratios[count // 2]


def ratios_of(taken: Mapping[str, list[float]]) -> dict[str, dict[str, float]]:
    """Times over the best candidate's, PyTorch's and CUB's of the same round: medians.

    A machine that is slower for some rounds is so for both: what is chosen has the ratio of 1 to
    itself, but for what choosing takes.
    """
    best = min(CANDIDATES, key=lambda name: statistics.median(taken[name]))
    others = {BEST: best} | {name: name for name in (TORCH, CUB) if name in taken}
    return {
        label: {name: _paired(found, taken[other]) for name, found in taken.items()}
        for label, other in others.items()
    }


def _paired(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


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


def _rule(values: Tensor) -> str | None:
    """The strategy that the processor's kernels take where none is asked for; None on a GPU."""
    if values.device.type != "cpu":
        return None
    _, channels, inner = values.shape
    return range_strategy(values.numel(), torch.get_num_threads(), channels, inner).name.lower()


def _contestants(values: Tensor) -> dict[str, Work]:
    """Each gives both ends, called as sessions call it; ours are checked against PyTorch."""
    expected = torch.stack(_by_torch(values)).flatten().tolist()
    ours = {name: _by(values, name) for name in STRATEGIES}
    for name, reduce in ours.items():
        found = [float(end) for part in reduce() for end in part.flatten()]
        if found != expected:
            raise KernelError(
                f"asked {name} for the ranges {str(expected)[:80]}, found {str(found)[:80]}; "
                "report this"
            )
    return {**ours, TORCH: _by(values, PYTORCH), **_cub(values)}


def _by_torch(values: Tensor) -> tuple[Tensor, Tensor]:
    if values.shape[1] == 1:
        least, greatest = torch.aminmax(values)
        return least.view(1), greatest.view(1)
    return values.amin(dim=(0, 2)), values.amax(dim=(0, 2))


def _cut(values: Tensor) -> Cut:
    _, channels, inner = values.shape
    return Cut(channels, inner) if channels > 1 else WHOLE


def _by(values: Tensor, name: str) -> Callable[[], tuple[Tensor, Tensor]]:
    cut = _cut(values)
    return lambda: ends_by(values, cut, name)


def _cub(values: Tensor) -> dict[str, Work]:
    """CUB's device reduction of whole tensors through CuPy: the least, then the greatest."""
    is_whole = values.shape[1] == 1
    if values.device.type != "cuda" or not is_whole or find_spec("cupy") is None:
        return {}
    import cupy

    cupy._core.set_routine_accelerators(["cub"])
    array = cupy.from_dlpack(values.view(-1))
    stream = cupy.cuda.Stream.from_external(torch.cuda.current_stream())

    def reduce() -> object:
        with stream:
            return array.min(), array.max()

    return {CUB: reduce}


def figures_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Worst over shapes of what is picked to the best candidate, and of calls to PyTorch and CUB.

    ``worst_vs_best``: of the strategy's own time, from ``LEAST_JUDGED`` elements on; the look-up is
    told apart. Of hybrid reduction and of the processor's rule too, to the best candidate's.
    """
    ratios = [row["ratios"] for row in rows]
    judged = [row for row in rows if row["outer"] * row["channels"] * row["inner"] >= LEAST_JUDGED]
    figures = {
        "worst_vs_best": max((row["picked_vs_best"] for row in judged), default=1.0),
        "look_up_us_worst": max(row["look_up_us"] for row in rows),
        "worst_vs_torch": max(found[TORCH][CHOSEN] for found in ratios),
        "hybrid_worst_vs_best": max(found[BEST]["hybrid"] for found in ratios),
        "first_use_ms_worst": max(row["first_use_ms"] for row in rows),
    }
    if all(row["rule"] is not None for row in rows):
        figures["rule_worst_vs_best"] = max(row["ratios"][BEST][row["rule"]] for row in rows)
    if beside := [found[CUB][CHOSEN] for found in ratios if CUB in found]:
        figures |= {"worst_vs_cub": max(beside), "best_vs_cub": min(beside)}
    return figures


def _notes(device: torch.device, rounds: int) -> tuple[str, ...]:
    missing = () if find_spec("cupy") else ("cub: not compared, CuPy is not installed",)
    return (
        f"float32, device: {device_name(device)}, medians of {rounds} rounds",
        "ratios: of times of the same round, below 1 the one named first is faster; best: the "
        "fastest of the three strategies and PyTorch's own",
        "chosen: picked on first use, from times, as sessions pick; rule: what the processor's "
        "kernels take where none is asked for",
        "first use: what choosing takes once for a class of sizes, compiling included",
        *missing,
    )
