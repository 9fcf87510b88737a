"""Under optimizers that divide by gradients, errors count beside each parameter's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from daf_bench.accuracy.bit_allocation import STANDARD_TREATMENTS, coded_sites, least_variance
from small_jobs import cross_entropy
from torch import Tensor, nn

from daf.capture.capture import Capture
from daf.core.policy import KEEP, Policy, Site, coded_policy, exact_policy
from daf.profiling.optimizer_probe import divides_by_gradients
from daf.sensitivity.estimate import Effort, measure_sensitivity, relative_counts
from daf.sensitivity.result import Sensitivity

pytestmark = pytest.mark.usefixtures("code_everything")
POLICY = coded_policy(2)
SMALL = 1e-3
Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@pytest.mark.parametrize(
    "name",
    [
        *("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad", "Adadelta", "Rprop"),
        *("Adafactor", "Muon"),
    ],
)
@pytest.mark.parametrize("rate", [0.0, 1e-3])
def test_optimizers_that_divide_by_gradients_are_known(name: str, rate: float) -> None:
    made = getattr(torch.optim, name)([nn.Parameter(torch.ones(3, 3))], lr=max(rate, 1e-9))
    made.param_groups[0]["lr"] = rate  # as a schedule's warm-up leaves it
    assert divides_by_gradients(made)


def test_one_group_that_divides_is_enough_and_empty_ones_say_nothing() -> None:
    groups = [{"params": []}, {"params": [nn.Parameter(torch.ones(3))]}]
    assert divides_by_gradients(torch.optim.AdamW(groups, differentiable=True))
    assert not divides_by_gradients(torch.optim.SGD(groups, lr=0.1))


class Wrapped:
    """As Accelerate wraps an optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups
        self.defaults = optimizer.defaults


def test_a_wrapped_optimizer_is_known_by_what_it_wraps() -> None:
    parameters = [nn.Parameter(torch.ones(3))]
    for made, divides in (
        (torch.optim.AdamW(parameters), True),
        (torch.optim.SGD(parameters), False),
    ):
        assert divides_by_gradients(Wrapped(made)) is divides  # type: ignore[arg-type]


class Odd(torch.optim.SGD):
    """Takes what no trial can know of."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, secret: int) -> None:
        super().__init__(parameters, lr=0.1)
        self.secret = secret


class Failing(torch.optim.SGD):
    """Steps nothing but what it knows."""

    def step(self, closure: Any = None) -> Any:
        raise KeyError("none of mine")


@pytest.mark.parametrize(
    "make",
    [
        partial(torch.optim.SGD, lr=0.1),
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-2),
        partial(torch.optim.ASGD, lr=0.1),
        partial(torch.optim.LBFGS, lr=0.1),
        partial(torch.optim.Adam, eps=1.0),  # gradients are nothing beside what is added
        partial(Odd, secret=1),
        partial(Failing, lr=0.1),
    ],
)
def test_others_follow_the_gradient(make: Make) -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = make([parameter])
    assert not divides_by_gradients(optimizer)
    assert torch.equal(parameter, torch.ones(3))
    assert not optimizer.state


class Branches(nn.Module):
    """Two of a kind; the loss hears the second a thousandth as much."""

    def __init__(self, small: float = SMALL) -> None:
        super().__init__()
        self.small = small
        self.first, self.second = (
            nn.Sequential(nn.Linear(64, 48), nn.LayerNorm(48), nn.ReLU(), nn.Linear(48, 32))
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.first(x) + self.small * self.second(x)
        return result


def squares(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def branches() -> tuple[Branches, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return Branches(), (torch.randn(128, 64), torch.randn(128, 32))


def gradients(model: nn.Module, batch: tuple[Tensor, Tensor], policy: Policy, seed: int) -> Tensor:
    """(parameters' elements,), each divided by the root of its parameter's mean square."""
    capture = Capture(model)
    exact, found = (
        _gradients(model, batch, capture, each, seed) for each in (exact_policy(), policy)
    )
    pairs = zip(found, exact, strict=True)
    return torch.cat([(f / e.square().mean().sqrt()).flatten() for f, e in pairs])


def _gradients(
    model: nn.Module, batch: tuple[Tensor, Tensor], capture: Capture, policy: Policy, seed: int
) -> tuple[Tensor, ...]:
    with capture.step(policy, seed, 0, batch=batch):
        loss = squares(model, batch)
    return torch.autograd.grad(loss, [*model.parameters()])


def part_of_second(found: Sensitivity) -> float:
    of_second = [e for site, e in found.sites.items() if site.module.startswith("second")]
    total = sum(each.variance_per_error for each in found.sites.values())
    return sum(each.variance_per_error for each in of_second) / total


def test_a_small_gradient_counts_as_much_as_a_large_one_where_steps_are_equal() -> None:
    model, batch = branches()
    plainly = measure_sensitivity(model, squares, batch, POLICY, relative=False)
    divided = measure_sensitivity(model, squares, batch, POLICY, relative=True)
    assert not plainly.relative
    assert divided.relative
    assert part_of_second(plainly) < 1e-5
    assert 0.3 < part_of_second(divided) < 0.7
    assert plainly == measure_sensitivity(model, squares, batch, POLICY)


def test_the_size_of_a_loss_is_nothing_to_such_steps() -> None:
    model, batch = branches()

    def hundredfold(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return 100 * squares(model, batch)

    one, other = (
        measure_sensitivity(model, loss, batch, POLICY, relative=True)
        for loss in (squares, hundredfold)
    )
    assert one.batch_variance == pytest.approx(other.batch_variance, rel=1e-3)
    for site, each in one.sites.items():
        found = other.sites[site].variance_per_error
        assert found == pytest.approx(each.variance_per_error, rel=1e-2), site


def step_error(
    model: nn.Module, batch: tuple[Tensor, Tensor], policy: Policy, draws: int = 20
) -> float:
    """The plain way: over seeds of all codes."""
    drawn = torch.stack([gradients(model, batch, policy, seed) for seed in range(draws)])
    return float(drawn.var(0).sum())


def told_error(model: nn.Module, batch: tuple[Tensor, Tensor], effort: Effort) -> float:
    """As measured of the codes as they run, one of which may serve several sites."""
    found = measure_sensitivity(
        model, squares, batch, POLICY, relative=True, separate_codes=False, effort=effort
    )
    capture = Capture(model)
    with capture.step(POLICY, 0, 0, batch=batch):
        squares(model, batch)
    return found.added_variance({each.site: each.treatment for each in capture.sites()})


def test_what_is_told_is_the_squared_error_of_the_step() -> None:
    model, batch = branches()
    told = told_error(model, batch, Effort(local=8, others=60))
    assert told == pytest.approx(step_error(model, batch, POLICY, 40), rel=0.25)


def test_bits_go_where_such_steps_need_them() -> None:
    """For the same bytes the step's error is less by far than where bits are for the gradient."""
    model, batch = branches()
    errors, held = {}, {}
    for relative in (False, True):
        found = measure_sensitivity(model, squares, batch, POLICY, relative=relative)
        per_error = {site: each.variance_per_error for site, each in found.sites.items()}
        codes = [each for each in STANDARD_TREATMENTS if each != KEEP]
        sites = coded_sites(_elements(model, batch), per_error, codes)
        budget = sum(min(choice.nbytes for choice in each.choices) for each in sites) * 2
        chosen = least_variance(sites, budget)
        held[relative] = chosen.nbytes
        policy = Policy("chosen", POLICY.by_need, dict(chosen.treatments), rederive=False)
        errors[relative] = step_error(model, batch, policy)
    assert held[True] <= 1.01 * held[False]
    assert errors[True] < 0.7 * errors[False]


def _elements(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[Site, int]:
    found = measure_sensitivity(
        model, squares, batch, POLICY, effort=Effort(local=0, others=0, micro_batches=0)
    )
    width = {"first.0": 64, "second.0": 64}
    return {site: len(batch[0]) * width.get(site.module, 48) for site in found.sites}


class Indifferent(nn.Module):
    """A key's bias, to which softmax is indifferent: its gradient is rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(32, 32) for _ in range(3))
        self.classes = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        weights = (self.query(x) @ self.key(x).mT).softmax(-1)
        result: Tensor = self.classes((weights @ self.value(x)).mean(1))
        return result


def test_a_parameter_without_a_gradient_does_not_drown_the_others() -> None:
    torch.manual_seed(0)
    model, batch = Indifferent(), (torch.randn(32, 8, 32), torch.randint(0, 10, (32,)))
    measure = partial(measure_sensitivity, model, cross_entropy, batch, POLICY)
    whole = measure(relative=True)
    model.key.bias.requires_grad_(False)
    without = measure(relative=True)
    own, own_without = whole.batch_variance, without.batch_variance
    assert own is not None
    assert own_without is not None
    for site, each in without.sites.items():
        few = each.variance_per_error / own_without
        assert 0.7 * few < whole.sites[site].variance_per_error / own < 1.4 * few, site


def test_where_codes_make_all_of_a_gradient_they_count_for_so_much_at_most() -> None:
    elements = torch.tensor([10.0, 10.0, 10.0, 10.0])
    own = torch.tensor([1.0, 1.0, 1e-13, 1e-4])
    noise = torch.tensor([0.1, 4.0, 0.0, 0.0])
    coded = torch.tensor([1.0, 1.0, 1.0, 1.6])
    found = relative_counts(elements, own, noise, coded)
    # By its own energy; small by chance; rounding; not more than sixteen times below the codes'.
    assert found.tolist() == pytest.approx([10.0, 2.5, 0.0, 100.0])


class Adapted(nn.Module):
    """A frozen layer and one that adapts it, whose second matrix is 0 before the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.inwards = nn.Linear(64, 64)
        self.frozen, self.first, self.second = nn.Linear(64, 48), nn.Linear(64, 8), nn.Linear(8, 48)
        self.frozen.requires_grad_(False)
        self.classes = nn.Linear(48, 10)
        nn.init.zeros_(self.second.weight)
        nn.init.zeros_(self.second.bias)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.inwards(x))
        result: Tensor = self.classes(torch.relu(self.frozen(h) + self.second(self.first(h))))
        return result


def test_what_is_heard_by_nothing_yet_is_not_taken_for_nothing() -> None:
    torch.manual_seed(0)
    model, batch = Adapted(), (torch.randn(64, 64), torch.randint(0, 10, (64,)))
    measure = partial(measure_sensitivity, model, cross_entropy, batch, POLICY, relative=True)
    before = measure()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    cross_entropy(model, batch).backward()
    optimizer.step()
    after = measure()
    (site,) = (site for site in before.sites if site.module == "first")
    assert before.sites[site].variance_per_error == 0.0
    assert 0.2 < before.weights()[site] < 5.0
    assert before.refreshed(after).sites[site] == after.sites[site]
    assert after.sites[site].variance_per_error > 0.0
    assert after.refreshed(before).sites[site] == after.sites[site]


class Looked(nn.Module):
    """A table of which a batch looks up a hundredth."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, 32)
        self.classes = nn.Sequential(
            nn.Linear(32, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 10)
        )

    def forward(self, words: Tensor) -> Tensor:
        result: Tensor = self.classes(self.table(words).mean(1))
        return result


def test_rows_that_nobody_looked_up_do_not_count() -> None:
    """What a table adds to the yardstick is for the rows that a step moves."""
    found = {}
    for rows in (200, 20_000):
        torch.manual_seed(0)
        model = Looked(rows)
        torch.manual_seed(1)
        for part in model.classes:
            if isinstance(part, nn.Linear):
                nn.init.normal_(part.weight, std=0.2)
        nn.init.ones_(model.table.weight)
        batch = (torch.randint(0, 200, (64, 8)), torch.randint(0, 10, (64,)))
        found[rows] = measure_sensitivity(model, cross_entropy, batch, POLICY, relative=True)
    few, many = found.values()
    assert few.batch_variance == pytest.approx(many.batch_variance, rel=0.1)
    assert few.gradient_energy == pytest.approx(many.gradient_energy, rel=0.1)


class Shared(nn.Module):
    """One code serves a large weight's gradient, and a scale's whose own is next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.inwards, self.large = nn.Linear(64, 64), nn.Linear(64, 10)
        self.quiet = nn.Parameter(torch.zeros(64))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.inwards(x))
        result: Tensor = self.large(h) + 1e-4 * (self.quiet * h).sum(1, keepdim=True)
        return result


def test_an_error_that_is_small_in_the_gradient_only_is_not_overlooked() -> None:
    torch.manual_seed(0)
    model, batch = Shared(), (torch.randn(128, 64), torch.randn(128, 10))
    told = told_error(model, batch, Effort(others=60))
    assert told == pytest.approx(step_error(model, batch, POLICY, 40), rel=0.35)


def test_micro_batches_are_no_measure_where_statistics_are_the_batch_s() -> None:
    torch.manual_seed(0)
    layers = [
        nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32))
        for _ in range(2)
    ]
    model, batch = nn.Sequential(*layers), (torch.randn(8, 32), torch.randn(8, 32))
    found = measure_sensitivity(model, squares, batch, coded_policy(4), relative=True)
    # By the batch's own gradient the sum over parameters is the number of their elements.
    elements = sum(each.numel() for each in model.parameters())
    assert found.gradient_energy == pytest.approx(elements, rel=0.1)


def test_such_numbers_are_not_taken_for_variances_of_a_mean() -> None:
    model, batch = branches()
    relative = measure_sensitivity(model, squares, batch, POLICY, relative=True)
    plainly = measure_sensitivity(model, squares, batch, POLICY)
    assert relative.variance_of(64) == relative.batch_variance
    assert plainly.batch_variance is not None
    assert plainly.variance_of(64) == 2 * plainly.batch_variance


def test_without_pieces_the_coded_gradient_is_the_measure() -> None:
    model, batch = branches()
    found = measure_sensitivity(
        model,
        squares,
        batch,
        POLICY,
        relative=True,
        effort=Effort(local=0, others=0, micro_batches=0),
    )
    assert found.relative
    assert found.batch_variance is None
    assert found.gradient_energy > 0.9 * sum(p.numel() for p in model.parameters())
    assert 0.3 < part_of_second(found) < 0.7


def test_other_units_are_forgotten_and_stored() -> None:
    model, batch = branches()
    plainly = measure_sensitivity(model, squares, batch, POLICY)
    divided = measure_sensitivity(model, squares, batch, POLICY, relative=True)
    assert plainly.refreshed(divided) == divided
    assert divided.refreshed(plainly) == plainly
    assert divided.refreshed(divided).relative
    assert Sensitivity.from_dict(divided.as_dict()) == divided
    older = {name: value for name, value in plainly.as_dict().items() if name != "relative"}
    assert Sensitivity.from_dict(older) == plainly
