"""End to end: gradients are right on average where that is claimed, and nearly so elsewhere."""

from __future__ import annotations

import pytest
import torch
from daf_bench.accuracy.policies import Example, make_policy
from daf_bench.bias.estimate import measure_bias
from small_jobs import cross_entropy, mixed_batch, mixed_network
from torch import Tensor, nn

from daf.core.policy import Method, Need, Policy, Treatment, coded_policy, exact_policy

pytestmark = pytest.mark.usefixtures("code_everything")


def linear_network() -> nn.Module:
    """Every code of it enters the gradient once and linearly; masks are exact."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 64, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )


@pytest.mark.parametrize(
    "policy", [coded_policy(1), coded_policy(2), coded_policy(5)], ids=lambda each: each.name
)
def test_no_bias_where_none_is_claimed(policy: Policy) -> None:
    found = measure_bias(linear_network(), cross_entropy, mixed_batch(64), policy, draws=48)
    assert found.variance > 0
    assert abs(found.deviations) < 4
    assert abs(found.squared_bias) < 0.02 * found.variance


def test_derivative_codes_have_none() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.GELU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 10)
    )
    smooth = Policy("smooth", {Need.SMOOTH: Treatment(Method.DERIVATIVE, 2)})
    found = measure_bias(model, cross_entropy, mixed_batch(64), smooth, draws=48)
    assert found.variance > 0
    assert found.squared_bias < 0.01 * found.variance


def test_a_bias_is_seen() -> None:
    """ALAM's averages of a group of values lose what differs within it."""
    model, batch = linear_network(), mixed_batch(64)
    averages = make_policy("alam-1", Example(model, cross_entropy, batch))
    found = measure_bias(model, cross_entropy, batch, averages, draws=16)
    assert found.deviations > 4
    assert found.squared_bias > 1e-5 * found.gradient_energy


def test_the_bias_behind_norms_is_small_beside_the_noise() -> None:
    found = measure_bias(mixed_network(), cross_entropy, mixed_batch(), coded_policy(2), draws=32)
    assert found.squared_bias < 0.1 * found.variance
    assert found.squared_bias < 0.02 * found.gradient_energy


class Attending(nn.Module):
    """Attention whose weights are held; only its queries and keys learn."""

    def __init__(self, sharpness: float) -> None:
        super().__init__()
        self.inwards = nn.Linear(64, 128)
        self.values = nn.Linear(64, 64).requires_grad_(False)
        self.head = nn.Linear(64, 10).requires_grad_(False)
        self.sharpness = sharpness

    def forward(self, x: Tensor) -> Tensor:
        query, key = self.inwards(x).chunk(2, dim=-1)
        weights = torch.softmax(self.sharpness * query @ key.mT, dim=-1)
        scores: Tensor = self.head((weights @ self.values(x)).mean(1))
        return scores


@pytest.mark.parametrize("mean", [0.0, 2.0])
@pytest.mark.parametrize("sharpness", [0.3, 1.0, 4.0])
def test_held_weights_of_attention_have_noise_and_little_bias(
    sharpness: float, mean: float
) -> None:
    """Inputs with a mean, as hidden states have one, give a row's gradients much in common."""
    batch = torch.randn(16, 128, 64) + mean * torch.randn(64), torch.randint(0, 10, (16,))
    code = coded_policy(1).by_need[Need.PROBABILITY]
    policy = Policy("weights", {Need.PROBABILITY: code}, rederive=False)
    found = measure_bias(Attending(sharpness), cross_entropy, batch, policy, draws=24)
    assert found.variance > 0
    assert abs(found.squared_bias) < 5e-4 * found.gradient_energy


def test_exact_treatments_have_neither() -> None:
    found = measure_bias(mixed_network(), cross_entropy, mixed_batch(), exact_policy(), draws=4)
    assert (found.squared_bias, found.variance) == (0.0, 0.0)


def test_an_odd_number_of_draws_is_refused() -> None:
    with pytest.raises(ValueError, match="even number"):
        measure_bias(nn.Linear(2, 2), cross_entropy, torch.zeros(1, 2), coded_policy(1), draws=5)
