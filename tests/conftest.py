"""What all tests share: the state that processes share is each test's own."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

os.environ["DAF_CACHE"] = ""  # no test begins with what another one measured

from checkout import write_entry_points
from made_up import Tree
from simulated_memory import SimulatedDevice, SimulatedMemory

from daf.codecs.layout import Layout
from daf.core.profile import Profile
from daf.memory import process_memory
from daf.memory.device_memory import DeviceMemory
from daf.memory.process_limit import CODE_BYTES
from daf.memory.recycling_allocator import unsupported_reason
from daf.saved_tensors import packer

write_entry_points()

MADV_POPULATE_READ = 22  # since Linux 5.14


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


@pytest.fixture(autouse=True, scope="session")
def first_steps_are_over() -> None:
    """What only the first steps of a process read is nothing that a test's budget begins with."""
    images = torch.randn(16, 3, 32, 32)
    steps = (
        nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3)),
        nn.Sequential(nn.Flatten(1, 2), nn.TransformerEncoderLayer(32, 4, 64), nn.GELU()),
    )
    for step in steps:
        step(images).square().mean().backward()


@cache
def largest_code() -> tuple[int, int]:
    """Where the most code of one library lies: its first address, and the one behind the last."""
    with Path("/proc/self/maps").open() as maps:
        found = [line.split()[0].split("-") for line in maps if " r-xp " in line]
    return max(((int(a, 16), int(b, 16)) for a, b in found), key=lambda each: each[1] - each[0])


@pytest.fixture(autouse=True)
def as_much_code_is_mapped_as_sessions_expect() -> None:
    """A session gives the rest back, which would be room in a budget of what is resident now."""
    if not Path("/proc/self/maps").exists():
        return
    if process_memory.mapped_bytes() > CODE_BYTES:
        process_memory.drop_code()
    (at, end), madvise = largest_code(), ctypes.CDLL(None).madvise
    while process_memory.mapped_bytes() < CODE_BYTES and at < end:
        madvise(ctypes.c_void_p(at), ctypes.c_size_t(min(2**22, end - at)), MADV_POPULATE_READ)
        at += 2**22


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
