"""A replay that did something else in training is not made again; the step runs without it."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from daf._native import allocator as native
from torch import Tensor, nn

from daf import Session
from daf.core.errors import SavedTensorError
from daf.core.plan import Plan
from daf.core.policy import plain_policy
from daf.memory import glibc, process_memory

pytestmark = pytest.mark.skipif(
    bool(native.unsupported_reason()), reason="needs redirected allocations"
)
WIDTH, EXAMPLES, CAPACITY = 64, 2048, 64
draws = np.random.default_rng(0)


class Experts(nn.Module):
    """Drops tokens over its capacity, by a generator of its file; a few examples never are."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.wide(self.norm(x)))
        if len(x) > CAPACITY:
            kept = torch.zeros(len(x), 1)
            kept[torch.from_numpy(draws.permutation(len(x))[: len(x) - 8].copy())] = 1.0
            hidden = hidden * kept
        return x + self.narrow(hidden)


def model() -> nn.Module:
    torch.manual_seed(0)
    experts = (Experts() for _ in range(6))
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *experts, nn.Linear(WIDTH, 8))


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(EXAMPLES, WIDTH), torch.randint(0, 8, (EXAMPLES,))


def cross_entropy(asked: nn.Module, given: Any) -> Tensor:
    return F.cross_entropy(asked(given[0]), given[1])


def test_a_step_runs_without_the_replay_that_differed_and_tells_of_it() -> None:
    options: dict[str, Any] = {"tolerance": 0, "split": False, "policy": "checkpoint-static"}
    options["cache"] = False
    asked = model()
    optimizer = torch.optim.SGD(asked.parameters(), lr=0.0)
    with Session(asked, optimizer, 2**32, **options) as session:
        session.prepare(batch(), cross_entropy)  # and code that is read once
    gc.collect()
    glibc.return_free_memory()
    budget = process_memory.resident_bytes() + 50 * 10**6
    with Session(asked, optimizer, budget, **options) as session:
        planned = session.prepare(batch(), cross_entropy).policy.replayed
        assert planned
        for _ in range(2):
            given = batch()
            report = session.step(given, cross_entropy)
            found = session.plan
            assert found is not None
            told = {each.modules: each.reason for each in session.left_alone()}
            refused = {path for path in planned if "in training it did" in told.get((path,), "")}
            assert refused
            assert not refused & found.policy.replayed
            assert report.loss == pytest.approx(cross_entropy(asked, given).item(), rel=0.05)
        assert session.peak_bytes <= budget


def test_a_plan_of_ones_own_is_not_changed() -> None:
    asked = model()
    optimizer = torch.optim.SGD(asked.parameters(), lr=0.0)
    with Session(asked, optimizer, None) as session:
        policy = replace(plain_policy(), replayed=frozenset({"1"}))
        session.plan = Plan(policy, EXAMPLES, 0, return_freed_blocks=False)
        with pytest.raises(SavedTensorError, match="replaying '1' saved other values"):
            session.step(batch(), cross_entropy)
        assert session.plan.policy.replayed == {"1"}
