"""The split of packing between processor and GPU, by measured rates; arXiv 2507.07149 fixes it."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from daf.core.errors import KernelError

NEW_RATE_WEIGHT = 0.25
_PREFIXES = 16
_FEW = 64  # with more tensors, single changes take longer than they save


class Route(Enum):
    """How a tensor becomes pages on the host."""

    GPU_PACKS = "the GPU packs, codes travel"
    CPU_PACKS = "raw data travel, the processor packs"


class ReadyTensor(NamedTuple):
    """A tensor saved in forward: when (ms from the pass's start), its bytes raw and coded."""

    ready_ms: float
    raw_bytes: int
    code_bytes: int


@dataclass(frozen=True, slots=True)
class Rates:
    """Raw bytes per millisecond; ``link``: bytes that travel, infinite where memory is shared."""

    gpu_pack: float
    cpu_pack: float
    link: float

    def __post_init__(self) -> None:
        if not min(self.gpu_pack, self.cpu_pack, self.link) > 0:
            raise KernelError(f"asked to plan with {self}; measured rates are above 0")

    def observed(
        self, name: str, moved_bytes: int, ms: float, weight: float = NEW_RATE_WEIGHT
    ) -> Rates:
        """Return rates with one drawn towards a measurement; weight 1 replaces it."""
        old = getattr(self, name)
        if ms <= 0 or old == float("inf"):
            return self
        return replace(self, **{name: old + weight * (moved_bytes / ms - old)})


class ScheduledWork(NamedTuple):
    """One piece of work on one resource, for the timeline (ms)."""

    resource: str
    saved_index: int
    begin_ms: float
    end_ms: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """The predicted cost of routes: GPU time taken from forward, and work left after its end."""

    routes: tuple[Route, ...]
    jobs: tuple[ScheduledWork, ...]
    stolen_ms: float
    tail_ms: float

    @property
    def exposed_ms(self) -> float:
        """By how much packing lengthens forward."""
        return self.stolen_ms + self.tail_ms


def simulate(
    saved: Sequence[ReadyTensor], routes: Sequence[Route], rates: Rates, forward_ms: float
) -> Timeline:
    """Run the routes on a model: GPU work delays forward, link and processor queue."""
    jobs: list[ScheduledWork] = []
    stolen = link_free = cpu_free = 0.0
    for index, (tensor, route) in enumerate(zip(saved, routes, strict=True)):
        ready = tensor.ready_ms + stolen
        travelling = tensor.raw_bytes
        if route is Route.GPU_PACKS:
            packing = tensor.raw_bytes / rates.gpu_pack
            jobs.append(ScheduledWork("gpu", index, ready, ready + packing))
            stolen, ready, travelling = stolen + packing, ready + packing, tensor.code_bytes
        begin = max(ready, link_free)
        link_free = begin + travelling / rates.link
        jobs.append(ScheduledWork("link", index, begin, link_free))
        if route is Route.CPU_PACKS:
            begin = max(link_free, cpu_free)
            cpu_free = begin + tensor.raw_bytes / rates.cpu_pack
            jobs.append(ScheduledWork("cpu", index, begin, cpu_free))
    last = max(link_free, cpu_free)
    return Timeline(tuple(routes), tuple(jobs), stolen, max(0.0, last - forward_ms - stolen))


def split(
    saved: Sequence[ReadyTensor], rates: Rates, forward_ms: float, most_raw_bytes: float = math.inf
) -> Timeline:
    """Return routes with the least exposed time that a few tries and single changes find.

    The earliest tensors have most time to hide in, so the tries let the processor pack all up to
    some place, none and all included: the answer is never worse than either side alone. With few
    tensors, single routes are then changed while that helps. The GPU always packs tensors larger
    than ``most_raw_bytes``.
    """
    both = [place for place, tensor in enumerate(saved) if tensor.raw_bytes <= most_raw_bytes]
    plans = []
    for end in sorted({len(saved) * part // _PREFIXES for part in range(_PREFIXES + 1)}):
        routes = [Route.GPU_PACKS] * len(saved)
        for place in both[: bisect_left(both, end)]:
            routes[place] = Route.CPU_PACKS
        plans.append(simulate(saved, routes, rates, forward_ms))
    best = min(plans, key=lambda plan: plan.exposed_ms)
    improved = len(saved) <= _FEW
    while improved:
        improved = False
        for index in reversed(both):
            routes = list(best.routes)
            routes[index] = other(routes[index])
            changed = simulate(saved, routes, rates, forward_ms)
            if changed.exposed_ms < best.exposed_ms - 1e-9:
                best, improved = changed, True
    return best


def other(route: Route) -> Route:
    """Return the other route."""
    return Route.CPU_PACKS if route is Route.GPU_PACKS else Route.GPU_PACKS
