"""Allocations by module and operator over time, as ``torch.cuda.memory._record_memory_history``.

Covers PyTorch's tensors and oneDNN's scratch, forward and backward, at tens of µs per operator.
"""

import pickle
import time
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from daf._native import allocator as native
from daf.memory.statistics import stats
from daf.torch_compat.autograd_graph import running_node, sequence_number, sequence_number_of
from daf.torch_compat.operator_mode import DispatchMode

BEFORE = "(before recording)"
_PICKLE_PROTOCOL = 4  # that PyTorch's viewer reads
Record = dict[str, Any]
Frames = list[Record]


@dataclass(frozen=True, slots=True)
class MemoryEvent:
    """One allocation (``bytes`` > 0) or free (< 0), ``time_s`` after recording began."""

    time_s: float
    address: int
    bytes: int
    live_bytes: int  # after it, of blocks born since, and large ones born before
    module: str
    operator: str


class History:
    """A recording of allocations and their askers while it is entered, as an allocator must be.

    ``model``: for full paths in place of class names. ``dropped`` counts events past ``capacity``.
    """

    def __init__(self, model: nn.Module | None = None, *, capacity: int = 1_000_000) -> None:
        self.events: list[MemoryEvent] = []
        self.dropped = 0
        self._names = {} if model is None else {m: n for n, m in model.named_modules()}
        self._capacity = capacity
        self._resources = ExitStack()
        self._start_ns, self._start_us = 0, 0
        self._before: list[MemoryEvent] = []

    def __enter__(self) -> "History":
        self._before = [
            MemoryEvent(0.0, address, size, 0, BEFORE, "")
            for address, size, _, _, _ in native.live_blocks()
        ]
        native.record_events(self._capacity)
        self._start_ns = time.monotonic_ns()
        self._start_us = time.time_ns() // 1000
        self._resources.callback(self._stop)
        asker = _Asker(self._names)
        self._resources.enter_context(register_module_forward_pre_hook(asker.enter))
        self._resources.enter_context(register_module_forward_hook(asker.leave, always_call=True))
        self._resources.enter_context(_LabelOperators(asker))
        return self

    def __exit__(self, *exception: object) -> None:
        self._resources.close()

    @property
    def peak_bytes(self) -> int:
        """The most bytes live while recording."""
        return max((event.live_bytes for event in self.events), default=0)

    def at_peak(self) -> Counter[tuple[str, str]]:
        """Return the bytes that each (module, operator) held when most was live."""
        held: Counter[tuple[str, str]] = Counter()
        last = max(range(len(self.events)), key=lambda i: self.events[i].live_bytes, default=-1)
        for block in live_after(self._before, self.events[: last + 1]) if self.events else ():
            held[block.module, block.operator] += block.bytes
        return held

    def snapshot(self) -> dict[str, Any]:
        """Return the recording in the format of ``torch.cuda.memory._snapshot()``."""
        return snapshot_of(self._before, self.events, self._start_us)

    def write(self, path: Path) -> None:
        """Pickle ``snapshot()``, for pytorch.org/memory_viz or ``torch.cuda._memory_viz``."""
        path.write_bytes(pickle.dumps(self.snapshot(), protocol=_PICKLE_PROTOCOL))

    def _stop(self) -> None:
        recorded, self.dropped = native.recorded_events()
        self.events = list(self._resolve(recorded))

    def _resolve(self, recorded: list[tuple[int, int, int, int]]) -> Iterator[MemoryEvent]:
        live = {birth.address: birth for birth in self._before}
        total = sum(block.bytes for block in live.values())
        for time_ns, address, size, label in recorded:
            seconds = (time_ns - self._start_ns) / 1e9
            gone = live.pop(address, None)
            if gone:  # otherwise a small block from before
                total -= gone.bytes
                yield MemoryEvent(seconds, address, -gone.bytes, total, gone.module, gone.operator)
            if size > 0:
                total += size
                asker = native.label_text(label).partition("\n")[::2]
                live[address] = MemoryEvent(seconds, address, size, total, *asker)
                yield live[address]


class _Asker:
    """The module at work: by its forward call, or by the running node's sequence number."""

    def __init__(self, names: dict[nn.Module, str]) -> None:
        self._names = names
        self._stack: list[str] = []
        self._numbers: list[int] = []
        self._paths: list[str] = []

    def enter(self, module: nn.Module, _inputs: object) -> None:
        self._stack.append(self._names.get(module, type(module).__name__))
        self._mark()

    def leave(self, _module: nn.Module, _inputs: object, _output: object) -> None:
        if self._stack:
            self._stack.pop()
        self._mark()

    def module(self) -> str:
        node: Any = running_node()
        if node is None:
            return self._current()
        place = bisect_right(self._numbers, sequence_number_of(node)) - 1
        path = self._paths[place] if place >= 0 else ""
        return f"{path} (backward)".lstrip()

    def _current(self) -> str:
        return self._stack[-1] if self._stack else ""

    def _mark(self) -> None:
        self._numbers.append(sequence_number())
        self._paths.append(self._current())


class _LabelOperators(DispatchMode):
    """Labels this thread's allocations with the operator that is running."""

    def __init__(self, asker: _Asker) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._asker = asker

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        native.set_label(native.intern_label(f"{self._asker.module()}\n{func}"))
        try:
            return func(*args, **(kwargs or {}))
        finally:
            native.set_label(0)


def live_after(before: Iterable[MemoryEvent], events: Iterable[MemoryEvent]) -> list[MemoryEvent]:
    """Return the births of blocks live after ``events``; ``before``: those at their start."""
    live = {birth.address: birth for birth in before}
    for event in events:
        live.pop(event.address, None)
        if event.bytes > 0:
            live[event.address] = event
    return list(live.values())


def snapshot_of(
    before: Sequence[MemoryEvent], events: Sequence[MemoryEvent], start_us: int
) -> Record:
    """Return a recording in the format of ``torch.cuda.memory._snapshot()``, as device 0.

    A segment is a range of addresses that ever held live blocks. A block's only frame has the
    module's path as its file and the operator as its function. ``before``: births of blocks live at
    the start; ``start_us``: microseconds since 1970.
    """
    frames = cache(lambda module, operator: [{"filename": module, "line": 0, "name": operator}])
    live = sorted(live_after(before, events), key=lambda block: block.address)
    addresses = [block.address for block in live]
    segments = []
    for start, end in _ranges([*before, *events]):
        inside = live[bisect_left(addresses, start) : bisect_left(addresses, end)]
        segments.append(_segment(start, end, inside, frames))
    trace = [
        {
            "action": action,
            "addr": event.address,
            "size": abs(event.bytes),
            "stream": 0,
            "time_us": start_us + int(event.time_s * 1e6),
            "frames": frames(event.module, event.operator),
        }
        for event in events
        for action in (("alloc",) if event.bytes > 0 else ("free_requested", "free_completed"))
    ]
    return {"segments": segments, "device_traces": [trace]}


def snapshot() -> Record:
    """Return live blocks of 128 KiB and more in the format of ``torch.cuda.memory._snapshot()``.

    Frames are empty unless a ``History`` recorded the births. ``"statistics"`` has ``stats()``.
    """
    live = [
        MemoryEvent(0.0, address, size, 0, *native.label_text(label).partition("\n")[::2])
        for address, size, _, _, label in native.live_blocks()
    ]
    return {"statistics": stats(), **snapshot_of(live, (), start_us=0)}


def _ranges(blocks: Iterable[MemoryEvent]) -> list[tuple[int, int]]:
    """Return the addresses that blocks cover, as disjoint (start, end) in order."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted((block.address, block.address + abs(block.bytes)) for block in blocks):
        if merged and start <= merged[-1][1]:
            first, last = merged.pop()
            start, end = first, max(last, end)
        merged.append((start, end))
    return merged


def _segment(
    start: int, end: int, live: Iterable[MemoryEvent], frames: Callable[[str, str], Frames]
) -> Record:
    """Return a segment from ``start`` to ``end``; what lies between live blocks is inactive."""
    blocks: list[Record] = []
    place = start
    for block in live:
        if block.address > place:
            blocks.append(_block(place, block.address - place, "inactive", []))
        asker = frames(block.module, block.operator)
        blocks.append(_block(block.address, block.bytes, "active_allocated", asker))
        place = block.address + block.bytes
    if end > place:
        blocks.append(_block(place, end - place, "inactive", []))
    active = sum(each["size"] for each in blocks if each["state"] == "active_allocated")
    return {
        "device": 0,
        "address": start,
        "total_size": end - start,
        "allocated_size": active,
        "active_size": active,
        "requested_size": active,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "frames": [],
        "blocks": blocks,
    }


def _block(address: int, size: int, state: str, frames: Frames) -> Record:
    return {
        "address": address,
        "size": size,
        "requested_size": size,
        "state": state,
        "frames": frames,
    }
