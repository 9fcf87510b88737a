"""A recording in the format of PyTorch's memory viewer: its own functions read it."""

from __future__ import annotations

import pickle
import pickletools
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.cuda import _memory_viz

from daf.memory.allocation_log import recorded, track
from daf.memory.history import History, MemoryEvent, live_after, snapshot_of
from daf.memory.recycling_allocator import unsupported_reason

MIB = 2**20
PAGE = 4096
needs_allocator = pytest.mark.skipif(
    unsupported_reason() is not None, reason=str(unsupported_reason())
)
# Of protocol 4, those that every version of the viewer's own reader knows.
VIEWER_OPCODES = {
    *("PROTO", "FRAME", "MEMOIZE", "STOP", "MARK", "EMPTY_DICT", "EMPTY_LIST", "SETITEMS"),
    *("APPEND", "APPENDS", "BINGET", "LONG_BINGET", "BININT", "BININT1", "BININT2", "LONG1"),
    *("SHORT_BINUNICODE", "BINUNICODE", "TUPLE2"),
}


def at(slot: int, size: int, live: int = 0, seconds: float = 0.0) -> MemoryEvent:
    """An allocation (or free, where ``size`` is negative) of pages; a slot holds four."""
    return MemoryEvent(seconds, PAGE * (1 + 4 * slot), PAGE * size, live, f"m{slot}", "aten.op")


@st.composite
def recordings(draw: st.DrawFn) -> tuple[list[MemoryEvent], list[MemoryEvent]]:
    """Blocks from before, and events in which each slot is born and freed in turn."""
    slots = st.integers(0, 5)
    before = [at(slot, draw(st.integers(1, 4))) for slot in sorted(draw(st.sets(slots)))]
    live = {event.address: event for event in before}
    total, events = sum(event.bytes for event in before), []
    for index, slot in enumerate(draw(st.lists(slots, min_size=1, max_size=40))):
        gone = live.pop(at(slot, 1).address, None)
        size = -gone.bytes // PAGE if gone else draw(st.integers(1, 4))
        total += PAGE * size
        events.append(at(slot, size, total, index / 8))
        if not gone:
            live[events[-1].address] = events[-1]
    return before, events


def shown(snapshot: dict[str, Any]) -> list[int]:
    """Live bytes after every event, as the viewer's timeline counts them."""
    (trace,) = snapshot["device_traces"]
    live: dict[int, int] = {}
    initially, totals = 0, []
    for event in trace:
        if event["action"] == "alloc":
            live[event["addr"]] = event["size"]
        elif event["action"] == "free_completed" and live.pop(event["addr"], None) is None:
            initially += event["size"]  # the viewer adds it to the blocks from before
            totals = [total + event["size"] for total in totals]
        if event["action"] != "free_requested":
            totals.append(sum(live.values()))
    active = [
        (block["address"], block["size"])
        for segment in snapshot["segments"]
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    ]
    untouched = sum(size for address, size in active if address not in live)
    return [total + untouched for total in totals]


@given(recordings())
def test_every_event_is_shown_with_its_bytes_inside_a_segment(
    recording: tuple[list[MemoryEvent], list[MemoryEvent]],
) -> None:
    before, events = recording
    snapshot = snapshot_of(before, events, start_us=10**15)
    assert shown(snapshot) == [event.live_bytes for event in events]
    (trace,) = snapshot["device_traces"]
    assert [event["time_us"] for event in trace] == sorted(event["time_us"] for event in trace)
    spans = [(each["address"], each["address"] + each["total_size"]) for each in _segments(trace)]
    covers = [
        (each["address"], each["address"] + each["total_size"]) for each in snapshot["segments"]
    ]
    assert all(end < start for (_, end), (start, _) in pairwise(covers))
    assert all(any(a <= start and end <= b for a, b in covers) for start, end in spans)


def _segments(trace: list[dict[str, Any]]) -> list[dict[str, int]]:
    return [{"address": event["addr"], "total_size": event["size"]} for event in trace]


@given(recordings())
def test_pytorch_s_own_functions_read_it_and_count_the_same(
    recording: tuple[list[MemoryEvent], list[MemoryEvent]],
) -> None:
    before, events = recording
    snapshot = snapshot_of(before, events, start_us=0)
    live = sum(birth.bytes for birth in live_after(before, events))
    assert live == events[-1].live_bytes
    assert sum(map(_memory_viz.calc_active, snapshot["segments"])) == live
    # It raises where free and active bytes do not add up to a segment's.
    assert f"total_allocated: {_memory_viz.Bytes(live)}" in _memory_viz.segsum(snapshot)
    assert _memory_viz.trace(snapshot).count("free completed") == sum(
        event.bytes < 0 for event in events
    )
    flames = _memory_viz.memory(snapshot, format_flamegraph=str)
    held = [line for line in flames.splitlines() if "active_allocated" in line]
    assert sum(int(line.rpartition(" ")[2]) for line in held) == live
    for page in (_memory_viz.trace_plot(snapshot), _memory_viz.segment_plot(snapshot)):
        assert "snapshot.pickle" in page
    born = [event for event in events if event.bytes > 0]
    kept = _memory_viz.filter_alloc_free_pairs(snapshot)["device_traces"][0]
    alive = set(live_after((), events))
    assert [event["addr"] for event in kept if event["action"] == "alloc"] == [
        event.address for event in born if event in alive
    ]


@needs_allocator
def test_a_written_history_is_what_was_recorded(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(512, 1024), nn.Linear(1024, 512))
    inputs = torch.ones(1024, 512)
    with track():
        before = torch.zeros(MIB)
        with History(model) as history:
            model(inputs).sum().backward()
            del before
    path = tmp_path / "history.pickle"
    history.write(path)
    content = path.read_bytes()
    assert {opcode.name for opcode, _, _ in pickletools.genops(content)} <= VIEWER_OPCODES
    snapshot = pickle.loads(content)
    assert shown(snapshot) == [event.live_bytes for event in history.events]
    assert max(shown(snapshot)) == history.peak_bytes
    forward = next(each for each in snapshot["device_traces"][0] if each["size"] == 4 * MIB)
    assert forward["frames"][0]["filename"] == "0"
    assert forward["frames"][0]["name"].startswith("aten.addmm")
    held = history.at_peak()
    assert held["0", "aten.addmm.default"] == 4 * MIB


@needs_allocator
def test_a_recording_needs_no_allocator_of_the_caller_and_leaves_none() -> None:
    with recorded(nn.Identity()) as history:
        torch.ones(MIB)
    assert [event.bytes for event in history.events if abs(event.bytes) >= MIB] == [
        4 * MIB,
        -4 * MIB,
    ]
