"""Recorded allocations as values: who held what, and the format of PyTorch's memory viewer."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

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


@dataclass(frozen=True, slots=True)
class Holder:
    """Bytes and blocks that one (module, operator) held at a moment."""

    module: str
    operator: str
    bytes: int
    blocks: int


def live_after(before: Iterable[MemoryEvent], events: Iterable[MemoryEvent]) -> list[MemoryEvent]:
    """Return the births of blocks live after ``events``; ``before``: those at their start."""
    live = {birth.address: birth for birth in before}
    for event in events:
        live.pop(event.address, None)
        if event.bytes > 0:
            live[event.address] = event
    return list(live.values())


def holders_of(live: Iterable[MemoryEvent]) -> list[Holder]:
    """Return live blocks by module and operator, the largest holder first."""
    sizes: dict[tuple[str, str], list[int]] = defaultdict(list)
    for block in live:
        sizes[block.module, block.operator].append(block.bytes)
    found = [Holder(*asker, sum(each), len(each)) for asker, each in sizes.items()]
    return sorted(found, key=lambda holder: -holder.bytes)


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
