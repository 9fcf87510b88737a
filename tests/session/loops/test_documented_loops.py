"""The loops that the quickstart shows train as plain PyTorch's."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import daf

QUICKSTART = Path(__file__).parents[3] / "docs" / "quickstart.md"


def block_with(words: str) -> str:
    """The one block of Python in the quickstart that has these words."""
    blocks = re.findall(r"```python\n(.*?)```", QUICKSTART.read_text(), re.DOTALL)
    (found,) = (block for block in blocks if words in block)
    return str(found)


def run(block: str, names: dict[str, Any]) -> None:
    # Sessions of a process share the least budget; the test run holds more than a quickstart's.
    exec(block.replace("700MB", "8GB"), names)


def pair() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), nn.Linear(3, 1)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for found, expected in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_the_loop_that_accumulates_scales_and_clips() -> None:
    model, _ = pair()
    plain, loader = copy.deepcopy(model), [(torch.randn(5, 6), torch.arange(5) % 3)] * 8
    optimizer, other = sgd(model), sgd(plain)
    with daf.Session(model, optimizer, "8GB", tolerance=0) as session:
        names = {"session": session, "model": model, "optimizer": optimizer, "loader": loader}
        names |= {"torch": torch, "device": "cpu", "loss_fn": F.cross_entropy}
        run(block_with("scaler.unscale_"), names)
    for index, (inputs, labels) in enumerate(loader):
        (F.cross_entropy(plain(inputs), labels) / 4).backward()
        if index % 4 == 3:
            nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            other.step()
            other.zero_grad()
    assert_same(model, plain)
    begun = F.cross_entropy(pair()[0](loader[0][0]), loader[0][1]).item() / 4
    assert 0.5 * begun < names["report"].loss < begun  # unscaled, and it has learned


def test_the_adversarial_pair() -> None:
    maker, judge = pair()
    plain_maker, plain_judge = copy.deepcopy(maker), copy.deepcopy(judge)
    pairs = [(torch.randn(4, 3), torch.randn(4, 6)) for _ in range(3)]
    names: dict[str, Any] = {"generator": maker, "discriminator": judge, "pairs": pairs}
    names |= {"optimizer_g": sgd(maker), "optimizer_d": sgd(judge), "softplus": F.softplus}
    names |= {"torch": torch, "daf": daf}
    run(block_with("judges.backward"), names)
    names["makes"].close()
    names["judges"].close()
    optimizer_g, optimizer_d = sgd(plain_maker), sgd(plain_judge)

    def step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    for real, noise in pairs:
        made = plain_maker(noise).detach()
        judged = F.softplus(-plain_judge(real)).mean() + F.softplus(plain_judge(made)).mean()
        step(optimizer_d, judged)
        step(optimizer_g, F.softplus(-plain_judge(plain_maker(noise))).mean())
    assert_same(maker, plain_maker)
    assert_same(judge, plain_judge)
