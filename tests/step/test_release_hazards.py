"""No parameter is changed while anything in the rest of backward may still read it."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from release_cases import (
    OPTIMIZERS,
    assert_released_exactly,
    assert_same,
    batches,
    loss_of,
    trained_plainly,
    trained_releasing,
)
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import daf
from daf.core.errors import CommittedStepError, SavedTensorError
from daf.step import gradient_release
from daf.torch_compat.parameter_reads import ParameterReads


class ReadAgain(nn.Module):
    """``w``'s gradient is complete before the first layer's backward, which reads ``w`` again."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6)
        self.w = nn.Parameter(torch.randn(6, 6))
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        early = F.linear(self.first(x), self.w.detach())
        return self.last(F.linear(early, self.w))


def test_a_parameter_that_is_still_to_be_read_waits() -> None:
    # All are released in backward, but w only after the detached product has run: with the
    # gradients of ``first``.
    order: list[str] = []
    model = ReadAgain()
    data = list(batches(1))
    plain = trained_plainly(model, OPTIMIZERS["adam"], data)

    original = gradient_release.step_alone

    def noting(optimizer: Any, group: Any, parameter: Any) -> None:
        order.append(next(n for n, p in session_model.named_parameters() if p is parameter))
        original(optimizer, group, parameter)

    session_model = deepcopy(model)
    optimizer = OPTIMIZERS["adam"](list(session_model.parameters()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("daf.step.gradient_release.step_alone", noting)
        session = daf.Session(session_model, optimizer, None, release_gradients=True)
        session.step(data[0], loss_of)
    assert_same((session_model.state_dict(), optimizer.state_dict()), plain)
    assert set(order[:2]) == {"last.weight", "last.bias"}
    assert order.index("w") > 1
    assert {"first.weight", "first.bias"} & set(order[: order.index("w") + 2])
    assert len(order) == 5


def test_without_that_rule_the_update_is_caught_and_the_step_is_said_to_be_broken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ParameterReads, "is_free", lambda _self, _parameter: True)
    with pytest.raises(CommittedStepError, match="after 3 parameters") as caught:
        trained_releasing(ReadAgain(), OPTIMIZERS["adam"], list(batches(1)))
    assert isinstance(caught.value.__cause__, SavedTensorError)


class Shared(nn.Module):
    """One matrix used three times, tied to the output's too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(6, 6))
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(F.linear(x, self.w)) @ self.w.t()
        return self.out(x)


class TiedEmbedding(nn.Module):
    """Embedding and output share a matrix; the output's use is detached every other way."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(3, 6)
        self.mix = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.mix(x + self.table((x[:, 0] > 0).long()))
        return F.linear(hidden, self.table.weight) + F.linear(hidden, self.table.weight.detach())


class Nested(torch.autograd.Function):
    """Reads a parameter in backward that autograd knows nothing of."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, secret: list[Tensor]) -> Tensor:
        ctx.secret = secret
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.secret[0].detach().sum(), None


class Secretive(nn.Module):
    """A custom function on the first layer's result reads the last layer's weight in backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(Nested.apply(self.first(x), [self.last.weight]))


class Doubling(torch.autograd.Function):
    """Works in place, so that on a view its node hides inside another one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, secret: list[Tensor]) -> Tensor:
        ctx.secret = secret
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.secret[0].detach().sum(), None


class Hidden(Secretive):
    """The secret reader works in place on a view of the first layer's result."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        Doubling.apply(hidden[:, 0], [self.last.weight])
        return self.last(hidden)


class Checkpointed(nn.Module):
    """The recomputed part reads ``w`` without adding to its gradient; ``w`` is used after it."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.reentrant = reentrant
        self.first = nn.Linear(6, 6)
        self.w = nn.Parameter(torch.randn(6, 6))
        self.out = nn.Linear(6, 3)

    def part(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(torch.tanh(self.first(x)), self.w.detach()))

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_() if self.reentrant else x
        for _ in range(2):
            x = checkpoint(self.part, x, use_reentrant=self.reentrant)
        return self.out(F.linear(x, self.w))


class Hooked(nn.Module):
    """A hook on an early activation reads a late weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient * self.last.weight.detach().sum())
        return self.last(hidden)


class Penalised(nn.Module):
    """A second derivative: the first backward pass's nodes read the parameters again."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        out = self.net(x)
        (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return out + slope.square().sum(1, keepdim=True)


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        parametrizations.weight_norm(nn.Linear(6, 6)),
        nn.Tanh(),
        parametrizations.spectral_norm(nn.Linear(6, 3)),
    )


@pytest.mark.parametrize(
    ("model", "released"),
    [
        (Shared(), 3),
        (TiedEmbedding(), 3),
        (normed(), 5),
        # The secret reader runs before the first layer's gradients are complete.
        (Secretive(), 4),
        (Hidden(), 4),
        (Checkpointed(reentrant=False), 5),
        # Inside reentrant checkpointing gradients come in parts: those wait for the end.
        (Checkpointed(reentrant=True), 0),
        (Hooked(), 0),
        (Penalised(), 4),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else str(value),
)
def test_hazards_give_plains_result(model: nn.Module, released: int) -> None:
    assert_released_exactly(model, released)


@pytest.mark.parametrize("model", [Secretive(), Hidden(), Checkpointed(reentrant=False), Hooked()])
def test_what_cannot_be_seen_would_go_wrong_without_the_rule(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hazards are real: with every parameter taken for free the result differs."""
    monkeypatch.setattr(ParameterReads, "is_free", lambda _self, _parameter: True)
    data = list(batches())
    make = OPTIMIZERS["sgd momentum"]
    found = trained_releasing(model, make, data)[0]
    expected = trained_plainly(model, make, data)[0]
    assert any(not torch.equal(found[name], expected[name]) for name in expected)


def train_with_an_earlier_product(*, release: bool) -> tuple[Any, daf.StepReport]:
    """``first * w`` is computed before the step, where no capture sees that it saves ``w``."""
    model = ReadAgain()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    earlier = model.first.weight * model.w.detach()
    session = daf.Session(model, optimizer, None, release_gradients=release)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        hidden = F.linear(F.linear(batch[0], earlier), model.w)
        return F.cross_entropy(model.last(hidden), batch[1])

    report = session.step(next(iter(batches())), loss)
    return model.state_dict(), report


def test_a_graph_from_before_the_step_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    released, report = train_with_an_earlier_product(release=True)
    plain, _ = train_with_an_earlier_product(release=False)
    assert_same(released, plain)
    assert report.released_gradients == 4
    monkeypatch.setattr(ParameterReads, "is_free", lambda _self, _parameter: True)
    with pytest.raises(CommittedStepError):
        train_with_an_earlier_product(release=True)


class Chain(nn.Module):
    """A chain of layers that share three matrices, some of them detached or seen by nobody."""

    def __init__(self, layers: list[tuple[int, str]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = layers
        self.shared = nn.ParameterList(torch.randn(6, 6) for _ in range(3))
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        for which, kind in self.layers:
            x = torch.tanh(self.layer(x, self.shared[which], kind))
        return self.out(x)

    @staticmethod
    def layer(x: Tensor, w: Tensor, kind: str) -> Tensor:
        if kind == "detached":
            return x @ w.detach()
        if kind == "scaled":
            return F.linear(x, w) * w.sum() * w[0]
        if kind == "secret":
            return Nested.apply(x, [w])
        if kind in ("checkpoint", "reentrant"):
            part = partial(Chain.layer, w=w, kind="linear")
            return checkpoint(part, x, use_reentrant=kind == "reentrant")
        if kind == "checkpoint detached":
            return checkpoint(partial(Chain.layer, w=w, kind="detached"), x, use_reentrant=False)
        return F.linear(x, w)


KINDS = ("linear", "scaled", "detached", "secret", "checkpoint", "checkpoint detached", "reentrant")


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(KINDS)), min_size=1, max_size=7))
def test_any_chain_of_shared_and_hidden_uses_gives_plains_result(
    layers: list[tuple[int, str]],
) -> None:
    data = list(batches(2))
    model, make = Chain(layers), OPTIMIZERS["sgd momentum"]
    parameters, _, session, report = trained_releasing(model, make, data)
    assert_same(parameters, trained_plainly(model, make, data)[0])
    used = {which for which, kind in layers if kind in ("linear", "scaled", "checkpoint")}
    if not {kind for _, kind in layers} & {"secret", "reentrant"}:
        # Whatever waits for a reader is free at the latest when the last gradient completes,
        # unless that reader runs later still.
        assert (
            report.released_gradients + session._gradient.release.count.left_to_the_end
            == len(used) + 2
        )
