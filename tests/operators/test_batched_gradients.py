"""Gradients of several outputs at once (``is_grads_batched``) through fused operators."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import daf

ROWS = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))


def smooth() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 3))


def rectified() -> nn.Module:
    layers = [nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(64, 3))


def jacobian(model: nn.Module, coded: daf.compress) -> Tensor:
    rows = ROWS.clone().requires_grad_()
    with coded:
        found = model(rows).sum(0)
    (gradient,) = torch.autograd.grad(found, rows, torch.eye(3), is_grads_batched=True)
    return gradient


@pytest.mark.parametrize("make", [smooth, rectified])
@pytest.mark.parametrize("chunked", [False, True])
def test_gradients_of_several_outputs_at_once_are_those_of_each(make, chunked: bool) -> None:
    torch.manual_seed(0)
    model = make()
    state = {name: each.clone() for name, each in model.state_dict().items()}
    expected = jacobian(model, daf.compress(model, bits="plain"))
    fused = daf.compress(model, bits="exact", fused=True, chunked=chunked)
    for _ in range(3):
        model.load_state_dict(state)
        torch.testing.assert_close(jacobian(model, fused), expected, rtol=1e-4, atol=1e-6)


def test_a_fused_loss_takes_several_gradients_at_once() -> None:
    torch.manual_seed(0)
    model, labels = nn.Linear(64, 2048), torch.arange(64)
    factors = torch.tensor([1.0, -0.5])

    def found(coded: daf.compress) -> Tensor:
        rows = ROWS.clone().requires_grad_()
        with coded:
            loss = F.cross_entropy(model(rows), labels)
        (gradient,) = torch.autograd.grad(loss, rows, factors, is_grads_batched=True)
        return gradient

    expected = found(daf.compress(model, bits="plain"))
    fused = daf.compress(model, bits="exact", fused=True, chunked=True)
    for _ in range(3):
        torch.testing.assert_close(found(fused), expected, rtol=1e-4, atol=1e-7)
    assert any(each.pattern for each in fused.fusions())
