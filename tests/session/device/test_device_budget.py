"""A budget of a device's memory: reserved bytes stay within it, and what it follows is the device.

On a simulated device (``simulated_memory``); on a real one where there is one.
"""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from simulated_memory import NOBODY_S_BYTES, SimulatedDevice
from torch import Tensor, nn

import daf
from daf.core.errors import BudgetError, PlatformError, UnknownNameError
from daf.core.policy import Method
from daf.core.step_report import StepReport
from daf.memory.device_memory import DeviceMemory
from daf.memory.domain import ProcessMemory
from daf.memory.process_memory import resident_bytes
from daf.offload.spill import SpillOptions
from daf.session.session import Session
from daf.training.callbacks import Observer
from daf.training.job import checked_device, make_job
from daf.training.loop import train
from daf.training.settings import TrainSettings

MIB = 2**20
Batch = tuple[Tensor, Tensor]
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


@pytest.fixture(autouse=True)
def _tables_exist() -> None:
    """Make GELU's and SiLU's tables: the simulated device is the memory in which they are made."""
    for function, bits in product((F.gelu, F.silu), (2, 3, 4)):
        x = torch.randn(8, 1024, requires_grad=True)
        with daf.compress(nn.Identity(), bits=bits):
            loss = function(2 * x).sum()
        loss.backward()


def model() -> nn.Sequential:
    """Saves 32 MiB for 2048 examples, in tensors of 2 MiB."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(8):
        layers += [nn.Linear(256, 256), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(256, 10))


def batch(device: torch.device | None = None) -> Batch:
    torch.manual_seed(1)
    x, y = torch.randn(2048, 256), torch.randint(0, 10, (2048,))
    return x.to(device), y.to(device)


def loss_of(trained: nn.Module, given: Batch) -> Tensor:
    return F.cross_entropy(trained(given[0]), given[1])


def sgd(trained: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9)


def trained_plainly(steps: int, given: Batch) -> tuple[list[float], int]:
    """Losses, and the session's peak without a budget."""
    plain = model()
    with Session(plain, sgd(plain), None) as session:
        losses = [session.step(given, loss_of).loss for _ in range(steps)]
        return losses, session.peak_bytes


# --- a session ------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.65])
def test_reserved_bytes_stay_within_the_budget_and_the_gradient_is_plain_s(
    memory: DeviceMemory, device: SimulatedDevice, share: float
) -> None:
    given = batch()
    losses, peak_bytes = trained_plainly(3, given)
    gc.collect()
    device.empty_cache()
    device.forget_highest()
    trained, budget_bytes = model(), int(share * peak_bytes)
    with Session(trained, sgd(trained), budget_bytes, tolerance=0.0) as session:
        assert session.budget_bytes == budget_bytes
        found = [session.step(given, loss_of).loss for _ in range(3)]
        assert session.peak_bytes == device.highest_bytes
        assert 0 < device.highest_bytes <= budget_bytes < peak_bytes
        assert session.predicted_peak_bytes is not None
        assert session.predicted_peak_bytes <= budget_bytes
        bounds = [share for share in device.shares if share < 1.0]
        assert max(bounds) == pytest.approx(budget_bytes / device.total_bytes)
        assert "cuda:0" in session.settings[0]
        assert session.baseline_bytes < 4 * MIB + sum(each.nbytes for each in given)
    assert found == pytest.approx(losses, rel=1e-5)
    assert device.share == 1.0
    assert device.waits > 0  # times were taken when the device was done


def test_a_budget_that_cannot_hold_says_the_least_that_can(
    memory: DeviceMemory, device: SimulatedDevice
) -> None:
    given, trained = batch(), model()
    with (
        pytest.raises(BudgetError, match="needs at least") as refused,
        Session(trained, sgd(trained), 12 * MIB, sensitivity=False) as session,
    ):
        session.step(given, loss_of)
    least = refused.value.least_bytes
    assert least > 12 * MIB
    assert device.share == 1.0
    with Session(trained, sgd(trained), least, sensitivity=False) as session:
        session.step(given, loss_of)
        session.step(given, loss_of)
        assert session.peak_bytes <= least


def test_a_budget_that_falls_in_mid_step_is_kept_from_then_on(
    memory: DeviceMemory, device: SimulatedDevice
) -> None:
    given, trained = batch(), nn.Sequential(nn.BatchNorm1d(256), model())  # no batch is cut
    _, peak_bytes = trained_plainly(2, given)
    gc.collect()
    lower = int(0.6 * peak_bytes)
    with Session(trained, sgd(trained), 2 * peak_bytes) as session:
        while not session.is_settled:
            session.step(given, loss_of)
        assert session.step(given, loss_of).peak_bytes > lower

        class Calls(list[int]):
            """No plain list, which a retry would give the entries that it had."""

        calls = Calls()

        def falling(asked: nn.Module, part: Batch) -> Tensor:
            calls.append(len(part[0]))
            if len(calls) == 1:
                session.budget = lower
            return loss_of(asked, part)

        report = session.step(given, falling)
        assert calls[0] == len(given[0])
        assert len(calls) > 1  # what it refused was tried again under a tighter plan
        assert report.budget_bytes == lower
        assert memory.refusals() > 0
        report = session.step(given, loss_of)
        assert report.peak_bytes <= lower
        assert device.share == pytest.approx(lower / device.total_bytes)


def test_auto_and_shares_are_of_the_device_and_follow_what_others_hold(
    memory: DeviceMemory, device: SimulatedDevice
) -> None:
    trained = model()
    with Session(trained, sgd(trained), 0.25) as session:
        assert session.budget_bytes == (device.total_bytes - NOBODY_S_BYTES) // 4
    device.others_bytes = 7 * 2**30 - NOBODY_S_BYTES
    with Session(trained, sgd(trained), "auto") as session:
        budget_bytes = session.budget_bytes
        assert budget_bytes is not None
        assert 2**29 < budget_bytes < 2**30
        device.others_bytes += 2**28
        session.step(batch(), loss_of)
        assert session.budget_bytes is not None
        assert session.budget_bytes <= budget_bytes - 2**27
        assert "GPU" in session.budget_history[-1].reason


def test_released_gradients_keep_the_budget_too(
    memory: DeviceMemory, device: SimulatedDevice
) -> None:
    """After its first update a step must finish: what that takes was predicted."""
    given = batch()

    def steps(budget: int | None, **options: Any) -> tuple[list[StepReport], int]:
        trained = nn.Sequential(nn.BatchNorm1d(256), model())  # so that no batch is cut
        with Session(trained, sgd(trained), budget, sensitivity=False, **options) as session:
            return [session.step(given, loss_of) for _ in range(4)], session.peak_bytes

    plain, peak_bytes = steps(None)
    gc.collect()
    device.empty_cache()
    device.forget_highest()
    budget_bytes = int(0.8 * peak_bytes)
    reports, _ = steps(budget_bytes, release_gradients=True)
    assert [each.overrun_bytes for each in reports] == [0] * 4
    assert all(each.released_gradients for each in reports)
    assert device.highest_bytes <= budget_bytes
    losses, wanted = ([each.loss for each in found] for found in (reports, plain))
    assert losses == pytest.approx(wanted, rel=0.01)


def test_the_processor_s_allocations_are_no_record_of_a_device_s(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("daf.training.loop.checked_device", torch.device)
    settings = TrainSettings("resnet20", device="cuda:0", history=True)
    with pytest.raises(PlatformError, match="this run is on cuda:0"):
        train(settings, tmp_path / "run", Observer())


def test_nothing_is_spilled_from_a_device(memory: DeviceMemory) -> None:
    given, trained = batch(), model()
    with Session(trained, sgd(trained), "48MB", tolerance=0.0, spill=SpillOptions()) as session:
        plan = session.prepare(given, loss_of)
        assert not any(each.method is Method.SPILL for each in plan.policy.by_site.values())


def test_a_session_s_budget_is_of_the_memory_it_was_made_in() -> None:
    """Without a budget any model trains; one that comes later needs the same memory."""
    split = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(PlatformError, match="cpu, meta"):
        Session(split, sgd(split), "1GB")
    with Session(split, sgd(split), None) as session, pytest.raises(PlatformError):
        session.budget = "1GB"
    away = nn.Linear(2, 2, device="meta")
    with pytest.raises(PlatformError, match="has no memory_reserved"):
        Session(away, sgd(away), "1GB")


def test_a_model_that_moved_gets_no_budget(
    memory: DeviceMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = model()
    with Session(trained, sgd(trained), None) as session:
        monkeypatch.setattr("daf.session.arguments.memory_of", lambda _: ProcessMemory())
        with pytest.raises(PlatformError, match=r"the process.*cuda:0"):
            session.budget = "1GB"


def test_a_run_tells_of_the_device_s_memory_throughout(
    memory: DeviceMemory, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its budget is far below what the process holds."""
    monkeypatch.setattr("daf.training.job._baseline_bytes", lambda _: 1)
    budget_bytes = 80 * 10**6
    settings = TrainSettings(
        "resnet20", batch_size=16, max_steps=3, budget=budget_bytes, bits="exact"
    )
    summary = train(settings, tmp_path / "run", Observer())
    assert summary["finished"]
    assert summary["peak_bytes"] == device.highest_bytes <= summary["budget_bytes"] == budget_bytes
    assert resident_bytes() > 2 * summary["budget_bytes"]
    lines = map(json.loads, (tmp_path / "run" / "memory.jsonl").read_text().splitlines())
    sampled = [line["resident_bytes"] for line in lines if "resident_bytes" in line]
    assert 0 < max(sampled) <= summary["peak_bytes"]


def test_batches_go_where_the_model_is() -> None:
    job = make_job(TrainSettings("resnet20", batch_size=4))
    with job.session:
        moved = replace(job, device=torch.device("meta"))
        batches = (moved.train_batch(0), moved.test_batch(np.arange(2)))
    assert {each.device.type for part in batches for each in part} == {"meta"}
    assert {each.device.type for each in job.train_batch(0)} == {"cpu"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpu", "unknown device 'gpu'"),
        ("mps", "torch.mps has no memory_reserved"),
        pytest.param("cuda:77", "cuda:77; found", id="absent"),
    ],
)
def test_a_device_that_is_not_there_is_said(name: str, message: str) -> None:
    with pytest.raises((UnknownNameError, PlatformError), match=message):
        checked_device(name)


# --- a real device --------------------------------------------------------------------------


@on_gpu
@pytest.mark.parametrize("share", [0.65])
def test_on_a_gpu_reserved_bytes_stay_within_the_budget(share: float) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    given = batch(device)

    def steps(budget: Any) -> tuple[list[float], int, int]:
        trained = model().to(device)
        with Session(trained, sgd(trained), budget, tolerance=0.0) as session:
            losses = [session.step(given, loss_of).loss for _ in range(5)]
            return losses, session.peak_bytes, session.baseline_bytes

    steps(None)  # whose libraries keep their workspaces
    gc.collect()
    torch.cuda.empty_cache()
    losses, peak_bytes, baseline_bytes = steps(None)
    gc.collect()
    torch.cuda.empty_cache()
    budget_bytes = baseline_bytes + int(share * (peak_bytes - baseline_bytes))
    found, bounded_bytes, _ = steps(budget_bytes)
    assert bounded_bytes <= budget_bytes
    assert found == pytest.approx(losses, rel=1e-4)


@on_gpu
def test_a_run_on_a_gpu_is_resumed_as_it_would_have_gone_on(tmp_path: Path) -> None:
    settings = TrainSettings("resnet20", batch_size=64, max_steps=4, budget="500MB", device="cuda")
    whole = train(settings, tmp_path / "whole", Observer())
    train(replace(settings, max_steps=2), tmp_path / "parts", Observer())
    resumed = train(settings, tmp_path / "parts", Observer(), resume=True)
    assert whole["peak_bytes"] <= whole["budget_bytes"] == 500 * 10**6
    assert resumed["finished"]
    assert resumed["loss"] == pytest.approx(whole["loss"], rel=1e-3)
