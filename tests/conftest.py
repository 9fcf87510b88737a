"""What all tests share: the state that processes share is each test's own."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

os.environ["DAF_CACHE"] = ""  # no test begins with what another one measured

from checkout import write_entry_points
from daf._native import allocator as native
from made_up import Tree
from simulated_memory import SimulatedDevice, SimulatedMemory

from daf.codecs.layout import Layout
from daf.core.profile import Profile
from daf.memory import process_memory
from daf.memory.device_memory import DeviceMemory
from daf.memory.owners import owners
from daf.memory.recycling_allocator import unsupported_reason
from daf.saved_tensors import packer

write_entry_points()


def poisoned_empty(layout: Layout) -> Tensor:
    """What ``Layout.empty`` gives, filled with what no operator may read."""
    out = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=layout.device)
    poison = float("nan") if layout.dtype.is_floating_point or layout.dtype.is_complex else 99
    return out.fill_(poison)


@pytest.fixture
def code_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor is too small to be coded; undefined content is NaN."""
    monkeypatch.setattr(packer, "SMALL_BYTES", 1)
    monkeypatch.setattr(Layout, "empty", poisoned_empty)


@pytest.fixture
def whole_batches_are_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine's caches are: on some, batches in parts take less time."""
    monkeypatch.setattr(Profile, "step_ms", lambda self, examples: self.batch_size / examples)


@pytest.fixture(autouse=True, scope="module")
def earlier_objects_frozen() -> None:
    """Let collections look at this module's objects only: in a process of many tests there are
    millions, and each of the tests' many collections would take most of a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def libraries_code_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """How much would go back depends on what ran before in this process, and would be room in
    budgets of what is resident now. Tests that are about it run in processes of their own."""
    monkeypatch.setattr(process_memory, "drop_code", lambda: None)


@pytest.fixture(autouse=True)
def freed_blocks_go_back() -> Iterator[None]:
    """What a test's ``compress`` recycles would be resident in another's budget. An exception that
    was expected can keep its frame, and the object in it, for longer than the test."""
    yield
    if native.is_installed():
        gc.collect()
        for claim in owners.living():
            if claim.budget_bytes is None and claim.limit_bytes is None:
                owners.leave(claim)


@pytest.fixture(autouse=True)
def one_seed() -> Iterator[None]:
    """Every test starts from the same random state and leaves the caller's behind."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """A file system like the kernel's, made up."""
    return Tree(tmp_path)


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    """A GPU that the processor plays."""
    if unsupported_reason() is not None:
        pytest.skip(f"no account here: {unsupported_reason()}")
    gc.collect()
    with SimulatedDevice() as simulated:
        yield simulated


@pytest.fixture
def memory(device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> DeviceMemory:
    """What models of these tests are taken to be in."""
    found = SimulatedMemory(torch.device("cuda:0"), device)
    monkeypatch.setattr("daf.session.arguments.memory_of", lambda _: found)
    return found
