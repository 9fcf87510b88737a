"""``daf bench pack``: codes made by the GPU, by the processor, and by both, beside a forward pass.

What ResNet-18 saves in forward becomes codes on the host, and is decoded on the
GPU in backward. Three ways take turns with a pass that saves plainly: the GPU packs everything
and codes travel; raw data travel and the processor packs; and the split of
``execution.collaborate`` by rates that were measured first. ``exposed_ms`` is by how much
a forward pass and all packing take longer than the pass alone: 0 is hidden. One more pass of each
way is watched: what each piece of its packing took stands beside what the model of the split said.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from daf.codecs.layout import is_dense
from daf.core.errors import PlatformError
from daf.core.policy import Method, Treatment
from daf.kernels.devices import backend_of
from daf.offload.host_codes import HostCodes, HostOptions
from daf.offload.routing import Rates, ReadyTensor, Route, Routes, Seen, Timeline, simulate, split
from daf.pool.host_planes import HostStore
from daf.training.models.resnet import resnet18
from daf_bench.harness.result import BenchResult
from daf_bench.offload.traced_pass import Given, Measured, Watched

Progress = Callable[[str], None]
GPU, CPU, BOTH = "GPU alone", "processor alone", "collaborative"
LEAST_BYTES = 2**20  # smaller tensors stay where they are
STAGING_SHARE = 0.25  # of all codes, fetched and not decoded yet
_NO_LIMIT = 1 << 60


@dataclass(frozen=True, slots=True)
class PackJob:
    """What is run."""

    batch: int = 256
    image: int = 32
    bits: int = 2
    rounds: int = 9
    device: str = "cuda"


def quick_job() -> PackJob:
    """The same in seconds."""
    return PackJob(batch=64, rounds=3)


class Bed(Protocol):
    """A device under measurement."""

    @property
    def place(self) -> torch.device:
        """Where tensors are."""

    def store(self, place: torch.device, staging_bytes: int) -> HostStore:
        """For codes that wait on the host."""

    def finish(self) -> None:
        """Wait for all that was asked of it."""


class CudaBed:
    """One CUDA (or ROCm) device.

    Raises:
        PlatformError: there is none.
        KernelError: Triton is not installed.
    """

    def __init__(self, place: torch.device) -> None:
        if place.type != "cuda" or not torch.cuda.is_available():
            raise PlatformError(
                f"asked to pack beside {place}, found no CUDA device; on a processor alone, "
                "`daf bench packing` measures what packing costs"
            )
        backend_of(torch.empty(0, device=place))
        self.place = place

    def store(self, place: torch.device, staging_bytes: int) -> HostStore:
        """By PyTorch's streams."""
        return HostStore(place, staging_bytes)

    def finish(self) -> None:
        """Wait for all streams."""
        torch.cuda.synchronize(self.place)


def run(
    job: PackJob, on_progress: Progress = lambda _: None, bed: Bed | None = None
) -> BenchResult:
    """Measure rates, plan the split, take turns, and watch a pass of each way.

    Rows have two timelines: what the watched pass took, and what the model predicted.

    Raises:
        PlatformError: there is no such device.
    """
    bed = bed or CudaBed(torch.device(job.device))
    treatment = Treatment(Method.ROTATED, job.bits)
    step = _Step(job, bed, treatment)
    on_progress("what is saved when, and rates")
    (saved, forward_ms), rates = step.observed()
    plans = planned(saved, rates, forward_ms)
    plain, taken = _in_turn(step, plans, job.rounds, on_progress)
    on_progress("what each piece of work takes")
    raw_bytes = sum(each.raw_bytes for each in saved)
    rows = [
        {"part": "pack", "way": name, "raw_bytes": raw_bytes}
        | _row(plan, taken[name], plain)
        | _measured_row(step.watched(plan.routes))
        for name, plan in plans.items()
    ]
    return BenchResult("pack", rows, _figures(rows), _notes(job, bed, rates, saved))


def _in_turn(
    step: _Step, plans: dict[str, Timeline], rounds: int, on_progress: Progress
) -> tuple[_Times, dict[str, _Times]]:
    """Medians of steps that save plainly, and of every way's."""
    plain: list[_Times] = []
    taken: dict[str, list[_Times]] = {name: [] for name in plans}
    for turn in range(rounds):
        on_progress(f"round {turn + 1} of {rounds}")
        plain.append(step.timed(None))
        for name, plan in plans.items():
            taken[name].append(step.timed(plan.routes))
    return _median(plain), {name: _median(found) for name, found in taken.items()}


def planned(saved: Sequence[ReadyTensor], rates: Rates, forward_ms: float) -> dict[str, Timeline]:
    """Every way's timeline on the model, by the rates."""
    alone = {GPU: Route.GPU_PACKS, CPU: Route.CPU_PACKS}
    found = {
        name: simulate(saved, [route] * len(saved), rates, forward_ms)
        for name, route in alone.items()
    }
    return found | {BOTH: split(saved, rates, forward_ms)}


@dataclass(frozen=True, slots=True)
class _Times:
    """Of one step (ms): forward with all packing done, and backward; and what its store counted."""

    packed_ms: float
    backward_ms: float
    code_bytes: int = 0
    reads: int = 0
    late_reads: float = 0.0


def _median(found: Sequence[_Times]) -> _Times:
    return replace(
        found[-1],
        packed_ms=statistics.median(each.packed_ms for each in found),
        backward_ms=statistics.median(each.backward_ms for each in found),
        late_reads=statistics.median(each.late_reads for each in found),
    )


class _Step:
    """Forward and backward of the model, with a way to save."""

    def __init__(self, job: PackJob, bed: Bed, treatment: Treatment) -> None:
        torch.manual_seed(0)
        self._bed = bed
        self._treatment = treatment
        self._model: nn.Module = resnet18(10).to(bed.place)
        self._images = torch.randn(job.batch, 3, job.image, job.image, device=bed.place)
        # While rates are measured, no code waits for room between the marks around its packing.
        self._staging_bytes = _NO_LIMIT

    def observed(self) -> tuple[Seen, Rates]:
        """What a session observes in its first passes, in which the device packs everything."""
        made: list[Routes] = []

        def routes(store: HostStore) -> Routes:
            made.append(Routes(store.transfers))
            return made[-1]

        host = self._host(routes)
        while not made or made[0].seen is None:
            self._pass(host)
            self._bed.finish()
        assert made[0].rates is not None
        coded = [each.code_bytes for each in made[0].seen.saved]
        self._staging_bytes = max(*coded, int(STAGING_SHARE * sum(coded)))
        return made[0].seen, made[0].rates

    def watched(self, routes: Sequence[Route]) -> Measured:
        """One forward pass, its tensors on these routes, each piece of whose packing is timed."""
        self._bed.finish()
        store = self._bed.store(self._bed.place, self._staging_bytes)
        watched = Watched(routes, store.transfers)
        host = self._host(lambda _: watched, lambda *_: store)
        watched.begin_pass(math.inf)
        loss = self._coded_loss(host)
        watched.end_forward()
        host.wait_until_packed()
        self._bed.finish()
        del loss  # its codes were wanted until all had been sent
        return watched.measured()

    def _host(
        self,
        make_routes: Callable[[HostStore], Routes],
        make_store: Callable[..., HostStore] | None = None,
    ) -> HostCodes:
        options = HostOptions(_NO_LIMIT, self._staging_bytes, raw_bytes=_NO_LIMIT)
        make_store = make_store or self._bed.store
        return HostCodes(options, make_store=make_store, make_routes=make_routes)

    def _pass(self, host: HostCodes) -> None:
        host.begin_pass()
        self._coded_loss(host).backward()  # type: ignore[no-untyped-call]

    def _coded_loss(self, host: HostCodes) -> Tensor:
        with saved_tensors_hooks(*_hooks(host, self._treatment)):
            return self._loss()

    def _loss(self) -> Tensor:
        result: Tensor = self._model(self._images)
        return result.square().mean()

    def timed(self, routes: Sequence[Route] | None) -> _Times:
        """One step, its tensors on these routes, or None: kept where they are."""
        self._model.zero_grad()
        self._bed.finish()
        start_s = time.perf_counter()
        if routes is None:
            return self._backward(self._loss(), start_s)
        store = self._bed.store(self._bed.place, self._staging_bytes)
        host = self._host(lambda _: Given(routes), lambda *_: store)
        loss = self._coded_loss(host)
        host.wait_until_packed()
        coded = store.stored_bytes
        times = self._backward(loss, start_s)
        return replace(times, code_bytes=coded, reads=store.reads, late_reads=store.late_reads)

    def _backward(self, loss: Tensor, start_s: float) -> _Times:
        self._bed.finish()
        middle_s = time.perf_counter()
        loss.backward()  # type: ignore[no-untyped-call]
        self._bed.finish()
        return _Times(1000.0 * (middle_s - start_s), 1000.0 * (time.perf_counter() - middle_s))


def is_packed(tensor: Tensor) -> bool:
    """Large, dense, computed float32: what travels."""
    is_large = tensor.dtype is torch.float32 and tensor.nbytes >= LEAST_BYTES
    return is_large and is_dense(tensor) and not isinstance(tensor, nn.Parameter)


def _hooks(
    host: HostCodes, treatment: Treatment
) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """What autograd calls: every large tensor becomes a code that waits on the host."""
    keys = count()

    def pack(tensor: Tensor) -> Any:
        if not is_packed(tensor):
            return tensor
        code = host.values(tensor, treatment, next(keys), None)
        return code, tensor.shape, tensor.stride(), tensor.device

    def unpack(held: Any) -> Tensor:
        if isinstance(held, Tensor):
            return held
        code, shape, stride, device = held
        out = torch.empty_strided(shape, stride, device=device)
        code.decode(out)
        return out

    return pack, unpack


def _row(plan: Timeline, found: _Times, plain: _Times) -> dict[str, Any]:
    return {
        "gpu_packs": sum(route is Route.GPU_PACKS for route in plan.routes),
        "cpu_packs": sum(route is Route.CPU_PACKS for route in plan.routes),
        "plain_forward_ms": plain.packed_ms,
        "packed_ms": found.packed_ms,
        "exposed_ms": max(0.0, found.packed_ms - plain.packed_ms),
        "predicted_exposed_ms": plan.exposed_ms,
        "backward_ratio": found.backward_ms / plain.backward_ms,
        "code_bytes": found.code_bytes,
        "reads": found.reads,
        "late_reads": found.late_reads,
        "timeline": [job._asdict() for job in plan.jobs],
    }


def _measured_row(measured: Measured) -> dict[str, Any]:
    return {
        "measured_timeline": [job._asdict() for job in measured.jobs],
        "measured_forward_ms": measured.forward_ms,
    }


def _figures(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    exposed = {row["way"]: row["exposed_ms"] for row in rows}
    alone = min(exposed[GPU], exposed[CPU])
    both = next(row for row in rows if row["way"] == BOTH)
    return {
        "exposed_ms": exposed[BOTH],
        "exposed_share_of_forward": exposed[BOTH] / both["plain_forward_ms"],
        "exposed_ms_of_better_alone": alone,
        "backward_ratio": both["backward_ratio"],
    }


def _notes(job: PackJob, bed: Bed, rates: Rates, saved: Sequence[ReadyTensor]) -> tuple[str, ...]:
    is_gpu = bed.place.type == "cuda"
    name = torch.cuda.get_device_name(bed.place) if is_gpu else str(bed.place)
    raw = sum(each.raw_bytes for each in saved)
    speeds = ", ".join(
        f"{what} {getattr(rates, what) / 1e6:.1f} GB/s" for what in ("gpu_pack", "cpu_pack", "link")
    )
    return (
        f"ResNet-18, batch {job.batch}, {job.image}², {job.bits} bits; {len(saved)} tensors of "
        f"{raw / 1e6:.0f} MB; device: {name}; medians of {job.rounds} rounds in turn",
        f"measured first: {speeds}",
        "exposed_ms: forward and all packing, less the forward pass alone; predicted_exposed_ms, "
        "timeline: by the model that chose the split; measured_timeline: of one more pass, each "
        "piece of work by the device's clock or the host's; measured_forward_ms: its forward's end",
        "late_reads: of a step's reads, those that were asked for before their words had come back "
        "(the host asks well before the device reads, so that a device waits for fewer)",
    )
