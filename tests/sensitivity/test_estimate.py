"""Measured sensitivities against brute force, and everything else as it was found."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_jobs import cross_entropy, mixed_batch, mixed_network, whole_gradient
from torch import Tensor, nn

from daf.capture.capture import Capture
from daf.core.code_errors import relative_error
from daf.core.errors import DataError, NonFiniteLossError
from daf.core.policy import Method, Need, Policy, Site, Treatment, coded_policy, policy_for
from daf.sensitivity.estimate import Effort, measure_sensitivity
from daf.sensitivity.result import Sensitivity, SiteSensitivity

pytestmark = pytest.mark.usefixtures("code_everything")
POLICY = coded_policy(2)
SEPARATE = replace(POLICY, rederive=False)
DRAWS = 12
_FOUR_BITS = Treatment(Method.ROTATED, 4)
_ATTENTION_CODES = replace(
    POLICY,
    by_need=dict(POLICY.by_need)
    | {Need.PRODUCT: _FOUR_BITS, Need.PROBABILITY: Treatment(Method.MINMAX, 4)},
)


def reports_of(model: nn.Module, batch: tuple[Tensor, Tensor], policy: Policy) -> dict[Site, Need]:
    capture = Capture(model)
    with capture.step(policy, 0, 0, batch=batch):
        cross_entropy(model, batch)
    return {each.site: each.need for each in capture.sites()}


def true_variance(
    model: nn.Module, batch: tuple[Tensor, Tensor], site: Site, policy: Policy = SEPARATE
) -> float:
    """Of the gradient over many seeds of one site, all others' fixed."""
    samples = [whole_gradient(model, batch, policy, {site: draw}) for draw in range(DRAWS)]
    return float(torch.stack(samples).var(0).sum())


def test_estimates_agree_with_brute_force() -> None:
    model, batch = mixed_network(), mixed_batch()
    found = measure_sensitivity(model, cross_entropy, batch, POLICY)
    needs = reports_of(model, batch, SEPARATE)
    seeded = [site for site in found.sites if needs[site] is not Need.SMOOTH]
    assert len(seeded) >= 6
    total = 0.0
    for site in seeded:
        need = needs[site]
        unit = relative_error(POLICY.treatment(need, site))
        expected = true_variance(model, batch, site) / unit
        each = found.sites[site]
        error = abs(each.variance_per_error - expected)
        assert error < 4 * each.standard_error + 0.1 * expected, site
        if need is Need.LINEAR:
            assert error < 0.25 * expected, site
            assert each.prior == pytest.approx(expected, rel=0.35), site
        total += expected * unit
    treatments = {site: POLICY.treatment(needs[site], site) for site in seeded}
    assert found.added_variance(treatments) == pytest.approx(total, rel=0.2)


class Attention(nn.Module):
    """Products of activations and a softmax that looks at little."""

    def __init__(self) -> None:
        super().__init__()
        self.inwards = nn.Linear(32, 96)
        self.outwards = nn.Linear(32, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        query, key, value = self.inwards(tokens).chunk(3, dim=-1)
        weights = torch.softmax(query @ key.mT / 32, dim=-1)
        result: Tensor = tokens + self.outwards(weights @ value)
        return result


def attentive_network() -> nn.Module:
    layers = nn.Sequential(*(Attention() for _ in range(4)))
    return nn.Sequential(nn.Unflatten(1, (8, 32)), layers, nn.Flatten(), nn.Linear(256, 10))


@pytest.mark.thorough
def test_what_adds_a_thousandth_is_found_beside_what_adds_most() -> None:
    """Not what stands in its error, but a number: alone, or shared with neighbours alike."""
    torch.manual_seed(0)
    model, batch = attentive_network(), (torch.randn(64, 256), torch.randint(0, 10, (64,)))
    policy = replace(_ATTENTION_CODES, rederive=False)
    needs = reports_of(model, batch, policy)
    inner = [site for site in needs if needs[site] in (Need.PRODUCT, Need.PROBABILITY)]
    assert len(inner) >= 16
    expected = {
        site: true_variance(model, batch, site, policy)
        / relative_error(policy.treatment(needs[site], site))
        for site in inner
    }
    assert max(expected.values()) > 100 * min(expected.values())
    for passes, far in ((60, 1.6), (8, 4.0)):
        effort = Effort(others=passes, micro_batches=0)
        found = measure_sensitivity(model, cross_entropy, batch, policy, effort=effort)
        errors = [np.log(found.sites[site].variance_per_error / expected[site]) for site in inner]
        assert np.exp(np.sqrt(np.mean(np.square(errors)))) < far


def test_the_standard_error_is_honest() -> None:
    """Estimates from different seeds scatter about as much as they say."""
    model, batch = mixed_network(), mixed_batch()
    effort = Effort(local=2, others=4, micro_batches=0)
    runs = [
        measure_sensitivity(model, cross_entropy, batch, POLICY, effort=effort, seed=seed)
        for seed in range(6)
    ]
    for site in runs[0].sites:
        values = np.array([run.sites[site].variance_per_error for run in runs])
        stated = np.array([run.sites[site].standard_error for run in runs]).mean()
        assert values.std(ddof=1) < 2 * stated, site


def test_a_linear_input_needs_no_regression() -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    batch = (torch.randn(64, 32), torch.randint(0, 10, (64,)))
    found = measure_sensitivity(model, cross_entropy, batch, POLICY)
    assert list(found.sites) == [Site("2", "linear", 0, 0)]
    assert found.passes == 1 + 2 + 1 + 1  # the others' passes were not needed


def test_the_prior_costs_one_pass_and_says_so() -> None:
    model, batch = mixed_network(), mixed_batch()
    found = measure_sensitivity(
        model, cross_entropy, batch, POLICY, effort=Effort(local=0, others=0, micro_batches=0)
    )
    assert found.passes == 1
    assert found.batch_variance is None
    for each in found.sites.values():
        assert each.variance_per_error == each.prior > 0
        assert each.standard_error >= 0.5 * each.prior
    with pytest.raises(DataError, match="batch of at least two"):
        found.added_noise({})


class TwoReaders(nn.Module):
    """What a linear reads is also a factor of a product, and one code serves both."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.second = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        scores: Tensor = self.second(hidden) * (hidden @ hidden.T).mean(1, keepdim=True)
        return scores


def test_a_code_that_other_gradients_read_is_found_out() -> None:
    model = TwoReaders()
    batch = (torch.randn(64, 32), torch.randint(0, 10, (64,)))
    site = Site("second", "linear", 0, 0)
    four = coded_policy(4)
    found = measure_sensitivity(model, cross_entropy, batch, four, effort=Effort(micro_batches=0))
    samples = [whole_gradient(model, batch, four, {site: draw}) for draw in range(DRAWS)]
    elsewhere = torch.stack(samples).var(0)[: 32 * 32].sum()
    assert elsewhere > 0.01 * torch.stack(samples).var(0).sum()
    assert found.passes == 1 + 2 + len(found.sites)
    unit = relative_error(four.by_need[Need.LINEAR])
    own = found.sites[site].variance_per_error * unit
    assert own == pytest.approx(float(torch.stack(samples).var(0).sum()), rel=0.5)
    others = [each for at, each in found.sites.items() if at.operator == "matmul"]
    assert [each.variance_per_error for each in others] == [0.0, 0.0]  # they have no code of theirs


def test_the_batch_s_own_noise() -> None:
    """Gradients of independent batches scatter as one batch's micro-batches say."""
    model = nn.Linear(24, 4)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1])

    def draw(examples: int) -> tuple[Tensor, Tensor]:
        return torch.randn(examples, 24), torch.randn(examples, 4)

    estimates = [
        measure_sensitivity(model, loss, draw(32), POLICY, effort=Effort(0, 0, 8)) for _ in range(8)
    ]
    own = np.mean([each.batch_variance for each in estimates if each.batch_variance])
    error = np.mean([each.batch_variance_error for each in estimates]) / np.sqrt(len(estimates))
    gradients = []
    for _ in range(256):
        value = loss(model, draw(32))
        gradients.append(
            torch.cat([g.flatten() for g in torch.autograd.grad(value, [*model.parameters()])])
        )
    expected = float(torch.stack(gradients).var(0).sum())
    assert abs(own - expected) < 4 * error + 0.05 * expected


def test_nothing_is_disturbed() -> None:
    model = mixed_network()
    model.insert(3, nn.Dropout(0.2))
    batch = mixed_batch()
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = [parameter.grad for parameter in model.parameters()]
    copies = [gradient.clone() for gradient in gradients if gradient is not None]
    calls: list[Tensor] = []
    model[0].weight.register_post_accumulate_grad_hook(calls.append)
    random.seed(3)
    np.random.seed(3)
    states = torch.get_rng_state(), np.random.get_state()[1], random.getstate()
    measure_sensitivity(model, cross_entropy, batch, POLICY, effort=Effort(1, 2, 2))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    for parameter, gradient, copy in zip(model.parameters(), gradients, copies, strict=True):
        assert parameter.grad is gradient
        assert torch.equal(parameter.grad, copy)
        assert not parameter._backward_hooks
    assert calls == []
    assert all(not module._forward_hooks for module in model.modules())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1] == states[1]).all()
    assert random.getstate() == states[2]


def test_weights_go_into_a_policy() -> None:
    model, batch = mixed_network(), mixed_batch()
    found = measure_sensitivity(model, cross_entropy, batch, POLICY, effort=Effort(1, 4, 0))
    weights = found.weights()
    assert np.mean(list(weights.values())) == pytest.approx(1.0)
    policy = replace(POLICY, weights=weights)
    ordered = sorted(found.sites, key=policy.weight)
    by_value = sorted(found.sites, key=lambda site: found.sites[site].at_least)
    assert ordered == by_value
    assert policy.weight(Site("nowhere", "linear", 0, 0)) == 1.0


def test_a_loss_that_is_not_finite_is_refused() -> None:
    model = nn.Linear(4, 2)
    batch = (torch.full((8, 4), float("nan")), torch.zeros(8, dtype=torch.int64))
    with pytest.raises(NonFiniteLossError, match="finite"):
        measure_sensitivity(model, cross_entropy, batch, policy_for(2))


def test_results_can_be_stored_and_refreshed() -> None:
    site, other = Site("a", "linear", 0, 0), Site("b", "linear", 0, 0)
    old = Sensitivity({site: SiteSensitivity(4.0, 0.4, 3.0)}, 10.0, 32, 4.0, 8.0, 1.0)
    newer = Sensitivity(
        {site: SiteSensitivity(2.0, 0.2), other: SiteSensitivity(1.0, 0.1)}, 6.0, 32, 4.0, 4.0, 1.0
    )
    assert Sensitivity.from_dict(old.as_dict()) == old
    mixed = old.refreshed(newer)
    assert mixed.sites[site].variance_per_error == 3.0
    assert mixed.sites[site].standard_error == pytest.approx((0.2**2 + 0.1**2) ** 0.5)
    assert mixed.sites[other] == newer.sites[other]
    assert (mixed.batch_variance, mixed.gradient_energy, mixed.passes) == (6.0, 8.0, 8.0)
    with pytest.raises(DataError, match="measure them again"):
        Sensitivity.from_dict({"sites": [{"module": "a"}]})


def test_an_older_measurement_of_more_examples_is_scaled_before_it_is_mixed() -> None:
    """Variances of a mean over half as many examples are twice as large."""
    site, gone = Site("a", "linear", 0, 0), Site("b", "linear", 0, 0)
    values = {each: SiteSensitivity(4.0, 0.4, 3.0) for each in (site, gone)}
    old = Sensitivity(values, 10.0, 32, 4.0, 8.0, 1.0)
    twice = {site: SiteSensitivity(8.0, 0.8, 6.0)}
    mixed = old.refreshed(Sensitivity(twice, 10.0, 16, 4.0, 16.0, 2.0))
    assert mixed.sites[site].variance_per_error == pytest.approx(8.0)
    assert mixed.sites[gone] == SiteSensitivity(8.0, 0.8, 6.0)
    assert (mixed.examples, mixed.batch_variance) == (16, pytest.approx(16.0))
