"""Chooses who packs each tensor of a pass, from what earlier passes measured on this device.

Events, which nobody waits for, record when each tensor was ready and how long packing and copying
took. A later pass recomputes the ``split`` (arXiv 2507.07149 fixes it): often at first, then now
and then. A side that packs nothing gets one tensor of such a pass, to show if it becomes faster.
"""

import math
import threading
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NamedTuple

import torch

from daf.core.code_format import code_bytes
from daf.core.errors import KernelError
from daf.core.policy import Treatment
from daf.pool.host_planes import encode_on_host
from daf.pool.transfers import Transfers

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
    ) -> "Rates":
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
    some place, none and all included: the answer is never worse than either side alone. Of few,
    single routes are changed while that helps. The GPU packs all above ``most_raw_bytes``.
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


_PROBE_ELEMENTS = 1 << 20
_LOOK_EVERY = 64
_LEAST_MS = 1e-6


@dataclass(frozen=True, slots=True)
class Sent:
    """One tensor on its way: marks before and after the device's work on it, and its copy."""

    route: Route
    elements: int
    raw_bytes: int
    treatment: Treatment
    before: Any
    after: Any
    copy: Any

    @property
    def code_bytes(self) -> int:
        """Bytes of its code."""
        return code_bytes(self.elements, self.treatment.bits)

    @property
    def moved_bytes(self) -> int:
        """Bytes that travelled out."""
        return self.code_bytes if self.route is Route.GPU_PACKS else self.raw_bytes


class Seen(NamedTuple):
    """A measured pass: its tensors, and its own time without packing (ms)."""

    saved: tuple[ReadyTensor, ...]
    forward_ms: float


class Routes:
    """The route of every tensor of a pass, by measured rates; without any the device packs all."""

    def __init__(self, transfers: Transfers) -> None:
        self._transfers, self._passes = transfers, 0
        self.ways: tuple[Route, ...] = ()  # in order of the pass; the device packs those beyond
        self._next: Iterator[Route] = iter(())
        self._sent: list[Sent] = []
        self._begin: Any = None
        self._end: Any = None
        self.is_watching = False  # ``note`` is to be called in this pass
        self._rates_lock = threading.Lock()  # the processor's thread renews its own
        self.rates: Rates | None = None
        self.seen: Seen | None = None

    def begin_pass(self, most_raw_bytes: float) -> None:
        """Begin another forward pass; recompute the split if a watched one is past.

        ``most_raw_bytes``: larger tensors must not travel raw.
        """
        if self._end is None:
            self._sent.clear()  # a pass that was dropped, or never read: it measures nothing
        elif self._sent and self._is_past():
            self._decide(most_raw_bytes)
        self._passes += 1
        self.is_watching, ways = self._is_due(), self.ways
        if self.is_watching:
            self._begin, self._end = self._transfers.mark(), None
            ways = self._with_a_trial(most_raw_bytes)
        self._next = iter(ways)

    def take(self) -> Route:
        """Return the next route of the last split; beyond it the device packs."""
        return next(self._next, Route.GPU_PACKS)

    def note(self, sent: Sent) -> None:
        """Keep the tensor's marks until the pass is past."""
        self._sent.append(sent)

    def end_forward(self) -> None:
        """End a watched pass, the first time."""
        if self.is_watching:
            self.is_watching = False
            self._end = self._transfers.mark()
            if not self._sent:
                self._begin = self._end = None

    def processor_took(self, raw_bytes: int, taken_ms: float) -> None:
        """Note, on any thread, a tensor that the processor packed; a rest voids the old rate."""
        with self._rates_lock:
            if self.rates is not None:
                weight = NEW_RATE_WEIGHT if Route.CPU_PACKS in self.ways else 1.0
                self.rates = self.rates.observed("cpu_pack", raw_bytes, taken_ms, weight)

    def _is_due(self) -> bool:
        """True if a pass is due to be watched: not the first (it compiles), nor while one waits."""
        number = self._passes
        regular = number & (number - 1) == 0 or number % _LOOK_EVERY == 0
        return number > 1 and regular and not self._sent

    def _with_a_trial(self, most_raw_bytes: float) -> tuple[Route, ...]:
        """Return the routes; if one side would pack all, the other gets the largest that may go."""
        if self.seen is None or len(set(self.ways)) != 1:
            return self.ways
        sizes = [tensor.raw_bytes for tensor in self.seen.saved]
        may_go = [place for place, size in enumerate(sizes) if size <= most_raw_bytes]
        if not may_go:
            return self.ways
        place = max(may_go, key=sizes.__getitem__)
        return (*self.ways[:place], other(self.ways[place]), *self.ways[place + 1 :])

    def _is_past(self) -> bool:
        tickets = [self._begin, self._end, *(each.after for each in self._sent)]
        tickets += [each.copy for each in self._sent]
        return all(map(self._transfers.is_done, tickets))

    def _decide(self, most_raw_bytes: float) -> None:
        sent, self._sent = self._sent, []
        elapsed, stolen_ms = self._transfers.elapsed_ms, 0.0
        saved = []
        for each in sent:
            ready_ms = max(0.0, elapsed(self._begin, each.before) - stolen_ms)
            saved.append(ReadyTensor(ready_ms, each.raw_bytes, each.code_bytes))
            if each.route is Route.GPU_PACKS:
                stolen_ms += elapsed(each.before, each.after)
        self._observe(sent, stolen_ms)
        forward_ms = max(0.0, elapsed(self._begin, self._end) - stolen_ms)
        assert self.rates is not None
        self.seen = Seen(tuple(saved), forward_ms)
        self.ways = split(saved, self.rates, forward_ms, most_raw_bytes).routes

    def _observe(self, sent: list[Sent], packing_ms: float) -> None:
        packed = sum(each.raw_bytes for each in sent if each.route is Route.GPU_PACKS)
        moved = sum(each.moved_bytes for each in sent)
        copying_ms = sum(self._transfers.duration_ms(each.copy) for each in sent)
        packing_ms, copying_ms = max(packing_ms, _LEAST_MS), max(copying_ms, _LEAST_MS)
        if self.rates is None:
            processor = processor_rate(sent[0].treatment)
            self.rates = Rates(packed / packing_ms, processor, moved / copying_ms)
            return
        with self._rates_lock:
            # Of a whole pass, so that no noise needs averaging.
            self.rates = replace(self.rates, link=moved / copying_ms)
            if packed:
                self.rates = replace(self.rates, gpu_pack=packed / packing_ms)


def processor_rate(treatment: Treatment) -> float:
    """Measure the processor's packing in raw bytes per millisecond, on a made-up tensor."""
    tensor = torch.linspace(-1.0, 1.0, _PROBE_ELEMENTS, dtype=torch.float32)
    taken_ms = []
    for _ in range(2):
        begin_s = time.perf_counter()
        encode_on_host(tensor, treatment, 0)
        taken_ms.append(1000.0 * (time.perf_counter() - begin_s))
    return tensor.nbytes / max(min(taken_ms), _LEAST_MS)
