"""Small networks, a loss, and the plain way to measure what the estimator estimates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf.capture.capture import Capture
from daf.core.policy import Policy, Site


def mixed_network() -> nn.Module:
    """A convolution, batch and layer norms, a smooth activation and two linears."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(8 * 64, 32),
        nn.LayerNorm(32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )


def mixed_batch(examples: int = 32) -> tuple[Tensor, Tensor]:
    return torch.randn(examples, 3, 8, 8), torch.randint(0, 10, (examples,))


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def whole_gradient(
    model: nn.Module, batch: Any, policy: Policy, draws: Mapping[Site, int] | None = None
) -> Tensor:
    """(parameters' elements,): all gradients in a row."""
    capture = Capture(model)
    with capture.step(policy, 0, 0, batch=batch, draws=draws or {}):
        loss = cross_entropy(model, batch)
    return torch.cat([each.flatten() for each in torch.autograd.grad(loss, [*model.parameters()])])
