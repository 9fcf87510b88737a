from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from daf.memory.device_memory import DeviceMemory
from daf.memory.recycling_allocator import unsupported_reason

sys.path.insert(0, str(Path(__file__).parent))  # the helpers beside this file

from made_up import Tree
from simulated_memory import SimulatedDevice, SimulatedMemory


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
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
