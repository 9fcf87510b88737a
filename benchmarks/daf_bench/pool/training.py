"""What a pool is asked for by a real training loop with widths that move, and what that wastes.

ResNet-20 learns a speaker's digits for thousands of steps. After each step some sites' codes become
a bit wider or narrower, so that hardly two steps ask for the same. The requests are played on every
contestant, on pages of several sizes and on each rule of growth.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from daf.capture.capture import Capture
from daf.core.policy import Method, Policy, Site, Treatment, coded_policy
from daf.core.reports import SiteReport
from daf.pool.page_size import Elements, choose_page_bytes
from daf.pool.paged_pool import PagedStore
from daf.step.microbatch import read_loss
from daf_bench.pool import trace_player
from daf_bench.pool.trace_format import Event, record
from daf_bench.pool.traces import (
    ALLOCATE,
    BARE,
    CONTESTANTS,
    GROWTH_RULES,
    MARK,
    RELEASE,
    Operations,
    growth_row,
    play,
    usual_cap,
    waste_of,
)
from daf_bench.workloads import find_workload
from daf_bench.workloads.sources import Sources

Row = dict[str, Any]
WORKLOAD = "w6"
PAGE_SIZES = (128, 512, 2048, 8192, 32768)
# Steps of 100 MB say nothing of a pool that holds a few: growth is compared on the first steps'
# requests, as large as those of a batch whose codes take so much.
GROWING_STEPS, GROWING_BYTES = 200, 300_000_000
_WIDEST = 4
_MOVED = 0.2  # of the sites, after each step


@dataclass
class Requests:
    """What a recorded pool was asked for, as ``trace_player.OPERATION``."""

    rows: list[tuple[int, float, int, int, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._places: dict[int, int] = {}  # of the tensors that live
        self._free: list[int] = []
        self._most = 0

    def __call__(self, event: Event) -> None:
        """Take in one operation of ``trace_format``."""
        if event["op"] == "planes":
            action = ALLOCATE if event["headers"] else BARE
            bits, least = event["bits"], event["minimum"]
            place = self._take_place(event["id"])
            self.rows.append((event["count"], event["importance"][0], place, action, bits, least))
        elif event["op"] == "free":
            place = self._places.pop(event["id"])
            self._free.append(place)
            self.rows.append((0, 0.0, place, RELEASE, 0, 0))

    def mark(self) -> None:
        """Note that a forward pass has ended."""
        self.rows.append((0, 0.0, 0, MARK, 0, 0))

    def operations(self) -> Operations:
        """Return everything so far."""
        return np.array(self.rows, dtype=trace_player.OPERATION)

    def _take_place(self, identity: int) -> int:
        if not self._free:
            self._free.append(self._most)
            self._most += 1
        self._places[identity] = self._free.pop()
        return self._places[identity]


@dataclass(frozen=True)
class Recorded:
    """A loop's requests, and what its own pool made of them."""

    operations: Operations
    first: list[Elements]  # of its first step
    payload_bytes: list[int]  # where each forward pass ends
    held_bytes: list[int]  # there, too
    losses: list[float]
    mean_bits: list[float]  # of the codes whose widths move, by step


def record_loop(steps: int, sources: Sources, *, is_small: bool = False, seed: int = 0) -> Recorded:
    """Train for so many steps, and write down what the pool was asked for."""
    work = find_workload(WORKLOAD).load(sources, is_small).build()
    store, requests = PagedStore(page_bytes=None), Requests()
    record(store, requests)
    capture, random = Capture(work.model, store), np.random.default_rng(seed)
    widths: dict[Site, int] = {}
    accounts, losses, mean_bits = [], [], []
    for index in range(steps):
        batch = work.batch(index)
        work.optimizer.zero_grad(set_to_none=True)
        with capture.step(_policy(widths), seed, index, batch=batch):
            loss = read_loss(work.task.loss(work.model, batch), work.order.batch_size).mean
        requests.mark()
        accounts.append(store.statistics())
        loss.backward()  # type: ignore[no-untyped-call]
        work.optimizer.step()
        losses.append(loss.item())
        widths = _moved(widths, capture.sites(), random)
        mean_bits.append(float(np.mean([*widths.values()])))
    del loss
    operations = requests.operations()
    first = operations[: int(np.flatnonzero(operations["action"] == MARK)[0])]
    sizes = list(zip(first["count"].tolist(), first["bits"].tolist(), strict=True))
    payload_bytes, held_bytes = zip(
        *((n.payload_bytes, n.held_bytes) for n in accounts), strict=True
    )
    return Recorded(operations, sizes, [*payload_bytes], [*held_bytes], losses, mean_bits)


def _policy(widths: Mapping[Site, int]) -> Policy:
    usual = coded_policy(_WIDEST)
    codes = {site: Treatment(Method.ROTATED, bits) for site, bits in widths.items()}
    return replace(usual, by_site=MappingProxyType(codes))


def _moved(
    widths: Mapping[Site, int], reports: list[SiteReport], random: np.random.Generator
) -> dict[Site, int]:
    """Make a fifth of the sites' codes a bit wider or narrower."""
    coded = [each.site for each in reports if each.treatment.method is Method.ROTATED]
    moves = random.choice([-1, 0, 1], len(coded), p=[_MOVED / 2, 1 - _MOVED, _MOVED / 2])
    return {
        site: min(_WIDEST, max(1, widths.get(site, _WIDEST) + int(move)))
        for site, move in zip(coded, moves, strict=True)
    }


def rows_of(
    steps: int, sources: Sources, on_progress: Callable[[str], None], *, is_small: bool = False
) -> list[Row]:
    """The loop's own pool, then its requests on contestants, page sizes and rules of growth."""
    on_progress(f"{steps:,} training steps with widths that move")
    with torch.random.fork_rng(devices=[]):
        found = record_loop(steps, sources, is_small=is_small)
    operations, page_bytes = found.operations, choose_page_bytes(found.first)
    rows = [_own_row(found, steps)]
    for contestant in CONTESTANTS:
        if contestant == "fixed":
            continue  # a step of growth is many times what is held
        on_progress(f"these steps on {contestant}")
        rows.append(_played("contestant", contestant, page_bytes, None, operations))
    for size in PAGE_SIZES:
        on_progress(f"these steps on pages of {size}")
        rows.append(_played("page size", "adaptive", size, None, operations))
    times = -(-GROWING_BYTES // int(np.mean(found.payload_bytes)))
    large = _of_larger_batches(operations, times)
    page_bytes = choose_page_bytes([(times * count, bits) for count, bits in found.first])
    cap = usual_cap(page_bytes, large)
    for rule in GROWTH_RULES:
        on_progress(f"these steps' growth: {rule}")
        samples, seconds = play(rule, page_bytes, cap, large)
        rows.append(_in_training("growth") | growth_row(rule, page_bytes, cap, samples, seconds))
    return rows


def _of_larger_batches(operations: Operations, times: int) -> Operations:
    ends = np.flatnonzero(operations["action"] == MARK)
    found = operations[: int(ends[min(GROWING_STEPS, len(ends)) - 1]) + 1].copy()
    found["count"] *= times
    return found


def _in_training(what: str) -> Row:
    return {"part": "training", "what": what}


def _own_row(found: Recorded, steps: int) -> Row:
    tenth = max(1, steps // 10)
    ratios = [p / h for p, h in zip(found.payload_bytes, found.held_bytes, strict=True)]
    return _in_training("the loop's own pool") | {
        "steps": steps,
        "tensors": int((found.operations["action"] != RELEASE).sum()) - steps,
        "worst_at_peaks": min(ratios),
        "mean_at_peaks": float(np.mean(ratios)),
        "first_tenth": float(np.mean(ratios[:tenth])),
        "last_tenth": float(np.mean(ratios[-tenth:])),
        "first_loss": found.losses[0],
        "last_loss": float(np.mean(found.losses[-tenth:])),
        "least_mean_bits": min(found.mean_bits),
        "most_mean_bits": max(found.mean_bits),
    }


def _played(
    what: str, contestant: str, page_bytes: int, cap: int | None, operations: Operations
) -> Row:
    samples, seconds = play(contestant, page_bytes, cap, operations)
    own = {"contestant": contestant, "page_bytes": page_bytes, "seconds": seconds}
    return _in_training(what) | own | waste_of(operations, samples)
