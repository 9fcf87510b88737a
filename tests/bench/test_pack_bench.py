"""``daf bench pack``: on a device made of threads; on a GPU where there is one."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from daf_bench.offload import traced_pass
from daf_bench.offload.plot import draw_pack
from daf_bench.offload.run import BOTH, CPU, GPU, PackJob, _Step, planned, quick_job, run
from daf_bench.offload.traced_pass import Watched
from simulated_device import Arrival, LateTransfers, SimulatedDevice
from torch import Tensor
from typer.testing import CliRunner

from daf.cli import app
from daf.core.policy import Method, Treatment
from daf.kernels import devices
from daf.offload.routing import Rates, ReadyTensor, Route, ScheduledWork, Sent

SMALL = PackJob(batch=8, rounds=1)
TWO_BITS = Treatment(Method.ROTATED, 2)


@pytest.fixture(autouse=True)
def own_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulated device changes who codes the processor's tensors."""
    monkeypatch.setattr(devices, "_backends", dict(devices._backends))


class Told(LateTransfers):
    """Remembers what it was asked for, and the tickets of copies; none comes back in time."""

    def __init__(self, latest_s: float) -> None:
        super().__init__(latest_s)
        self.asked: list[str] = []
        self.copies: list[Arrival] = []
        self.coming: set[Arrival] = set()

    def mark(self) -> Arrival:
        self.asked.append("mark")
        return super().mark()

    def order(self, ticket: Arrival) -> None:
        self.asked.append("order")
        super().order(ticket)

    def out(self, source: Tensor) -> tuple[Tensor, Arrival]:
        self.asked.append("out")
        copy, ticket = super().out(source)
        self.copies.append(ticket)
        return copy, ticket

    def back(self, source: Tensor, target: Tensor) -> Arrival:
        ticket = super().back(source, target)
        self.coming.add(ticket)
        return ticket

    def is_done(self, ticket: Arrival) -> bool:
        return ticket not in self.coming and super().is_done(ticket)


def device_that_tells(latest_s: float) -> tuple[SimulatedDevice, Told]:
    device = SimulatedDevice()
    device.late = told = Told(latest_s)
    return device, told


def by_way(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Rows of three ways, each of which packed the same tensors."""
    found = {row["way"]: row for row in rows}
    assert list(found) == [GPU, CPU, BOTH]
    gpu, cpu, both = found.values()
    count = gpu["gpu_packs"]
    assert count > 20
    assert (gpu["cpu_packs"], cpu["gpu_packs"], cpu["cpu_packs"]) == (0, 0, count)
    assert both["gpu_packs"] + both["cpu_packs"] == count
    assert len({(row["raw_bytes"], row["code_bytes"]) for row in rows}) == 1
    for row in rows:  # every code is read once
        assert 0 <= row["late_reads"] <= row["reads"] == count
    return found


@pytest.mark.thorough
def test_three_ways_take_turns_and_the_gradients_pass_through_codes(tmp_path: Path) -> None:
    device, told = device_that_tells(latest_s=0.0005)
    result = run(SMALL, bed=device)
    rows = by_way(result.rows)
    # Two planes, and four bytes of header for 256 elements.
    coded = 32 / (2 + 32 / 256)
    assert rows[GPU]["raw_bytes"] == pytest.approx(coded * rows[GPU]["code_bytes"], rel=0.001)
    for row in rows.values():
        longer = row["packed_ms"] - row["plain_forward_ms"]
        assert row["exposed_ms"] == pytest.approx(max(0.0, longer))
        assert row["backward_ratio"] > 0
    assert result.figures["exposed_ms"] == rows[BOTH]["exposed_ms"]
    timed = dict(zip((GPU, CPU, BOTH), device.stores[-6:-3], strict=True))
    assert all(row["late_reads"] == timed[way].late_reads for way, row in rows.items())
    # What the device packed last never left it; what the processor packed had all to come.
    assert 0 < rows[GPU]["late_reads"] < rows[GPU]["reads"]
    assert rows[CPU]["late_reads"] == rows[CPU]["reads"]
    # The watched passes are the last ones, one of each way.
    counts = rows[GPU]["gpu_packs"]
    for place, row in enumerate(reversed(result.rows)):
        copies = told.copies[len(told.copies) - (place + 1) * counts :][:counts]
        assert_is_what_was_done(row, copies)
    draw_pack(result.rows, tmp_path / "pack.png")
    assert (tmp_path / "pack.png").stat().st_size > 10_000


def assert_is_what_was_done(row: dict[str, Any], copies: list[Arrival]) -> None:
    """A watched pass's jobs: every tensor's, in order, by the clocks and not by the model."""
    jobs = [ScheduledWork(**job) for job in row["measured_timeline"]]
    lanes = {name: [job for job in jobs if job.resource == name] for name in ("gpu", "link", "cpu")}
    assert [len(lanes["gpu"]), len(lanes["cpu"])] == [row["gpu_packs"], row["cpu_packs"]]
    assert [job.saved_index for job in lanes["link"]] == list(range(len(copies)))
    taken_ms = [1000.0 * (each.end_s - each.begin_s) for each in copies]
    assert [job.end_ms - job.begin_ms for job in lanes["link"]] == pytest.approx(taken_ms)
    for lane in lanes.values():
        assert all(one.end_ms <= two.begin_ms + 1e-6 for one, two in itertools.pairwise(lane))
    for job in lanes["gpu"]:
        assert 0 < job.begin_ms <= job.end_ms <= row["measured_forward_ms"]
        assert lanes["link"][job.saved_index].begin_ms >= job.begin_ms
    for job in lanes["cpu"]:
        assert lanes["link"][job.saved_index].end_ms <= job.begin_ms < job.end_ms
    assert row["measured_timeline"] != row["timeline"]


def test_while_rates_are_measured_no_code_waits_for_another_s_copy() -> None:
    device, told = device_that_tells(latest_s=0.02)
    seen, _ = _Step(SMALL, device, TWO_BITS).observed()
    marks = [place for place, name in enumerate(told.asked) if name == "mark"]
    count = len(seen.saved)
    watched = told.asked[marks[0] : marks[1 + 2 * count]]  # around the pass and every tensor of it
    assert watched.count("out") == count > 20
    assert "order" not in watched


def test_a_watched_pass_tells_what_each_piece_took(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        """Tickets are spans of time (ms)."""

        def mark(self) -> Any:
            return (clock_ms, clock_ms)

        def duration_ms(self, ticket: Any) -> float:
            return ticket[1] - ticket[0]

        def elapsed_ms(self, first: Any, last: Any) -> float:
            return last[1] - first[1]

    clock_ms = 100.0
    monkeypatch.setattr(traced_pass.time, "perf_counter", lambda: clock_ms / 1000.0)
    watched = Watched([Route.CPU_PACKS, Route.GPU_PACKS, Route.GPU_PACKS], Clock())
    watched.begin_pass(math.inf)
    sizes = (1024, 4096, TWO_BITS)
    assert watched.take() is Route.CPU_PACKS
    watched.note(Sent(Route.CPU_PACKS, *sizes, (103, 103), (103, 103), (103, 108)))
    watched.take()  # nothing of it is noted: it had no room to travel
    assert watched.take() is Route.GPU_PACKS
    watched.note(Sent(Route.GPU_PACKS, *sizes, (104, 104), (106, 106), (109, 110)))
    clock_ms = 112.0
    watched.end_forward()
    clock_ms = 120.0
    watched.processor_took(4096, 9.0)
    jobs, forward_ms = watched.measured()
    assert jobs == (
        ScheduledWork("link", 0, 3, 8),
        ScheduledWork("cpu", 0, pytest.approx(11), pytest.approx(20)),
        ScheduledWork("gpu", 2, 4, 6),
        ScheduledWork("link", 2, 9, 10),
    )
    assert forward_ms == 12


def test_the_split_is_the_model_s_best_by_measured_rates() -> None:
    saved = [ReadyTensor(10.0 * k, 30_000, 2000) for k in range(1, 7)]
    plans = planned(saved, Rates(gpu_pack=4000.0, cpu_pack=1500.0, link=20_000.0), 70.0)
    assert plans[BOTH].exposed_ms < min(plans[GPU].exposed_ms, plans[CPU].exposed_ms)


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for what is missing without a GPU")
def test_without_a_gpu_it_says_what_to_run_instead() -> None:
    done = CliRunner().invoke(app, ["bench", "pack", "--quick"])
    assert done.exit_code != 0
    assert "found no CUDA device" in str(done.exception or "") + done.output
    assert "daf bench packing" in str(done.exception or "") + done.output


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu() -> None:
    pytest.importorskip("triton", reason="triton is not installed: daf-train[gpu]")
    result = run(quick_job())
    rows = by_way(result.rows)
    # A device packs faster than two links carry raw data out and codes back.
    assert rows[GPU]["packed_ms"] < rows[CPU]["packed_ms"]
