"""Who packs each tensor of a pass, from what the passes before it took on this very device.

Events on the device, which nobody waits for, tell when every tensor was there, how long its packing
took and how long its copy. At the start of a later pass, when they are past, the split of
``collaborate`` is made anew from them: from the first passes on, often at first, then now and then.
A side that packs nothing gets one tensor of such a pass, so that it is seen when it becomes faster.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import Any, NamedTuple, Protocol

import torch

from daf.core.code_format import code_bytes
from daf.core.policy import Treatment
from daf.offload.collaborative_packing import (
    NEW_RATE_WEIGHT,
    Rates,
    ReadyTensor,
    Route,
    other,
    split,
)
from daf.offload.host_encoder import encode_on_host
from daf.pool.transfers import Transfers

_PROBE_ELEMENTS = 1 << 20
_LOOK_EVERY = 64
_LEAST_MS = 1e-6


@dataclass(frozen=True, slots=True)
class Sent:
    """One tensor on its way: marks before and after what the device did for it, and its copy."""

    route: Route
    elements: int
    raw_bytes: int
    treatment: Treatment
    before: Any
    after: Any
    copy: Any

    @property
    def code_bytes(self) -> int:
        """Of its code."""
        return code_bytes(self.elements, self.treatment.bits)

    @property
    def moved_bytes(self) -> int:
        """What travelled out."""
        return self.code_bytes if self.route is Route.GPU_PACKS else self.raw_bytes


class Seen(NamedTuple):
    """A pass: its tensors, and its own time without packing (ms)."""

    saved: tuple[ReadyTensor, ...]
    forward_ms: float


class Routes(Protocol):
    """Tells every tensor of a pass its way."""

    def begin_pass(self, most_raw_bytes: float) -> None:
        """Another forward pass begins; larger tensors must not go as they are."""

    def take(self) -> Route:
        """The next tensor's way."""

    @property
    def is_watching(self) -> bool:
        """Is ``note`` to be called in this pass?"""

    def note(self, sent: Sent) -> None:
        """A tensor is on its way."""

    def end_forward(self) -> None:
        """Backward begins (and goes on)."""

    def processor_took(self, raw_bytes: int, taken_ms: float) -> None:
        """The processor has packed a tensor; from any thread."""


class MeasuredRoutes:
    """The split by measured rates; until there are any, the device packs everything."""

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self._passes = 0
        self._ways: tuple[Route, ...] = ()
        self._next: Iterator[Route] = iter(())
        self._sent: list[Sent] = []
        self._begin: Any = None
        self._end: Any = None
        self._watches = False
        self._rates_lock = threading.Lock()  # the processor's thread renews its own
        self.rates: Rates | None = None
        self.seen: Seen | None = None

    @property
    def ways(self) -> tuple[Route, ...]:
        """Of the tensors of a pass, in order; those beyond are packed by the device."""
        return self._ways

    def begin_pass(self, most_raw_bytes: float) -> None:
        """Decide anew, if a watched pass is past."""
        if self._end is None:
            self._sent.clear()  # a pass that was given up, or never read: it tells nothing
        elif self._sent and self._is_past():
            self._decide(most_raw_bytes)
        self._passes += 1
        self._watches, ways = self._is_due(), self._ways
        if self._watches:
            self._begin, self._end = self._transfers.mark(), None
            ways = self._with_a_trial(most_raw_bytes)
        self._next = iter(chain(ways, repeat(Route.GPU_PACKS)))

    def take(self) -> Route:
        """As the last decision says."""
        return next(self._next, Route.GPU_PACKS)

    @property
    def is_watching(self) -> bool:
        """In some passes."""
        return self._watches

    def note(self, sent: Sent) -> None:
        """Remember it until the pass is past."""
        self._sent.append(sent)

    def end_forward(self) -> None:
        """The first time, in a watched pass, is its end."""
        if self._watches:
            self._watches = False
            self._end = self._transfers.mark()
            if not self._sent:
                self._begin = self._end = None

    def processor_took(self, raw_bytes: int, taken_ms: float) -> None:
        """Draws the rate towards it; after a rest nothing is left of the old one."""
        with self._rates_lock:
            if self.rates is not None:
                weight = NEW_RATE_WEIGHT if Route.CPU_PACKS in self._ways else 1.0
                self.rates = self.rates.observed("cpu_pack", raw_bytes, taken_ms, weight)

    # --- deciding ---------------------------------------------------------------------------

    def _is_due(self) -> bool:
        """Not the first, in which kernels are compiled; and not while an earlier one is awaited."""
        number = self._passes
        regular = number & (number - 1) == 0 or number % _LOOK_EVERY == 0
        return number > 1 and regular and not self._sent

    def _with_a_trial(self, most_raw_bytes: float) -> tuple[Route, ...]:
        """The ways; where one side would pack all, the other gets the largest that may go."""
        if self.seen is None or len(set(self._ways)) != 1:
            return self._ways
        sizes = [tensor.raw_bytes for tensor in self.seen.saved]
        place = max(
            (place for place, size in enumerate(sizes) if size <= most_raw_bytes),
            key=sizes.__getitem__,
            default=None,
        )
        if place is None:
            return self._ways
        return (*self._ways[:place], other(self._ways[place]), *self._ways[place + 1 :])

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
        self._ways = split(saved, self.rates, forward_ms, most_raw_bytes).routes

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
            # Of a whole pass, so that nothing needs to be drawn out of noise.
            self.rates = replace(self.rates, link=moved / copying_ms)
            if packed:
                self.rates = replace(self.rates, gpu_pack=packed / packing_ms)


def processor_rate(treatment: Treatment) -> float:
    """Raw bytes a millisecond that the processor packs of a made-up tensor; takes some of them."""
    tensor = torch.linspace(-1.0, 1.0, _PROBE_ELEMENTS)
    taken_ms = []
    for _ in range(2):
        begin_s = time.perf_counter()
        encode_on_host(tensor, treatment, 0)
        taken_ms.append(1000.0 * (time.perf_counter() - begin_s))
    return tensor.nbytes / max(min(taken_ms), _LEAST_MS)
