"""A session carries out a plan that replays: the same training, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf.core.plan import Plan
from daf.core.policy import exact_policy, plain_policy
from daf.profiling import replay_proof
from daf.session.session import Session

Batch = tuple[Tensor, Tensor]
REPLAYED = frozenset({"1", "2", "2.up"})


class Block(nn.Module):
    """Dropout and a normalisation around a shortcut."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.norm = norm(16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.25)


def make(norm: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), Block(norm), Block(norm), nn.Linear(16, 4))


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def trained(
    norm: type[nn.Module], replayed: frozenset[str], micro_batch: int, **options: Any
) -> tuple[dict[str, Tensor], Session]:
    model = make(norm)
    session = Session(
        model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), None, **options
    )
    policy = plain_policy() if not replayed else replace(exact_policy(), replayed=replayed)
    session.plan = Plan(policy, micro_batch, predicted_peak_bytes=0, return_freed_blocks=False)
    torch.manual_seed(2)
    batch = torch.randn(8, 16), torch.randint(4, (8,))
    for _ in range(3):
        report = session.step(batch, cross_entropy)
    if options:
        assert report.released_gradients == len(list(model.parameters()))
    return model.state_dict() | {"random": torch.get_rng_state()}, session


@pytest.mark.parametrize(
    ("norm", "micro_batch"), [(nn.BatchNorm1d, 8), (nn.LayerNorm, 8), (nn.LayerNorm, 3)]
)
def test_replay_trains_bit_for_bit_as_without(norm: type[nn.Module], micro_batch: int) -> None:
    expected, plain = trained(norm, frozenset(), micro_batch)
    found, session = trained(norm, REPLAYED, micro_batch)
    assert expected.keys() == found.keys()
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
    assert session.saved_bytes_plain == plain.saved_bytes_plain


def test_gradients_are_released_and_parameters_stepped_only_after_the_last_replay() -> None:
    expected, _ = trained(nn.LayerNorm, frozenset(), 8)
    found, session = trained(nn.LayerNorm, REPLAYED, 8, release_gradients=True)
    assert session.release_refusal == ""
    assert all(torch.equal(value, found[name]) for name, value in expected.items())


class Short(nn.Module):
    """Four operators."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 64)
        self.down = nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return found


def reduced(policy: str | None) -> tuple[dict[str, Tensor], Session]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), Short(), Block(nn.LayerNorm), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    budget = None if policy is None else "4GB"
    torch.manual_seed(2)
    batch = torch.randn(2048, 16), torch.randint(4, (2048,))
    with Session(model, optimizer, budget, policy=policy) as session:
        for _ in range(3):
            session.step(batch, cross_entropy)
    return model.state_dict() | {"random": torch.get_rng_state()}, session


def test_calls_of_few_operators_are_computed_again_whatever_they_cost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replay_proof, "LEAST_MS", 60_000.0)  # however slow the machine is
    expected, _ = reduced(None)
    found, session = reduced("reduce")
    assert session.plan is not None
    # The block of six operators is not, only the largest parts of it that have fewer; and the
    # first layer saves nothing but the batch.
    assert session.plan.policy.replayed == {"1", "2.norm", "2.up", "2.down", "3"}
    assert session.saved_bytes_peak < 0.7 * session.saved_bytes_plain
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
