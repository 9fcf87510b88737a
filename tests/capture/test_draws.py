"""Codes of chosen sites take other seeds for one pass."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf.capture.capture import Capture
from daf.core.policy import FUSED_OPERATORS, Policy, Site, coded_policy

pytestmark = pytest.mark.smoke

X = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)
    )


def gradients(
    model: nn.Module, draws: dict[Site, int], policy: Policy | None = None
) -> list[Tensor]:
    with Capture(model).step(policy or coded_policy(2), 0, 0, batch=X, draws=draws):
        loss = F.mse_loss(model(X), torch.ones(64, 8))
    return list(torch.autograd.grad(loss, [*model.parameters()]))


MIDDLE = Site("2", "linear", 0, 0)


def test_a_redrawn_site_changes_alone(code_everything: None) -> None:
    model = network()
    usual, redrawn = gradients(model, {}), gradients(model, {MIDDLE: 1})
    changed = [
        name
        for (name, _), one, other in zip(model.named_parameters(), usual, redrawn, strict=True)
        if not torch.equal(one, other)
    ]
    assert changed == ["2.weight"]


def test_a_draw_is_the_same_every_time_and_each_is_another(code_everything: None) -> None:
    model = network()
    found = [gradients(model, {MIDDLE: draw})[2] for draw in (0, 1, 2, 1)]
    assert torch.equal(found[1], found[3])
    assert not torch.equal(found[1], found[2])
    assert torch.equal(found[0], gradients(model, {})[2])


def test_draws_do_not_outlast_their_step(code_everything: None) -> None:
    model = network()
    capture = Capture(model)
    seen = []
    for draws in ({}, {MIDDLE: 3}, {}):
        with capture.step(coded_policy(2), 0, 0, batch=X, draws=draws):
            loss = F.mse_loss(model(X), torch.ones(64, 8))
        seen.append(torch.autograd.grad(loss, [*model.parameters()])[2])
    assert torch.equal(seen[0], seen[2])
    assert not torch.equal(seen[0], seen[1])


@pytest.mark.parametrize("fused", [False, True])
def test_normalisations_are_redrawn_fused_or_not(fused: bool, code_everything: None) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten()
    )
    images = torch.randn(8, 3, 12, 12)
    policy = Policy(
        "2-bit", coded_policy(2).by_need, operators=FUSED_OPERATORS if fused else frozenset()
    )
    capture = Capture(model)

    def gradient(draws: dict[Site, int]) -> Tensor:
        with capture.step(policy, 0, 0, batch=images, draws=draws):
            loss = model(images).square().mean()
        return torch.autograd.grad(loss, [*model.parameters()])[0]

    gradient({})
    usual = gradient({})
    (norm,) = [each.site for each in capture.sites() if each.need == "norm"]
    assert bool([each for each in capture.fusions() if each.pattern]) == fused
    assert torch.equal(gradient({norm: 0}), usual)
    assert not torch.equal(gradient({norm: 1}), usual)
