"""LoRA (Hu et al., ICLR 2022) on GPT-2's attention, small and plain.

The frozen layer's output plus (alpha / rank) · B A dropout(x), with A random and B zero at first.
Rank 4, alpha 32 and dropout 0.1 are the paper's for GPT-2 on E2E (its appendix on GPT-2).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

RANK, ALPHA, DROPOUT = 4, 32, 0.1


class LowRank(nn.Module):
    """A frozen layer [..., inputs] to [..., outputs] with a trained difference of low rank."""

    def __init__(self, frozen: nn.Module, inputs: int, outputs: int) -> None:
        super().__init__()
        self.frozen = frozen
        self.dropout = nn.Dropout(DROPOUT)
        self.down = nn.Parameter(torch.empty(RANK, inputs))
        self.up = nn.Parameter(torch.zeros(outputs, RANK))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        """Return frozen(x) + (alpha / rank) · up down dropout(x)."""
        narrow = nn.functional.linear(self.dropout(x), self.down)
        difference = nn.functional.linear(narrow, self.up)
        frozen: Tensor = self.frozen(x)
        return frozen + (ALPHA / RANK) * difference


def adapt_attention(model: nn.Module, width: int) -> nn.Module:
    """Freeze a GPT-2 and adapt every ``c_attn`` (query, key and value at once)."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for part in list(model.modules()):
        frozen = getattr(part, "c_attn", None)
        if isinstance(frozen, nn.Module):
            part.c_attn = LowRank(frozen, width, 3 * width)
    return model
