"""Small tensors are coded too, so that small tests see everything; one seed for every test."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from daf.saved_tensors import packer

sys.path.insert(0, str(Path(__file__).parent))  # the helpers beside this file


@pytest.fixture
def code_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor is too small to be coded."""
    monkeypatch.setattr(packer, "SMALL_BYTES", 1)


@pytest.fixture(autouse=True)
def one_seed() -> Iterator[None]:
    """Every test starts from the same random state and leaves the caller's behind."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
