"""Gradient release: the same result as plain training, fewer bytes, and never an unsafe update."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import daf
from daf.errors import CommittedStepError, ReleaseRefusedError, SavedTensorError
from daf.execution.parameter_reads import ParameterReads
from daf.execution.release import release_refusal
from daf.memory import track

Batch = tuple[Tensor, Tensor]
OptimizerMaker = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, OptimizerMaker] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "sgd momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
    "sgd nesterov": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "sgd foreach": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=True),
    "sgd fused": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.1),
    "adam amsgrad": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "adam foreach": lambda p: torch.optim.Adam(p, 0.01, foreach=True),
    "adam fused": lambda p: torch.optim.Adam(p, 0.01, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01),
    "adamw maximize": lambda p: torch.optim.AdamW(p, 0.01, maximize=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.01, lr_decay=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p, 0.5),
    "adamax": lambda p: torch.optim.Adamax(p, 0.01),
    "nadam": lambda p: torch.optim.NAdam(p, 0.01),
    "radam": lambda p: torch.optim.RAdam(p, 0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p, 0.01),
    "asgd": lambda p: torch.optim.ASGD(p, 0.01, t0=1),
    "adafactor": lambda p: torch.optim.Adafactor(p, 0.01),
}


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def batches(count: int = 4, width: int = 6) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(5)
    for _ in range(count):
        yield (
            torch.randn(8, width, generator=generator),
            torch.randint(3, (8,), generator=generator),
        )


def two_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3))


def trained_plainly(model: nn.Module, make: OptimizerMaker, data: list[Any]) -> tuple[Any, Any]:
    model = deepcopy(model)
    optimizer = make(list(model.parameters()))
    for batch in data:
        optimizer.zero_grad(set_to_none=True)
        loss_of(model, batch).backward()
        optimizer.step()
    return model.state_dict(), optimizer.state_dict()


def trained_releasing(
    model: nn.Module, make: OptimizerMaker, data: list[Any], **options: Any
) -> tuple[Any, Any, daf.Session, daf.StepReport]:
    model = deepcopy(model)
    optimizer = make(list(model.parameters()))
    settings: dict[str, Any] = {"budget": None, "release_gradients": True} | options
    with daf.Session(model, optimizer, **settings) as session:
        for batch in data:
            report = session.step(batch, loss_of)
    return model.state_dict(), optimizer.state_dict(), session, report


def assert_same(found: Any, expected: Any) -> None:
    """Bit for bit, in any nest."""
    assert type(found) is type(expected)
    if isinstance(expected, Tensor):
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected


def assert_released_exactly(
    model: nn.Module, released: int, make: OptimizerMaker = OPTIMIZERS["sgd momentum"]
) -> None:
    """``released`` parameters are stepped inside backward, and the result is plain's."""
    data = list(batches())
    parameters, state, session, report = trained_releasing(model, make, data)
    assert_same((parameters, state), trained_plainly(model, make, data))
    assert report.released_gradients == released
    with_gradient = sum(p.requires_grad for p in session.model.parameters())
    assert session._release.count.left_to_the_end <= with_gradient - released


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
    assert session._release.count.peak_gradient_bytes == matrix
    assert plain >= layers * matrix
    # One gradient, and the step's own copy of nothing: SGD works in place.
    assert released < 1.5 * matrix


# --- hazards ------------------------------------------------------------------------------------


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

    original = daf.execution.release.step_alone

    def noting(optimizer: Any, group: Any, parameter: Any) -> None:
        order.append(next(n for n, p in session_model.named_parameters() if p is parameter))
        original(optimizer, group, parameter)

    session_model = deepcopy(model)
    optimizer = OPTIMIZERS["adam"](list(session_model.parameters()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("daf.execution.release.step_alone", noting)
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


@pytest.mark.parametrize("model", [Secretive(), Checkpointed(reentrant=False), Hooked()])
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


def test_a_graph_from_before_the_step_is_not_trusted() -> None:
    def train(release: bool) -> tuple[Any, int]:
        model = Shared()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        earlier = model.w.square()  # saves w where no capture sees it
        session = daf.Session(model, optimizer, None, release_gradients=release)
        report = session.step(
            next(batches()), lambda model, batch: loss_of(model, batch) + earlier.sum()
        )
        return model.state_dict(), report.released_gradients

    (released, count), (plain, _) = train(True), train(False)
    assert_same(released, plain)
    assert count == 3  # it ran before any gradient was complete


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
    session = daf.Session(model, torch.optim.SGD(model.parameters(), 0.1), None, bits=2)
    session._release = type(session._release)(
        True, model, session.optimizer, session._capture.parameter_reads
    )
    data = list(batches(2))
    session.step(data[0], loss_of)
    session.optimizer.register_step_post_hook(lambda *_: None)
    before = deepcopy(model.state_dict())
    with pytest.raises(ReleaseRefusedError, match="step hooks"):
        session.step(data[1], loss_of)
    assert_same(model.state_dict(), before)


def test_pieces_are_refused() -> None:
    model = two_layers()
    refusal = release_refusal(model, torch.optim.SGD(model.parameters(), 0.1), pieces=4)
    assert "cut into 4 pieces" in refusal


def test_a_mode_that_is_none_is_an_error() -> None:
    model = two_layers()
    with pytest.raises(ValueError, match="'sometimes'"):
        daf.Session(
            model,
            torch.optim.SGD(model.parameters(), 0.1),
            None,
            release_gradients="sometimes",  # type: ignore[arg-type]
        )
