"""What many situations are built of: a small network, a batch with labels, and their loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

EXAMPLES, FEATURES, WIDTH, CLASSES = 12, 32, 128, 8


def network(features: int = FEATURES, outputs: int = CLASSES, width: int = WIDTH) -> nn.Sequential:
    """Return a small network whose normalisation and GELU can be fused, and whose saves coded."""
    return nn.Sequential(
        nn.Linear(features, width),
        nn.LayerNorm(width),
        nn.GELU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, outputs),
    )


class Called(nn.Module):
    """A function as a module."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return what the function returns."""
        result: torch.Tensor = self.function(values)
        return result


def labelled(examples: int = EXAMPLES) -> tuple[torch.Tensor, torch.Tensor]:
    """Return features [N, ``FEATURES``] and class labels [N]."""
    return torch.randn(examples, FEATURES), torch.randint(0, CLASSES, (examples,))


def classified(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the mean cross-entropy of ``model(features)`` against labels."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1])
