"""Small tensors are coded too, and fresh memory is poisoned, so that small tests see everything."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from daf.codecs.layout import Layout
from daf.saved_tensors import packer

sys.path.insert(0, str(Path(__file__).parent))  # the helpers beside this file


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


@pytest.fixture(autouse=True)
def one_seed() -> Iterator[None]:
    """Every test starts from the same random state and leaves the caller's behind."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
