"""``daf bench operators --speed``: each fused or chunked operator beside PyTorch's own sequence.

Forward and backward apart, contestants in turn: PyTorch, DAF's codes without the
operator (where there are any), and the operator. The operator's input comes from
another one and its result's gradient is nobody else's, as inside a model.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from daf.capture.compress import compress
from daf_bench.harness.result import BenchResult, median_ratio
from daf_bench.operators.cases import Ended, OperatorCase, full_cases, image_cases, text_cases
from daf_bench.operators.memory_traffic import counting

WARM_UP_ROUNDS = 2  # the first step is observed, the second one fused for the first time
WAYS = ("forward", "backward")


@dataclass(frozen=True, slots=True)
class SpeedJob:
    """What is timed; the defaults are the full benchmark."""

    cases: tuple[OperatorCase, ...] = full_cases()
    bits: int = 2
    rounds: int = 15


def quick_job() -> SpeedJob:
    """A fourth of the batch and few rounds."""
    return SpeedJob((*image_cases(32, 64, 32), *text_cases(16 * 128, 512, 30522)), rounds=5)


class Contestant:
    """One way to run an operator."""

    def __init__(self, name: str, case: OperatorCase, module: nn.Module, capture: Any) -> None:
        """``capture``: a :class:`compress`, or None for plain PyTorch."""
        self.name = name
        self._module = module
        self._capture = capture
        self._leaves = make_inputs(case)
        self._gradients: list[Tensor] = []
        self.times: dict[str, list[float]] = {way: [] for way in WAYS}
        self.nbytes: dict[str, int] = {}

    def run(self, note: Callable[[str, Callable[[], Any]], Any]) -> None:
        """One step; ``note(way, call)`` calls both parts and keeps what it wants of them."""
        for tensor in (*self._leaves, *self._module.parameters()):
            tensor.grad = None
        box = [leaf.clone() for leaf in self._leaves]
        gradients = [each.clone() for each in self._gradients]
        with self._capture if self._capture is not None else nullcontext():
            end: Tensor = note("forward", lambda: self._module(box, gradients))
        self._gradients = self._gradients or [each.clone() for each in gradients]
        note("backward", end.backward)

    def time(self) -> None:
        """One step whose times are kept."""

        def note(way: str, call: Callable[[], Any]) -> Any:
            start_ns = time.perf_counter_ns()
            found = call()
            self.times[way].append((time.perf_counter_ns() - start_ns) / 1e6)
            return found

        self.run(note)

    def count(self) -> None:
        """One step whose bytes are kept."""

        def note(way: str, call: Callable[[], Any]) -> Any:
            with counting() as traffic:
                found = call()
            self.nbytes[way] = traffic.nbytes
            return found

        self.run(note)

    def gradients(self) -> list[Tensor]:
        """Of the inputs and parameters, as the last step left them."""
        tensors = (*self._leaves, *self._module.parameters())
        return [tensor.grad for tensor in tensors if tensor.grad is not None]


def make_inputs(case: OperatorCase) -> list[Tensor]:
    """Leaves of a case's shape; the same every time."""
    torch.manual_seed(0)
    layout = torch.channels_last if case.channels_last else torch.contiguous_format
    return [
        torch.randn(case.shape).to(memory_format=layout).requires_grad_()
        for _ in range(case.inputs)
    ]


def contestants_of(case: OperatorCase, bits: int) -> list[Contestant]:
    """PyTorch first, the operator last."""
    torch.manual_seed(2)
    plain: nn.Module = Ended(case.make(False))
    if case.channels_last:
        plain = plain.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    group = [Contestant("plain", case, plain, None)]
    if not case.lever:
        ours = Ended(case.make(True))
        ours.load_state_dict(plain.state_dict())
        return [*group, Contestant("ours", case, ours, None)]
    for name in ("codes", "ours"):
        module, lever = copy.deepcopy(plain), case.lever if name == "ours" else ""
        capture = compress(module, bits, fused=lever == "fused", chunked=lever == "chunked")
        group.append(Contestant(name, case, module, capture))
    return group


def measure(case: OperatorCase, job: SpeedJob) -> list[dict[str, Any]]:
    """One row for each contestant."""
    group = contestants_of(case, job.bits)
    for each in group:
        for _ in range(WARM_UP_ROUNDS):
            each.run(lambda _, call: call())
        each.count()
    for index in range(job.rounds):
        # The order alternates, so that neither side always follows the other.
        for each in group if index % 2 == 0 else reversed(group):
            each.time()
    return [_row(case, each, group[0], job.bits) for each in group]


def _row(case: OperatorCase, each: Contestant, plain: Contestant, bits: int) -> dict[str, Any]:
    row: dict[str, Any] = {
        "part": "speed",
        "operator": case.name,
        "workload": case.workload,
        "shape": list(case.shape),
        "contestant": each.name,
        "bits": bits if case.lever else None,
    }
    for way in WAYS:
        row[f"{way}_ms"] = statistics.median(each.times[way])
        row[f"{way}_ratio"] = median_ratio(each.times[way], plain.times[way])
        row[f"{way}_bytes"] = each.nbytes[way]
    steps = [[sum(pair) for pair in zip(*c.times.values(), strict=True)] for c in (each, plain)]
    return row | {"step_ratio": median_ratio(*steps)}


def run(job: SpeedJob, on_progress: Callable[[str], None] = lambda _: None) -> BenchResult:
    """Run it; minutes in full on two cores."""
    rows = []
    for case in job.cases:
        on_progress(f"{case.name}, {' x '.join(map(str, case.shape))}")
        rows += measure(case, job)
    notes = (
        f"{job.bits} bits, {job.rounds} rounds",
        "ratios are times to PyTorch's own sequence, medians over interleaved pairs; bytes are "
        "those of the tensors and planes that operators read and write",
    )
    return BenchResult("operator_speed", rows, figures_of(rows), notes)


def figures_of(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The worst ratios of our operators, and the bytes that all of them move to PyTorch's."""
    ours = [row for row in rows if row["contestant"] == "ours"]
    plain = [row for row in rows if row["contestant"] == "plain"]
    figures = {
        f"worst_{way}_ratio": max(row[f"{way}_ratio"] for row in ours) for way in (*WAYS, "step")
    }
    for way in WAYS:
        pairs = zip(ours, plain, strict=True)
        shares = [one[f"{way}_bytes"] / other[f"{way}_bytes"] for one, other in pairs]
        figures[f"mean_{way}_bytes_ratio"] = statistics.geometric_mean(shares)
    return figures
