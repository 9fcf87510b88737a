"""What of the codes' errors does not average out: told apart from noise, as brute force does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from daf_bench.bias.run import errors_of
from small_jobs import cross_entropy, mixed_batch, mixed_network
from torch import Tensor, nn

from daf.capture.capture import Capture
from daf.core.policy import Method, Need, Policy, Treatment, coded_policy
from daf.sensitivity.estimate import Effort, measure_sensitivity
from daf.sensitivity.result import SQUARED_BIAS, Sensitivity

pytestmark = pytest.mark.usefixtures("code_everything")
Batch = tuple[Tensor, Tensor]
# One code of a factor for two products: its squared error stays.
COARSE = replace(
    coded_policy(1),
    by_need=dict(coded_policy(1).by_need) | {Need.PRODUCT: Treatment(Method.ROTATED, 1)},
)


class Cube(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x * x


def cubic_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), Cube(), nn.Linear(256, 10))


def rows(count: int = 64) -> Batch:
    torch.manual_seed(1)
    return 3 * torch.randn(count, 64), torch.randint(0, 10, (count,))


def loud_loss(model: nn.Module, batch: Batch) -> Tensor:
    return 100 * F.mse_loss(model(batch[0]), F.one_hot(batch[1], 10).float())


def measured(policy: Policy, running: Policy | None = None, passes: int = 60) -> Sensitivity:
    effort = Effort(local=2, others=2, bias=passes)
    return measure_sensitivity(
        cubic_network(), loud_loss, rows(), policy, effort=effort, running=running
    )


def true_bias(policy: Policy, seeds: int = 200) -> float:
    """Of the first micro-batch, which is what is measured."""
    model, (x, target) = cubic_network(), rows()
    part = (x[:16], target[:16])
    parameters = [*model.parameters()]

    def gradient(used: Policy, seed: int) -> Tensor:
        with Capture(model).step(used, seed, 0, batch=part):
            loss = loud_loss(model, part)
        return torch.cat([each.flatten() for each in torch.autograd.grad(loss, parameters)])

    def draws() -> Iterator[Tensor]:
        for seed in range(seeds):
            yield gradient(policy, seed)

    return errors_of(draws(), gradient(Policy("plain", {}, rederive=False), 0)).bias


def test_a_bias_is_found_as_large_as_it_is() -> None:
    found, expected = measured(COARSE), true_bias(COARSE)
    assert expected > 10 * SQUARED_BIAS
    assert found.squared_bias == pytest.approx(expected, abs=4 * found.squared_bias_error)
    assert found.squared_bias_error < expected / 4
    assert found.is_biased


def test_codes_without_one_have_none() -> None:
    found = measured(coded_policy(2))
    assert found.squared_bias is not None
    assert abs(found.squared_bias) < 4 * found.squared_bias_error
    assert 0 < found.squared_bias_error < 0.002
    assert not found.is_biased


def test_it_is_that_of_the_codes_that_run() -> None:
    assert measured(coded_policy(2), COARSE).is_biased
    assert not measured(COARSE, coded_policy(4)).is_biased


def test_randomness_is_no_bias() -> None:
    """Dropout draws the same masks in the plain pass and in the coded ones."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Dropout(0.5), nn.ReLU(), nn.Linear(256, 10))
    found = measure_sensitivity(model, loud_loss, rows(), coded_policy(2))
    assert found.squared_bias is not None
    assert abs(found.squared_bias) < 4 * found.squared_bias_error


def test_its_error_is_honest_and_a_single_example_tells_nothing() -> None:
    model, batch = mixed_network(), mixed_batch()
    effort = Effort(local=0, others=0)
    runs = [
        measure_sensitivity(model, cross_entropy, batch, coded_policy(2), effort=effort, seed=seed)
        for seed in range(12)
    ]
    values = torch.tensor([each.squared_bias for each in runs])
    stated = torch.tensor([each.squared_bias_error for each in runs])
    assert float(values.std()) < 3 * float(stated.mean())
    assert float(values.mean().abs()) < 4 * float(stated.mean()) / len(runs) ** 0.5
    alone = measure_sensitivity(model.eval(), cross_entropy, mixed_batch(1), coded_policy(2))
    assert alone.squared_bias is None
    assert not alone.is_biased


def test_a_newer_one_counts_alone_and_is_stored() -> None:
    old, new = measured(COARSE, passes=4), measured(coded_policy(2), passes=4)
    assert old.refreshed(new).squared_bias == new.squared_bias
    again = Sensitivity.from_dict(new.as_dict())
    assert (again.squared_bias, again.squared_bias_error) == (
        new.squared_bias,
        new.squared_bias_error,
    )
