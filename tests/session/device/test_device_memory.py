"""A device's memory, what bounds it, and what an update takes there (``simulated_memory``)."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from simulated_memory import NOBODY_S_BYTES, SimulatedDevice
from torch import nn
from writing import writing

from daf.budget.limits import bounds_of, gpu_bound, room_bytes
from daf.memory.device_limit import DeviceKeeper
from daf.memory.device_memory import DeviceMemory
from daf.memory.domain import ProcessMemory, keeper_of, memory_of
from daf.pool.device_pool import DevicePagedStore
from daf.profiling.model_memory import update_bytes

MIB = 2**20

# --- its memory -----------------------------------------------------------------------------


def test_the_peaks_of_what_is_reserved_and_in_use_go_on_side_by_side(
    memory: DeviceMemory, device: SimulatedDevice
) -> None:
    memory.reset_peak()
    meter = memory.meter()
    kept = torch.ones(MIB)
    meter.begin()
    passing = torch.ones(2 * MIB)
    del passing
    assert meter.take_peak() == 8 * MIB
    passing = torch.ones(MIB)
    assert meter.take_peak() == 4 * MIB
    assert memory.peak_bytes() >= 12 * MIB > memory.allocated_bytes()
    memory.release_cached()
    memory.reset_peak()
    assert memory.peak_bytes() < 9 * MIB
    del kept, passing


def test_who_bounds_what(memory: DeviceMemory, device: SimulatedDevice) -> None:
    assert isinstance(keeper_of(memory), DeviceKeeper)
    assert isinstance(memory_of(nn.Linear(2, 2)), ProcessMemory)
    assert bounds_of(ProcessMemory()) is None
    device.others_bytes = device.total_bytes // 2
    left = device.total_bytes // 2 - NOBODY_S_BYTES
    assert room_bytes(memory) == left - memory.held_bytes()


def test_another_thread_s_growth_is_nobody_else_s() -> None:
    """The device's free bytes are read while this process takes some of them."""
    held = iter([100, 300, 300])
    bound = gpu_bound(lambda: (500, 1000), lambda: next(held))[0]
    assert bound.most_bytes == 800


# --- the bound ------------------------------------------------------------------------------


def test_what_lies_beyond_the_bound_is_refused_until_it_is_lifted(
    memory: DeviceMemory, device: SimulatedDevice
) -> None:
    keeper = DeviceKeeper(memory)
    keeper.bound(0, 16 * MIB)
    refusals = keeper.refusals()
    with pytest.raises(RuntimeError):
        torch.ones(8 * MIB)
    assert keeper.refusals() == refusals + 1
    with keeper.unbounded():
        assert torch.ones(8 * MIB).sum() == 8 * MIB
        assert device.share == 1.0
    assert memory.held_bytes() <= 16 * MIB  # what was freed in there went back
    assert keeper.rebound(64 * MIB) == 0
    held = torch.ones(8 * MIB)
    assert keeper.follow_growth()
    keeper.rebound(None)
    torch.ones(32 * MIB)
    assert not keeper.follow_growth()
    keeper.close()
    assert not keeper.settings
    del held


def test_a_budget_that_falls_in_mid_step_takes_planes(memory: DeviceMemory) -> None:
    """The least important ones, no more of them than it must; what is read stays."""
    store = DevicePagedStore(torch.device("cpu"))
    keeper = DeviceKeeper(memory, store.give_back)
    keeper.bound(0, 64 * MIB)
    tensors = [
        store.allocate_planes(8 * MIB, 3, minimum_bits=1, importance=[9.0, 5.0 + each, 1.0 + each])
        for each in range(4)
    ]
    for tensor in tensors:
        with writing(tensor):
            pass
    keeper.flush()
    lower, before = memory.held_bytes() - 2 * MIB - 1, store.lent_bytes
    with tensors[0].pinned():
        assert keeper.rebound(lower) == 3 * MIB  # in planes of a MiB
    assert before - store.lent_bytes == 3 * MIB
    assert memory.held_bytes() <= lower
    left = []
    for tensor in tensors:
        with tensor.pinned() as planes:
            left.append(planes.kept)
    assert left == [3, 2, 2, 2]
    assert keeper.rebound(4 * MIB) == 5 * MIB
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        torch.ones(3 * MIB)
    assert keeper.rebound(1) == 0
    keeper.close()


def test_planes_stay_where_giving_them_up_frees_nothing(
    memory: DeviceMemory, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their blocks lie among others that are in use."""
    asked: list[int] = []

    def give_back(nbytes: int) -> int:
        asked.append(nbytes)
        return MIB

    keeper = DeviceKeeper(memory, give_back)
    keeper.bound(0, 64 * MIB)
    monkeypatch.setattr(device, "memory_reserved", lambda _: 32 * MIB)
    assert keeper.rebound(16 * MIB) == MIB
    assert asked == [16 * MIB]
    keeper.close()


@pytest.mark.parametrize("ends", [False, True])
def test_a_step_that_must_finish_does_and_its_cost_is_told(
    memory: DeviceMemory, ends: bool
) -> None:
    keeper = DeviceKeeper(memory)
    memory.reset_peak()
    keeper.bound(0, 16 * MIB)
    assert keeper.overrun_bytes == 0
    keeper.must_finish()
    taken = torch.ones(8 * MIB)
    assert 16 * MIB <= keeper.overrun_bytes < 24 * MIB
    del taken
    memory.reset_peak()
    if ends:
        keeper.restore_bound()
    else:
        keeper.bound(0, 16 * MIB)
    assert keeper.overrun_bytes == 0
    assert memory.held_bytes() <= 16 * MIB
    keeper.close()


def test_before_an_update_that_would_pass_the_bound_cached_blocks_go_back(
    memory: DeviceMemory, device: SimulatedDevice
) -> None:
    keeper = DeviceKeeper(memory)
    keeper.bound(0, 64 * MIB)
    torch.ones(8 * MIB)  # 32 MiB, kept for reuse from here on
    for needed_bytes, goes in ((16 * MIB, False), (48 * MIB, True)):
        cached, trims = memory.held_bytes(), device.trims
        assert cached >= 32 * MIB
        with keeper.unbounded(needed_bytes):
            assert (device.trims > trims) is goes
            assert (memory.held_bytes() < 4 * MIB) is goes
    keeper.close()


@pytest.mark.parametrize("again", ["bound", "rebound"])
def test_what_is_cached_goes_back_before_any_code(
    memory: DeviceMemory, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch, again: str
) -> None:
    """On a GPU a lower share refuses what is asked for later, and gives nothing back by itself."""
    monkeypatch.setattr(device, "set_per_process_memory_fraction", lambda *_: None)
    asked: list[int] = []
    keeper = DeviceKeeper(memory, lambda wanted: asked.append(wanted) or 0)
    keeper.bound(0, 64 * MIB)
    torch.ones(8 * MIB)  # 32 MiB, kept for reuse from here on
    assert memory.held_bytes() >= 32 * MIB
    if again == "bound":
        keeper.bound(0, 16 * MIB)
    else:
        assert keeper.rebound(16 * MIB) == 0
    assert memory.held_bytes() <= 16 * MIB
    assert not asked
    keeper.close()


def test_a_bound_that_was_left_behind_is_not_the_user_s_share(
    memory: DeviceMemory, device: SimulatedDevice
) -> None:
    """Of a session that was never closed, say in a notebook whose cell was run again."""
    left = DeviceKeeper(memory)
    left.bound(0, device.total_bytes // 8)
    keeper = DeviceKeeper(memory)
    keeper.bound(0, device.total_bytes // 2)
    assert device.share == 0.5
    keeper.close()
    assert device.share == 0.125  # it may come back as long as it lives
    del left
    gc.collect()
    assert device.share == 1.0
    keeper.bound(0, device.total_bytes // 2)
    assert device.share == 0.5
    keeper.close()
    assert device.share == 1.0


def test_limits_are_set_by_the_number_of_the_device(device: SimulatedDevice) -> None:
    memory = DeviceMemory(torch.device("cuda"), device)
    assert (memory.name, memory.device.index) == ("cuda:0", 0)


@pytest.mark.parametrize(
    ("error", "is_refusal"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_only_errors_for_want_of_memory_are_answered_by_another_plan(
    device: SimulatedDevice, error: Exception, is_refusal: bool
) -> None:
    """Whatever PyTorch counted meanwhile: it tries things that it can do without."""
    keeper = DeviceKeeper(DeviceMemory(torch.device("cuda:0"), device))
    assert keeper.has_refused(error, keeper.refusals()) is is_refusal
    assert (keeper.missing_bytes > 0) is is_refusal


def test_cudnn_s_error_is_a_refusal_where_memory_was_refused(memory: DeviceMemory) -> None:
    """It says the same where it knows no way to compute something, whatever room there is."""
    keeper, error = DeviceKeeper(memory), RuntimeError("GET was unable to find an engine to ...")
    refusals = keeper.refusals()
    assert not keeper.has_refused(error, refusals)
    keeper.bound(0, 16 * MIB)
    with pytest.raises(RuntimeError):
        torch.ones(8 * MIB)
    assert keeper.has_refused(error, refusals)
    keeper.close()


def test_a_share_that_the_user_had_set_stays(memory: DeviceMemory, device: SimulatedDevice) -> None:
    device.set_per_process_memory_fraction(0.25, None)
    keeper = DeviceKeeper(memory)
    keeper.bound(0, device.total_bytes // 2)
    assert device.share == 0.25
    keeper.bound(0, device.total_bytes // 8)
    assert device.share == 0.125
    keeper.close()
    assert device.share == 0.25


# --- the update -----------------------------------------------------------------------------


@pytest.mark.parametrize("is_together", [False, True])
@pytest.mark.parametrize("make", ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta"])
def test_an_update_holds_what_was_predicted(
    memory: DeviceMemory, make: str, is_together: bool
) -> None:
    """Of parameters one after another, or of all together; the smaller ones' matters too."""
    parameters = [nn.Parameter(torch.ones(MIB)) for _ in range(5)]
    parameters.append(nn.Parameter(torch.ones(2 * MIB)))
    for each in parameters:
        each.grad = torch.ones_like(each)
    more: dict[str, Any] = {"momentum": 0.9, "weight_decay": 0.1} if make == "SGD" else {}
    optimizer = getattr(torch.optim, make)(parameters, lr=0.1, foreach=is_together, **more)
    optimizer.step()
    told = update_bytes(optimizer, memory)
    meter = memory.meter()
    meter.begin()
    optimizer.step()
    found = meter.take_peak()
    assert found <= 1.01 * told
    assert told <= found + 12 * MIB  # as if all that outlives its update were of the largest
    assert is_together is (found >= 0.9 * sum(each.nbytes for each in parameters))
