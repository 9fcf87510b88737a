"""Gradient release: the same result as plain training, fewer bytes, refusals with the reason."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from release_cases import (
    OPTIMIZERS,
    OptimizerMaker,
    assert_released_exactly,
    assert_same,
    batches,
    loss_of,
    trained_plainly,
    trained_releasing,
    two_layers,
)
from torch import Tensor, nn

import daf
from daf.core.errors import ReleaseRefusedError
from daf.memory import track
from daf.step.gradient_release import release_refusal

pytestmark = pytest.mark.smoke

# --- the same result ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_steps_as_plain(name: str) -> None:
    assert_released_exactly(two_layers(), 6, OPTIMIZERS[name])


def test_no_optimizer_of_torch_was_forgotten() -> None:
    kinds = {
        kind
        for kind in vars(torch.optim).values()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    }
    tried = {type(make([nn.Parameter(torch.zeros(2, 2))])) for make in OPTIMIZERS.values()}
    elsewhere = {torch.optim.LBFGS, torch.optim.Muon, torch.optim.SparseAdam}
    assert kinds - {torch.optim.Optimizer} == tried | elsewhere


def test_muon_steps_matrices_as_plain() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.ReLU(), nn.Linear(8, 3, bias=False))
    assert_released_exactly(model, 2, lambda p: torch.optim.Muon(p, 0.01))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize("kind", [torch.optim.SparseAdam, torch.optim.SGD, torch.optim.Adagrad])
def test_sparse_gradients_are_released(kind: type[torch.optim.Optimizer]) -> None:
    torch.manual_seed(0)

    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 3, sparse=True)

        def forward(self, words: Tensor) -> Tensor:
            return self.table(words).sum(1)

    data = [(torch.tensor([[1, 2], [2, 2], [7, 0]]), torch.tensor([0, 2, 1]))] * 3
    model = Bag()
    plain = trained_plainly(model, kind, data)
    parameters, state, _, report = trained_releasing(model, kind, data)
    assert_same((parameters, state), plain)
    assert report.released_gradients == 1


def test_groups_and_schedulers_stay_the_users_own() -> None:
    def train(release: bool) -> Any:
        model = two_layers()
        groups = [
            {"params": list(model[0].parameters()), "lr": 0.3},
            {"params": [*model[1].parameters(), *model[3].parameters()], "weight_decay": 0.1},
        ]
        optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        listed, members = optimizer.param_groups, [g["params"] for g in optimizer.param_groups]
        session = daf.Session(model, optimizer, None, release_gradients=release)
        for batch in batches():
            report = session.step(batch, loss_of)
            scheduler.step()
        assert optimizer.param_groups is listed
        assert all(g["params"] is m for g, m in zip(listed, members, strict=True))
        assert report.released_gradients == (6 if release else 0)
        return model.state_dict(), optimizer.state_dict(), scheduler.state_dict()

    assert_same(train(True), train(False))


def test_codes_and_release_go_together() -> None:
    data = list(batches())
    coded = [
        trained_releasing(two_layers(), OPTIMIZERS["adam"], data, bits=2, release_gradients=release)
        for release in (True, False)
    ]
    assert_same(coded[0][:2], coded[1][:2])
    assert [each[3].released_gradients for each in coded] == [6, 0]


def test_gradients_are_gone_and_frozen_and_unused_parameters_are_left() -> None:
    model = two_layers()
    model[0].bias.requires_grad_(False)
    model.register_parameter("unused", nn.Parameter(torch.ones(3)))
    # 7 parameters, one frozen, one without a gradient: momentum must not move it.
    assert_released_exactly(model, 5)
    session = trained_releasing(model, OPTIMIZERS["adam"], list(batches(1)))[2]
    assert all(parameter.grad is None for parameter in session.model.parameters())


# --- bytes --------------------------------------------------------------------------------------


def test_at_most_one_gradient_is_alive() -> None:
    width, layers = 600, 6
    matrix = 4 * width * width
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    batch = (torch.randn(4, width), torch.randint(width, (4,)))

    def peak(*, release: bool) -> tuple[int, daf.Session]:
        trained = deepcopy(model)
        optimizer = torch.optim.SGD(trained.parameters(), 0.1)
        session = daf.Session(trained, optimizer, None, release_gradients=release)
        with track() as tracking:
            before = tracking.peak_bytes
            session.step(batch, loss_of)
        return tracking.statistics["live_bytes.peak"] - before, session

    released, session = peak(release=True)
    plain, _ = peak(release=False)
    assert session._gradient.release.count.peak_gradient_bytes == matrix
    assert plain >= layers * matrix
    # One gradient, and the step's own copy of nothing: SGD works in place.
    assert released < 1.5 * matrix


# --- refusals -----------------------------------------------------------------------------------


class Clipping(torch.optim.SGD):
    """Clips by the norm of all gradients."""

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 1.0)
        return super().step(closure)


class Tagged(nn.Parameter):
    """A parameter of a class of its own, whose memory may mean something else."""


def refused_optimizers() -> dict[str, tuple[nn.Module, torch.optim.Optimizer]]:
    def pair(make: OptimizerMaker) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = two_layers()
        return model, make(list(model.parameters()))

    sgd = OPTIMIZERS["sgd"]
    cases = {
        "LBFGS looks at all": pair(torch.optim.LBFGS),
        "Clipping is not torch": pair(lambda p: Clipping(p, 0.1)),
        "SGD has step hooks": pair(sgd),
        "step of SGD is not": pair(sgd),
        "gradient scaler": pair(OPTIMIZERS["adam fused"]),
        "differentiable": pair(lambda p: torch.optim.SGD(p, 0.1, differentiable=True)),
        "'0.weight' has a hook": pair(sgd),
        "'0.bias' has a hook": pair(sgd),
        "not the model's": pair(lambda p: torch.optim.SGD([*p, nn.Parameter(torch.ones(1))], 0.1)),
        "shares its memory": pair(sgd),
    }
    tagged = two_layers()
    tagged[0].weight = Tagged(tagged[0].weight.detach())
    cases["is a Tagged"] = (tagged, torch.optim.SGD(tagged.parameters(), 0.1))
    cases["SGD has step hooks"][1].register_step_pre_hook(lambda *_: None)
    wrapped = cases["step of SGD is not"][1]
    wrapped.step = (lambda step: lambda: step())(wrapped.step)  # type: ignore[method-assign]
    cases["gradient scaler"][1].grad_scale = torch.ones(1)  # type: ignore[attr-defined]
    cases["'0.weight' has a hook"][0][0].weight.register_hook(lambda gradient: gradient)
    cases["'0.bias' has a hook"][0][0].bias.register_post_accumulate_grad_hook(lambda _: None)
    twins = cases["shares its memory"]
    twins[0][1].bias.data = twins[0][1].weight.data
    return cases


@pytest.mark.parametrize("reason", refused_optimizers())
def test_what_needs_gradients_later_is_refused_with_the_reason(reason: str) -> None:
    model, optimizer = refused_optimizers()[reason]
    assert reason in release_refusal(model, optimizer)
    with pytest.raises(ReleaseRefusedError, match=reason):
        daf.Session(model, optimizer, None, release_gradients=True)
    assert reason in daf.Session(model, optimizer, None, release_gradients="auto").release_refusal


def test_auto_trains_plainly_where_release_is_refused() -> None:
    data = list(batches())

    def make(parameters: Any) -> torch.optim.Optimizer:
        return Clipping(parameters, 0.1)

    found = trained_releasing(two_layers(), make, data, release_gradients="auto")
    assert_same(found[:2], trained_plainly(two_layers(), make, data))
    assert found[3].released_gradients == 0


def test_a_hook_that_comes_later_is_noticed() -> None:
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    session = daf.Session(model, optimizer, None, bits=2, release_gradients=True)
    data = list(batches(2))
    session.step(data[0], loss_of)
    session.optimizer.register_step_post_hook(lambda *_: None)
    before = deepcopy(model.state_dict())
    with pytest.raises(ReleaseRefusedError, match="step hooks"):
        session.step(data[1], loss_of)
    assert_same(model.state_dict(), before)


def test_micro_batches_are_refused() -> None:
    model = two_layers()
    refusal = release_refusal(model, torch.optim.SGD(model.parameters(), 0.1), micro_batches=4)
    assert "cut into 4 micro-batches" in refusal


def test_a_mode_that_is_none_is_an_error() -> None:
    model = two_layers()
    with pytest.raises(ValueError, match="'sometimes'"):
        daf.Session(
            model,
            torch.optim.SGD(model.parameters(), 0.1),
            None,
            release_gradients="sometimes",  # type: ignore[arg-type]
        )
