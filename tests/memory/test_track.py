from __future__ import annotations

import gc
import pickle
from typing import Any

import pytest
import torch
from daf._native import allocator as native
from torch import nn
from torch.cuda import _memory_viz

from daf.core.errors import UnitError
from daf.memory.allocation_log import track
from daf.memory.history import History, snapshot
from daf.memory.recycling_allocator import unsupported_reason
from daf.memory.statistics import reset_peaks, stats

MIB = 2**20

pytestmark = pytest.mark.skipif(unsupported_reason() is not None, reason=str(unsupported_reason()))


def number(name: str) -> int:
    return stats()[name]


class Doubler(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * 2).exp()


def test_track_reports_the_exact_peak() -> None:
    gc.collect()
    with track() as tracking:
        start = number("live_bytes.current")
        first = torch.zeros(3 * MIB)
        second = torch.zeros(MIB)
        del second
        third = torch.zeros(MIB // 2)
    assert tracking.peak_bytes - start == 16 * MIB
    assert tracking.statistics["live_bytes.current"] == start + 14 * MIB
    del first, third
    assert tracking.peak_bytes - start == 16 * MIB


def test_track_can_bound_and_an_error_inside_leaves_nothing_installed() -> None:
    with pytest.raises(RuntimeError, match="can't allocate memory"), track(limit="8MiB"):
        torch.empty(4 * MIB)
    assert not native.is_installed()
    with pytest.raises(UnitError), track(limit="8 quarts"):
        pass


def test_the_history_names_module_and_operator_forward_and_backward() -> None:
    gc.collect()
    model = nn.Sequential(nn.Linear(512, 1024), Doubler(), nn.Linear(1024, 512))
    inputs = torch.ones(1024, 512)
    with track(history=True, model=model) as tracking:
        model(inputs).sum().backward()
    assert tracking.history is not None
    born = [event for event in tracking.history.events if event.bytes >= 4 * MIB]
    named = {(event.module, event.operator.split(".")[1], event.bytes) for event in born}
    assert {
        ("0", "addmm", 4 * MIB),
        ("1", "mul", 4 * MIB),
        ("1", "exp", 4 * MIB),
        ("2 (backward)", "mm", 4 * MIB),
        ("1 (backward)", "mul", 4 * MIB),
    } <= named
    model.zero_grad(set_to_none=True)


def test_the_history_adds_up_and_says_who_holds_what_at_the_peak() -> None:
    gc.collect()
    with track() as tracking:
        others = number("live_bytes.current")  # arrays that earlier tests' libraries keep
        before = torch.zeros(MIB)
        with History() as history:
            first = torch.zeros(2 * MIB)
            second = torch.ones(MIB)
            del second
            third = torch.full((MIB // 2,), 2.0)
            del before
    live = others + 4 * MIB
    changes = [event for event in history.events if abs(event.bytes) >= MIB]
    assert [event.bytes // MIB for event in changes] == [8, 4, -4, 2, -4]
    for event in changes:
        live += event.bytes
        assert event.live_bytes == live
    assert history.peak_bytes == tracking.peak_bytes == others + 16 * MIB
    held = history.at_peak()
    assert held[("(before recording)", "")] == others + 4 * MIB
    assert sum(held.values()) == others + 16 * MIB
    assert history.dropped == 0
    del first, third


def test_a_full_history_counts_what_it_drops() -> None:
    with track(), History(capacity=4) as history:
        for _ in range(10):
            torch.zeros(100)
    assert len(history.events) == 4
    assert history.dropped == 16


def active(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Blocks that a snapshot shows as live, by size."""
    blocks = (block for segment in found["segments"] for block in segment["blocks"])
    live = [block for block in blocks if block["state"] == "active_allocated"]
    return sorted(live, key=lambda block: int(block["size"]))


def test_a_snapshot_lists_every_large_block_with_its_asker() -> None:
    gc.collect()
    with track(history=True):
        others = {block["address"] for block in active(snapshot())}
        kept = [torch.zeros(MIB), torch.ones(2 * MIB).mul(3)]
        blocks = [each for each in active(snapshot()) if each["address"] not in others]
        assert [block["size"] for block in blocks] == [4 * MIB, 8 * MIB]
        assert blocks[0]["address"] == kept[0].data_ptr()
        assert blocks[1]["frames"] == [{"filename": "", "line": 0, "name": "aten.mul.Tensor"}]
        del kept
        assert {block["address"] for block in active(snapshot())} <= others


def test_pytorch_s_viewer_reads_a_snapshot() -> None:
    """Its own parser, of the file that a user would write: the same bytes, and pages of it."""
    gc.collect()
    with track():
        others = active(snapshot())
        kept = [torch.zeros(MIB), torch.zeros(2 * MIB)]
        found = snapshot()
    nbytes = 12 * MIB + sum(each["size"] for each in others)
    read = pickle.loads(pickle.dumps(found, protocol=4))
    assert read["statistics"]["live_blocks.large"] == len(kept) + len(others)
    assert sum(map(_memory_viz.calc_active, read["segments"])) == nbytes
    assert f"total_allocated: {_memory_viz.Bytes(nbytes)}" in _memory_viz.segsum(read)
    flames = _memory_viz.memory(read, format_flamegraph=str)
    held = [line for line in flames.splitlines() if "active_allocated" in line]
    assert sum(int(line.rpartition(" ")[2]) for line in held) == nbytes
    assert _memory_viz.trace(read).count("alloc") == 0
    for page in (_memory_viz.trace_plot(read), _memory_viz.segment_plot(read)):
        assert "snapshot.pickle" in page


@pytest.mark.skipif(unsupported_reason() is not None, reason=str(unsupported_reason()))
def test_what_a_kernel_asks_of_operator_new_is_in_the_account() -> None:
    """A convolution's columns: a U-Net's step was 20 MB over its budget by them."""
    x, weight = torch.randn(1, 32, 256, 256), torch.randn(1, 32, 1, 1)
    gradient, ones, needs = torch.randn(1, 1, 256, 256), [1, 1], [True, True, False]
    with track() as tracking:
        before, overdrafts = stats()["held_bytes.current"], stats()["overdrafts"]
        reset_peaks()
        live, backward = stats()["live_bytes.current"], torch.ops.aten._slow_conv2d_backward
        found = backward(gradient, x, weight, ones, ones, [0, 0], needs)
        assert stats()["held_bytes.peak"] - before >= 2 * x.nbytes  # its result, and the columns
        assert stats()["overdrafts"] == overdrafts
        assert stats()["live_bytes.current"] - live < 1.5 * x.nbytes
    assert tracking.peak_bytes >= 2 * x.nbytes
    exact = torch.einsum("bohw,oi->bihw", gradient, weight[:, :, 0, 0])
    torch.testing.assert_close(found[0], exact)
