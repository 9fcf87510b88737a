"""``daf bench pack --device cpu``: another core packs beside the forward pass, in one memory.

DAF's paper (arXiv 2507.07149) hands raw activations to other cores, which pack them while forward
goes on; they are unpacked in backward. Here a helper thread does that for real models: its codes
land in the paged pool, and forward runs on the cores that are left. Beside it stand packing on the
thread of the forward pass, which is what DAF does, a helper that takes no core away, and one that
copies each tensor first, as where memory is not shared. All take turns with plain steps.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from daf.codecs.coder import Coder
from daf.codecs.codes import ValueCode
from daf.core.policy import Method, Treatment
from daf.pool.paged_pool import PagedStore
from daf.step.microbatch import read_loss
from daf_bench.doors.interval import interval_of
from daf_bench.harness.result import BenchResult
from daf_bench.offload.run import is_packed
from daf_bench.workloads import built_workload
from daf_bench.workloads.sources import Sources, default_sources
from daf_bench.workloads.trainable import Trainable

Row = dict[str, Any]
PLAIN, SAME, OWN_CORE, NO_CORE, COPIED = (
    "plain",
    "on the forward thread",
    "helper, a core of its own",
    "helper, all cores shared",
    "helper, a core of its own, copied first",
)
MOST_WAITING = 0.25  # of what a pass packs, raw and not packed yet: then forward waits


@dataclass(frozen=True, slots=True)
class SharedJob:
    """What is run; ``rounds`` of every way in turn, six at least."""

    workloads: tuple[str, ...] = ("w1", "w3")
    bits: int = 2
    rounds: int = 9
    is_small: bool = False
    sources: Sources = field(default_factory=default_sources)


def quick_job() -> SharedJob:
    """Small inputs: seconds."""
    return SharedJob(rounds=6, is_small=True)


@dataclass(frozen=True, slots=True)
class Way:
    """Who packs, and on how many threads forward runs meanwhile."""

    packs: bool
    forward_threads: int
    has_helper: bool = False
    copies: bool = False


def ways_of(threads: int) -> dict[str, Way]:
    """Every way on a machine of so many threads; a core of its own needs two."""
    fewer = max(1, threads - 1)
    return {
        PLAIN: Way(False, threads),
        SAME: Way(True, threads),
        OWN_CORE: Way(True, fewer, has_helper=True),
        NO_CORE: Way(True, threads, has_helper=True),
        COPIED: Way(True, fewer, has_helper=True, copies=True),
    }


@dataclass(slots=True)
class Taken:
    """Milliseconds of one step, and bytes."""

    forward_ms: float = 0.0
    packed_ms: float = 0.0  # from the begin of forward until all is packed
    step_ms: float = 0.0
    packing_ms: float = 0.0  # by whoever packs, copies included
    copying_ms: float = 0.0
    raw_bytes: int = 0
    code_bytes: int = 0
    copied_bytes: int = 0
    waiting_bytes: int = 0  # raw and not packed yet, at most


class Packing:
    """What autograd saves in one step, packed by a way."""

    def __init__(self, way: Way, bits: int, helper: ThreadPoolExecutor, most_bytes: float) -> None:
        self.taken = Taken()
        self._way, self._helper, self._most_bytes = way, helper, most_bytes
        self._store = PagedStore(page_bytes=None)
        self._coder, self._treatment = Coder(self._store), Treatment(Method.ROTATED, bits)
        self._keys = count()
        self._waiting: deque[tuple[Future[ValueCode], int]] = deque()
        self._waiting_bytes = 0
        # What an activation saves its product saves, too: both hold one code.
        self._recent: deque[tuple[Tensor, Any]] = deque(maxlen=2)

    def hooks(self) -> saved_tensors_hooks:
        """What autograd calls."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def finish(self) -> None:
        """Wait until all is packed."""
        while self._waiting:
            self._take_in()
        self._recent.clear()
        self.taken.code_bytes = self._store.live_bytes

    def _pack(self, tensor: Tensor) -> Any:
        if not is_packed(tensor):
            return tensor
        for known, held in self._recent:
            if known.data_ptr() == tensor.data_ptr() and known.shape == tensor.shape:
                return held
        self.taken.raw_bytes += tensor.nbytes
        held = self._code(tensor.detach()), tensor.shape, tensor.stride()
        self._recent.append((tensor.detach(), held))
        return held

    def _code(self, tensor: Tensor) -> ValueCode | Future[ValueCode]:
        key = next(self._keys)
        if not self._way.has_helper:
            return self._encode(tensor, key)
        while self._waiting and self._waiting_bytes + tensor.nbytes > self._most_bytes:
            self._take_in()
        self._waiting_bytes += tensor.nbytes
        self.taken.waiting_bytes = max(self.taken.waiting_bytes, self._waiting_bytes)
        coming = self._helper.submit(self._encode, tensor, key)
        self._waiting.append((coming, tensor.nbytes))
        return coming

    def _take_in(self) -> None:
        coming, nbytes = self._waiting.popleft()
        coming.result()
        self._waiting_bytes -= nbytes

    def _encode(self, tensor: Tensor, key: int) -> ValueCode:
        start_s = time.perf_counter()
        if self._way.copies:
            tensor = tensor.clone()
            self.taken.copied_bytes += tensor.nbytes
            self.taken.copying_ms += 1000.0 * (time.perf_counter() - start_s)
        code = self._coder.values(tensor, self._treatment, key, None)
        self.taken.packing_ms += 1000.0 * (time.perf_counter() - start_s)
        return code

    @staticmethod
    def _unpack(held: Any) -> Tensor:
        if isinstance(held, Tensor):
            return held
        code, shape, stride = held
        out = torch.empty_strided(shape, stride)
        (code.result() if isinstance(code, Future) else code).decode(out)
        return out


class _Steps:
    """Steps of one workload, a way each."""

    def __init__(self, work: Trainable, bits: int, threads: int) -> None:
        self._work, self._bits, self._threads = work, bits, threads
        self._helper = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,))
        self._raw_bytes = 0
        self._index = 0

    def step(self, way: Way) -> Taken:
        """One step that trains, as this way packs what it saves."""
        work, batch = self._work, self._work.batch(self._index)
        self._index += 1
        work.optimizer.zero_grad(set_to_none=True)
        most = MOST_WAITING * self._raw_bytes or float("inf")
        packing = Packing(way, self._bits, self._helper, most)
        taken, start_s = packing.taken, time.perf_counter()
        with _threads(way.forward_threads, self._threads):
            if way.packs:
                with packing.hooks():
                    loss = read_loss(work.task.loss(work.model, batch), work.order.batch_size).mean
            else:
                loss = read_loss(work.task.loss(work.model, batch), work.order.batch_size).mean
            taken.forward_ms = 1000.0 * (time.perf_counter() - start_s)
            packing.finish()
            taken.packed_ms = 1000.0 * (time.perf_counter() - start_s)
        loss.backward()  # type: ignore[no-untyped-call]
        work.optimizer.step()
        taken.step_ms = 1000.0 * (time.perf_counter() - start_s)
        self._raw_bytes = max(self._raw_bytes, taken.raw_bytes)
        return taken

    def end(self) -> None:
        """Let the helper go."""
        self._helper.shutdown()


@contextmanager
def _threads(wanted: int, usual: int) -> Iterator[None]:
    torch.set_num_threads(wanted)
    try:
        yield
    finally:
        torch.set_num_threads(usual)


def run(job: SharedJob, on_progress: Callable[[str], None] = lambda _: None) -> BenchResult:
    """Take turns on every workload."""
    threads = torch.get_num_threads()
    rows = [row for name in job.workloads for row in _rows(job, name, threads, on_progress)]
    notes = (
        f"{job.bits} bits; forward on {threads} threads of {os.cpu_count()} cores, on one fewer "
        "beside a helper with a core of its own; backward on all; medians of "
        f"{job.rounds} rounds in turn; data: {job.sources.described()}",
        "exposed: what forward and all packing take more than plain's forward; hidden: the rest of "
        "the packing; forward_ratio: of plain's, what forward alone takes beside the helper",
        f"a helper lags at most {MOST_WAITING:.0%} of what a pass packs behind; then forward waits",
        "helper_step_ratio_*: the better helper's whole step over that of packing on the forward "
        "thread (near end: above 1 it does not pay); copied: each tensor is copied before it is "
        "packed, as where processor and accelerator share no memory",
    )
    return BenchResult("pack_shared", rows, figures_of(rows), notes)


def _rows(
    job: SharedJob, name: str, threads: int, on_progress: Callable[[str], None]
) -> Iterator[Row]:
    folder = None if job.sources.folder is None else str(job.sources.folder)
    on_progress(f"{name}: loading")
    work = built_workload(name, folder, is_small=job.is_small)
    ways, steps = ways_of(threads), _Steps(work, job.bits, threads)
    found: dict[str, list[Taken]] = {way: [] for way in ways}
    try:
        for way in ways.values():  # once unmeasured: pages, pools, and how much a pass packs
            steps.step(way)
        for turn in range(job.rounds):
            on_progress(f"{name}: round {turn + 1} of {job.rounds}")
            for label in list(ways) if turn % 2 == 0 else [*reversed(ways)]:
                found[label].append(steps.step(ways[label]))
    finally:
        steps.end()
    for label, taken in found.items():
        yield {"workload": name, "way": label} | _row(ways[label], taken, found)


def _row(way: Way, taken: list[Taken], found: Mapping[str, list[Taken]]) -> Row:
    plain, same = found[PLAIN], found[SAME]
    packing_ms = median(each.packing_ms for each in taken)
    exposed = [one.packed_ms - other.forward_ms for one, other in zip(taken, plain, strict=True)]
    exposed_ms = max(0.0, median(exposed))
    forward = [one.forward_ms / other.forward_ms for one, other in zip(taken, plain, strict=True)]
    beside = [one.step_ms / other.step_ms for one, other in zip(taken, same, strict=True)]
    whole = [one.step_ms / other.step_ms for one, other in zip(taken, plain, strict=True)]
    return {
        "forward_threads": way.forward_threads,
        "forward_ms": median(each.forward_ms for each in taken),
        "forward_ratio": median(forward),
        "packing_ms": packing_ms,
        "copying_ms": median(each.copying_ms for each in taken),
        "exposed_ms": exposed_ms,
        "hidden_ms": max(0.0, packing_ms - exposed_ms),
        "keeps_up": way.has_helper and packing_ms <= median(each.forward_ms for each in taken),
        "step_ms": median(each.step_ms for each in taken),
        "step_ratio": median(whole),
        "step_over_same": interval_of(beside).middle,
        "step_over_same_low": interval_of(beside).low,
        "step_over_same_high": interval_of(beside).high,
        "raw_bytes": taken[-1].raw_bytes,
        "code_bytes": taken[-1].code_bytes,
        "copied_bytes": taken[-1].copied_bytes,
        "waiting_bytes": max(each.waiting_bytes for each in taken),
    }


_HELPERS = (OWN_CORE, NO_CORE)


def figures_of(rows: list[Row]) -> dict[str, float]:
    """The figures, of each workload and the worst."""
    figures: dict[str, float] = {}
    by_way = {(row["workload"], row["way"]): row for row in rows}
    for name in dict.fromkeys(row["workload"] for row in rows):
        best = min((by_way[name, way] for way in _HELPERS), key=lambda row: float(row["step_ms"]))
        copied = by_way[name, COPIED]
        figures[f"{name}_helper_step_ratio"] = best["step_over_same"]
        figures[f"{name}_hidden_share"] = best["hidden_ms"] / max(1e-9, best["packing_ms"])
        figures[f"{name}_exposed_ms"] = best["exposed_ms"]
        figures[f"{name}_forward_ratio"] = best["forward_ratio"]
        figures[f"{name}_copy_share"] = copied["copying_ms"] / max(1e-9, copied["packing_ms"])
        figures[f"{name}_helper_step_ratio_near"] = _near(best)
    nears = [value for label, value in figures.items() if label.endswith("_near")]
    return figures | {
        "helper_step_ratio_best": min(nears),
        "helper_pays": sum(row["step_over_same_high"] < 1.0 for row in rows if _is_helper(row)),
        "helpers": sum(map(_is_helper, rows)),
    }


def _is_helper(row: Row) -> bool:
    return row["way"] in _HELPERS


def _near(row: Row) -> float:
    """The end of the interval that is nearer to 1."""
    low, high = float(row["step_over_same_low"]), float(row["step_over_same_high"])
    return low if low > 1.0 else min(high, 1.0)
