"""The pool's benchmark: every contestant plays the same trace, and the figures come from it."""

from __future__ import annotations

import json
import platform
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from daf_bench import _native
from daf_bench.pool import run as bench
from daf_bench.pool.plot import draw_times
from daf_bench.pool.traces import (
    ALLOCATE,
    BARE,
    MARK,
    RELEASE,
    Operations,
    Shape,
    make_operations,
    play,
)
from daf_bench.pool.training import Recorded, Requests, record_loop
from daf_bench.workloads.sources import Sources

from daf.core.code_format import header_bytes, plane_bytes

GLIBC = platform.libc_ver()[0] == "glibc"
CONTESTANTS = ["adaptive", "fixed", "fixed-cut", "best-fit"] + GLIBC * ["malloc", "malloc-return"]
SHAPE = Shape(6, least_tensors=5, most_tensors=9, most_count=2**19, survivors=0.2)


def payloads(operations: Operations) -> list[int]:
    """Bytes alive after each operation, added up by hand."""
    alive: dict[int, int] = {}
    out = []
    for operation in operations:
        name, count = int(operation["id"]), int(operation["count"])
        if operation["action"] in (ALLOCATE, BARE):
            assert name not in alive
            headers = header_bytes(count) if operation["action"] == ALLOCATE else 0
            alive[name] = plane_bytes(count, int(operation["bits"])) + headers
        elif operation["action"] == RELEASE:
            del alive[name]
        out.append(sum(alive.values()))
    return out


def test_traces_are_made_of_whole_lives() -> None:
    operations, tensors = make_operations(SHAPE)
    alive = payloads(operations)
    assert (operations["action"] == MARK).sum() == 6
    assert 0 < alive[-1] < max(alive) / 2  # most is freed in the end, some survives
    assert len(tensors) in range(5, 10)
    assert {bits for _, bits in tensors} <= {1, 2, 3, 4}


@pytest.mark.parametrize("contestant", CONTESTANTS)
def test_every_contestant_holds_what_lives(contestant: str) -> None:
    operations, _ = make_operations(SHAPE)
    samples, seconds = play(contestant, 1024, None, operations)
    assert samples["payload_bytes"].tolist() == payloads(operations)
    marks = operations["action"] == MARK
    assert (samples["held_bytes"] >= samples["payload_bytes"])[marks].all()
    assert (samples["resident_bytes"][marks] >= 0.9 * samples["payload_bytes"][marks]).all()
    assert (samples["evicted_pages"] == 0).all()
    assert seconds > 0


@pytest.fixture(scope="module")
def loop() -> Recorded:
    return record_loop(12, Sources(), is_small=True)


def test_a_loops_requests_are_what_its_pool_was_asked_for(loop: Recorded) -> None:
    operations = loop.operations
    alive = payloads(operations)
    marks = operations["action"] == MARK
    assert np.array(alive)[marks].tolist() == loop.payload_bytes
    assert (np.array(loop.held_bytes) >= loop.payload_bytes).all()
    assert (operations["action"] == BARE).any()  # of masks
    assert len(np.unique(operations["id"])) < (operations["action"] == RELEASE).sum() / 6


def test_hardly_two_steps_of_a_loop_ask_for_the_same_widths(loop: Recorded) -> None:
    ends = np.flatnonzero(loop.operations["action"] == MARK)
    steps = np.split(loop.operations, ends)[:-1]
    asked = {tuple(each["bits"][each["action"] == ALLOCATE]) for each in steps}
    assert len(steps) == 12
    assert len(asked) >= 11
    assert {bits for each in asked for bits in each} == {1, 2, 3, 4}
    assert loop.losses[-1] < loop.losses[0]


@pytest.mark.parametrize("contestant", CONTESTANTS)
def test_every_contestant_holds_what_a_loop_asks_for(contestant: str, loop: Recorded) -> None:
    samples, _ = play(contestant, 1024, None, loop.operations)
    assert samples["payload_bytes"].tolist() == payloads(loop.operations)


def test_places_of_tensors_are_used_again() -> None:
    requests = Requests()
    planes = {"op": "planes", "count": 99, "bits": 2, "minimum": 1, "importance": [3.0, 1.0]}
    requests(planes | {"id": 7, "headers": True})
    requests(planes | {"id": 8, "headers": False})
    requests({"op": "seal", "id": 7})
    requests({"op": "free", "id": 7})
    requests.mark()
    requests(planes | {"id": 9, "headers": True})
    assert [tuple(row) for row in requests.operations()] == [
        (99, 3.0, 0, ALLOCATE, 2, 1),
        (99, 3.0, 1, BARE, 2, 1),
        (0, 0.0, 0, RELEASE, 0, 0),
        (0, 0.0, 0, MARK, 0, 0),
        (99, 3.0, 0, ALLOCATE, 2, 1),
    ]


def test_pools_stay_below_a_cap_by_evicting() -> None:
    shape = Shape(6, least_tensors=5, most_tensors=9, most_count=2**19, minimum_bits=1)
    operations, _ = make_operations(shape)
    free, _ = play("adaptive", 1024, None, operations)
    cap = int(0.8 * free["held_bytes"].max())
    samples, _ = play("adaptive", 1024, cap, operations)
    assert samples["held_bytes"].max() <= cap
    assert samples["evicted_pages"][-1] > 0
    assert (np.diff(samples["evicted_pages"].astype(int)) >= 0).all()


def test_an_unknown_contestant_is_refused() -> None:
    operations, _ = make_operations(Shape(1))
    with pytest.raises(_native.MisuseError, match="there are adaptive"):
        _native.replay("buddy", 1024, None, operations.ctypes.data, 0, 0)


@pytest.mark.skipif(not GLIBC, reason="compares with glibc's malloc")
@pytest.mark.thorough
def test_the_whole_benchmark_in_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_TIMED_PAGES", (100, 1000))
    job = bench.PoolJob(3, 4, 2, halvings=1, halved_bytes=10**7, gradient_seeds=1)
    job = replace(job, training_steps=3, is_small=True, sources=Sources())
    result = bench.run(job)
    content = json.loads(result.as_json())
    assert set(content["figures"]) >= {
        "op_us_at_1e6",
        "effective_over_theoretical_worst",
        "evictions_vs_fixed_increment",
        "cap_halved_ms",
        "halved_gradient_error_vs_predicted",
        "training_effective_over_theoretical_worst",
    }
    parts = {row["part"] for row in content["rows"]}
    assert parts == {"time", "stress", "growth", "halving", "halved gradient", "training"}
    halved = next(row for row in result.rows if row["part"] == "halving")
    assert halved["held_after_bytes"] <= halved["held_bytes"] // 2
    assert halved["over_bytes"] == 0
    assert halved["predicted_relative_error"] > halved["relative_error_before"]
    draw_times(result.rows, tmp_path / "times.png")
    assert (tmp_path / "times.png").read_bytes().startswith(b"\x89PNG")
