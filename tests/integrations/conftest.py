"""Tiny models with random weights, their data, and budgets that hold a batch only in parts."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from torch import nn

from daf.memory import glibc, process_memory


def tight(room_bytes: int) -> int:
    """Of a budget with so much room beside what the process holds now."""
    gc.collect()
    glibc.return_free_memory()
    return process_memory.resident_bytes() + room_bytes


@pytest.fixture
def budget() -> Callable[[int], int]:
    return tight


def assert_same_weights(found: nn.Module, expected: nn.Module) -> None:
    for one, other in zip(found.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


@pytest.fixture
def same_weights() -> Callable[[nn.Module, nn.Module], None]:
    return assert_same_weights
