"""A step that only fused operators can hold is measured within the budget, too."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import daf
from daf.memory import glibc, process_memory

WORDS, LENGTH, WIDTH = 20_000, 768, 32
LOGITS_BYTES = LENGTH * WORDS * 4  # 61 MB; plain PyTorch's smallest step holds three of them

needs_peak = pytest.mark.skipif(
    not process_memory.peak_is_exact(), reason="this system keeps no resettable high-water mark"
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(words)))


def loss_fn(model: nn.Module, words: Tensor) -> Tensor:
    return F.cross_entropy(model(words).flatten(0, 1), words.flatten())


@needs_peak
def test_a_budget_below_pytorch_s_smallest_step_is_never_passed() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gc.collect()
    glibc.return_free_memory()
    budget = process_memory.resident_bytes() + int(2.5 * LOGITS_BYTES)
    words = torch.randint(0, WORDS, (1, LENGTH))
    with daf.Session(model, optimizer, budget, tolerance=0) as session:
        for _ in range(3):
            session.step(words, loss_fn)
        assert session.peak_bytes <= budget
        assert session.plan is not None
        assert session.plan.policy.fused
