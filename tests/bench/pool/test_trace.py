"""Traces: what training asked for, written, read and played back to the same account."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from daf_bench.pool.trace_format import Player, RecordedStore, TraceWriter, read_trace, record
from simulated_memory import WatchedStore
from torch import nn

from daf.capture.capture import Capture
from daf.core.code_format import header_bytes, plane_bytes
from daf.core.errors import DataError
from daf.core.policy import coded_policy
from daf.pool.paged_pool import PagedStore
from daf.pool.store import PlainStore

PAGE = 4096
RUN = 8 * PAGE


def use_everything(store: PagedStore, writer: TraceWriter) -> None:
    tensors = []
    for step in range(6):
        writer.mark(f"step {step}")
        tensor = store.allocate_planes((step + 1) * RUN, 4, minimum_bits=1, tag=step)
        tensor.seal()
        tensors.append(tensor)
    store.evict(5 * PAGE)
    store.set_cap(300_000)
    tensors.pop(0).release()
    unsealed = store.allocate_planes(RUN, 2)
    del tensors[1], unsealed
    store.trim()


def test_a_played_trace_gives_the_same_account(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with TraceWriter(path) as writer:
        recorded = PagedStore()
        record(recorded, writer)
        use_everything(recorded, writer)
    played = PagedStore()
    player = Player(played)
    operations = [event["op"] for event in player.play(read_trace(path))]
    names = {"planes", "seal", "free", "evict", "cap", "trim", "mark"}
    assert set(operations) == names
    assert played.statistics() == player_account(path)
    assert played.statistics().evicted_pages == recorded.statistics().evicted_pages > 5
    assert [entry[0::2] for entry in played.take_evictions()[0]] == [
        entry[0::2] for entry in recorded.take_evictions()[0]
    ]


def player_account(path: Path) -> object:
    """Playing is repeatable to the last number."""
    store = PagedStore()
    player = Player(store)
    for _ in player.play(read_trace(path)):
        assert store.native.is_sound()
    return store.statistics()


def test_one_line_for_each_operation(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with TraceWriter(path) as writer:
        store = PagedStore()
        record(store, writer)
        tensor = store.allocate_planes(1000, 2, importance=[2.0, 1.0], headers=False, tag=9)
        handle = tensor.handle
        tensor.seal()
        tensor.release()
    lines = path.read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {
            "op": "planes",
            "id": handle,
            "count": 1000,
            "bits": 2,
            "minimum": 2,
            "importance": [2.0, 1.0],
            "headers": False,
            "tag": 9,
        },
        {"op": "seal", "id": handle},
        {"op": "free", "id": handle},
    ]
    assert all(" " not in line for line in lines)


def test_a_real_training_step_can_be_recorded_and_played(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3)
    )
    with TraceWriter(path) as writer:
        plain = WatchedStore()
        capture = Capture(model, RecordedStore(plain, writer))
        for step in range(3):
            writer.mark(f"step {step}")
            with capture.step(coded_policy(2), 0, step):
                loss = model(torch.randn(8, 3, 32, 32)).square().mean()
            loss.backward()
            del loss
    store = PagedStore()
    alive, peak = {}, 0
    for event in Player(store).play(read_trace(path)):
        if event["op"] == "planes":
            size = plane_bytes(event["count"], event["bits"])
            alive[event["id"]] = size + event["headers"] * header_bytes(event["count"])
        elif event["op"] == "free":
            del alive[event["id"]]
        assert store.statistics().payload_bytes == sum(alive.values())
        peak = max(peak, sum(alive.values()))
    assert peak == plain.peak_bytes > 0
    assert alive == {}


def test_capture_trains_with_its_codes_in_the_pool() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 4, 3))
    images = torch.randn(8, 3, 32, 32)
    gradients = []
    for store in (PlainStore(), PagedStore(poison=True)):
        capture = Capture(model, store)
        model.zero_grad()
        with capture.step(coded_policy(2), 0, 0):
            loss = model(images).square().mean()
        assert store.live_bytes > 40_000
        loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for plain, paged in zip(*gradients, strict=True):
        assert torch.equal(plain, paged)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "no JSON"),
        ("[]", "no {"),
        ('{"op":3}', "no {"),
        ('{"op":"fly"}', "'fly'"),
        ('{"op":"free","id":1}', "not alive"),
        ('{"op":"evict"}', "'bytes'"),
    ],
)
def test_damaged_traces(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"op":"trim"}\n' + line + "\n")
    with pytest.raises(DataError, match=message):
        list(Player(PagedStore()).play(read_trace(path)))
