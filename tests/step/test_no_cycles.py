"""Steps leave no tensor in a cycle, where it would live until Python collects cycles."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import daf
from daf.memory import process_memory

WORDS, WIDTH = 1200, 64


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, 256, dropout=0.1, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head(F.gelu(self.layer(self.embed(words))))}


def made_batch() -> dict[str, Tensor]:
    words = torch.randint(0, WORDS, (16, 32))
    return {"words": words, "following": words.roll(1)}


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["words"])["logits"]
    return F.cross_entropy(logits.flatten(0, 1), batch["following"].flatten())


def tensors_in_cycles() -> list[tuple[int, ...]]:
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        return [tuple(each.shape) for each in gc.garbage if isinstance(each, Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


@pytest.mark.parametrize(
    ("room_bytes", "options"),
    [(None, {"bits": 2}), (None, {"bits": 2, "fused": True}), (40_000_000, {"tolerance": 0.0})],
    ids=["coded", "fused", "planned"],
)
def test_what_steps_held_is_freed_without_the_collector(
    room_bytes: int | None, options: dict[str, Any]
) -> None:
    model = Model()
    budget = None if room_bytes is None else process_memory.resident_bytes() + room_bytes
    session = daf.Session(model, torch.optim.AdamW(model.parameters()), budget, **options)
    session.step(made_batch(), loss_fn)
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            session.step(made_batch(), loss_fn)
            session.backward(made_batch(), loss_fn)
            session.update()
        session.evaluate(made_batch(), loss_fn)
        assert tensors_in_cycles() == []
    finally:
        gc.enable()
        session.close()
