from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import nn

from daf.memory.allocation_log import recorded, track
from daf.memory.history import History
from daf.memory.recycling_allocator import unsupported_reason
from daf.report.child import draw_history_picture
from daf.report.history_picture import REST, Recording, bands, read_recording

MIB = 2**20
needs_allocator = pytest.mark.skipif(
    unsupported_reason() is not None, reason=str(unsupported_reason())
)
changes = st.lists(
    st.tuples(st.sampled_from("abcdefgh"), st.integers(min_value=-9, max_value=9)), min_size=1
)


@given(changes, st.integers(1, 4), st.integers(1, 50))
def test_bands_add_up_to_what_is_live_and_show_the_peak(
    found: list[tuple[str, int]], holders: int, columns: int
) -> None:
    events = [(float(index), name, size) for index, (name, size) in enumerate(found)]
    recording = Recording({"a": 100, "old": 7}, events)
    drawn = bands(recording, holders, columns)
    live = recording.live_bytes()
    totals = np.sum(drawn.rows, axis=0)
    assert totals.tolist() == [live[int(second)] for second in drawn.seconds]
    assert totals.max() == max(live)
    assert len(drawn.seconds) <= columns
    assert drawn.names[-1] == REST
    peaks = recording.at_peak()
    shown = [peaks[name] for name in drawn.names[:-1]]
    assert shown == sorted(peaks.values(), reverse=True)[: len(shown)]


@needs_allocator
def test_a_written_history_is_read_back_as_it_was(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(512, 1024), nn.Linear(1024, 512))
    inputs = torch.ones(1024, 512)
    with track():
        before = torch.zeros(MIB)
        with History(model) as history:
            model(inputs).sum().backward()
    path = tmp_path / "history.jsonl"
    history.write(path)
    recording = read_recording(path)
    assert max(recording.live_bytes()) == history.peak_bytes
    expected = {
        " · ".join(
            filter(None, (each.module, each.operator.removeprefix("aten.").split(".")[0]))
        ): (each.bytes)
        for each in history.at_peak()
    }
    held = {name: size for name, size in recording.at_peak().items() if size}
    assert held == expected
    assert held["0 · addmm"] == 4 * MIB
    del before


@needs_allocator
def test_a_recording_needs_no_allocator_of_the_caller_and_leaves_none() -> None:
    with recorded(nn.Identity()) as history:
        torch.ones(MIB)
    assert [event.bytes for event in history.events if abs(event.bytes) >= MIB] == [
        4 * MIB,
        -4 * MIB,
    ]


def test_the_picture_shows_holders_and_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    lines = [
        {"before": True, "module": "(before recording)", "operator": "", "bytes": 50, "blocks": 1}
    ]
    for index in range(40):
        name, size = f"layer{index % 13}", 1000 * (index % 13 + 1)
        lines.append(
            {"seconds": index / 10, "bytes": size, "module": name, "operator": "aten.mm.default"}
        )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert draw_history_picture(path) == ""
    pixels = np.asarray(Image.open(tmp_path / "history.png").convert("RGB")).reshape(-1, 3)
    colours, counts = np.unique(pixels, axis=0, return_counts=True)
    area = {tuple(colour): count for colour, count in zip(colours.tolist(), counts, strict=True)}
    # The largest band, and the rest: parts of the plane, not only of the legend.
    assert area[(0x1F, 0x77, 0xB4)] > 5_000
    assert area[(0xD5, 0xDB, 0xE0)] > 5_000


def test_what_cannot_be_drawn_is_told(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    assert "history.jsonl" in draw_history_picture(path)
    path.write_text("")
    assert "holds no allocation" in draw_history_picture(path)
    path.write_text("{]")
    assert "cannot draw" in draw_history_picture(path)
