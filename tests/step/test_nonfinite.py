"""The first place where a forward pass stopped being finite is named."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from daf.step.gradient import first_nonfinite, is_finite


class Logarithm(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return values.log()


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.ReLU(), Logarithm()), nn.Linear(3, 1))


def test_the_innermost_module_is_named() -> None:
    model, batch = network(), -torch.ones(2, 3) * 100
    with torch.no_grad():
        model[0].weight.fill_(1.0)
    where = first_nonfinite(model, batch, lambda: model(batch))
    assert "'1.1' (Logarithm)" in where
    assert all(not module._forward_hooks for module in model.modules())


def test_the_batch_is_named() -> None:
    model, batch = network(), torch.tensor([[1.0, math.nan, 2.0]])
    assert first_nonfinite(model, batch, lambda: model(batch)) == "the batch itself"


def test_a_parameter_is_named() -> None:
    model, batch = network(), torch.ones(1, 3)
    with torch.no_grad():
        model[2].bias.fill_(math.inf)
    assert first_nonfinite(model, batch, lambda: model(batch)) == "parameter '2.bias'"


def test_the_loss_is_left_when_all_modules_are_finite() -> None:
    model, batch = nn.Linear(3, 3), torch.ones(1, 3)
    assert "loss function" in first_nonfinite(model, batch, lambda: model(batch))


def test_integers_and_nests() -> None:
    assert is_finite({"a": [torch.arange(3)], "b": (torch.ones(2), None)})
    assert not is_finite({"a": [torch.tensor([math.inf])]})
