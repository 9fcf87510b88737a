"""The budget that a refusal names works at the first try, and is not far above what does."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from daf import Session
from daf.core.errors import BudgetError
from daf.memory.recycling_allocator import unsupported_reason

WORKSPACE_BYTES = 160 * 10**6
EXAMPLES, LENGTH, WIDTH = 16, 512, 128
PAGES_BYTES = 24 * 10**6  # what two sessions in one process may differ by, margins included

pytestmark = pytest.mark.skipif(unsupported_reason() is not None, reason=str(unsupported_reason()))


def used(nbytes: int) -> Tensor:
    """Nothing, from a workspace of so many bytes that is given back."""
    return 0 * torch.ones(nbytes // 4).sum()


class InBackward(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] + used(WORKSPACE_BYTES)


class Workspace(nn.Module):
    """Takes a workspace of fixed size, one that grows with the examples, or none."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "in backward":
            return InBackward.apply(x)  # type: ignore[no-any-return, no-untyped-call]
        if self.kind == "none":
            return x
        growing = self.kind == "growing"
        return x + used(WORKSPACE_BYTES * len(x) // EXAMPLES if growing else WORKSPACE_BYTES)


def work(kind: str) -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    layers = [each for _ in range(3) for each in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers, Workspace(kind)), torch.randn(EXAMPLES, LENGTH, WIDTH)


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def adam(model: nn.Module) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters())


def refused(kind: str, budget: int | str) -> BudgetError:
    model, batch = work(kind)
    with Session(model, adam(model), budget) as session, pytest.raises(BudgetError) as caught:
        session.step(batch, loss_fn)
    assert caught.value.least_bytes is not None
    return caught.value


def train_within(kind: str, budget: int) -> None:
    model, batch = work(kind)
    with Session(model, adam(model), budget) as session:
        for _ in range(2):
            session.step(batch, loss_fn)
        assert session.peak_bytes <= budget


def test_a_workspace_is_counted_once_and_only_what_grows_with_the_examples() -> None:
    refused("none", "10MB")  # libraries load
    without = refused("none", "10MB").least_bytes
    assert without is not None
    for kind in ("fixed", "in backward", "growing"):
        least = refused(kind, "10MB").least_bytes
        assert least is not None
        workspace = WORKSPACE_BYTES // EXAMPLES if kind == "growing" else WORKSPACE_BYTES
        assert abs(least - without - workspace) < PAGES_BYTES, kind
        train_within(kind, least)


def test_after_plain_training_the_named_budget_works_and_its_terms_add_up() -> None:
    model, batch = work("fixed")
    for _ in range(2):
        loss_fn(model, batch).backward()  # type: ignore[no-untyped-call]
    error = refused("fixed", "10MB")
    assert error.least_bytes is not None
    terms = re.findall(r"([\d.]+) (kB|MB|GB) (?:before|of parameters|for a batch)", str(error))
    units = {"kB": 10**3, "MB": 10**6, "GB": 10**9}
    total = sum(float(number) * units[unit] for number, unit in terms)
    assert len(terms) == 3
    assert total == pytest.approx(error.least_bytes, abs=0.02 * error.least_bytes)
    train_within("fixed", error.least_bytes)
