"""No step fails for having been fused: what reads otherwise later trains as plain PyTorch does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import at_most
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrizations

from daf.core.errors import DoubleBackwardError, NonFiniteLossError
from daf.core.plan import Plan
from daf.core.policy import plain_policy, with_fused_operators
from daf.operators.chunked.cross_entropy import chunked_cross_entropy
from daf.session.session import Session

# PyTorch's own, for forward-mode derivatives.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
WIDTH, CLASSES, STEPS, LATE = 8, 1024, 6, 3
Late = Callable[["Network", Tensor, Tensor], Tensor]


class Network(nn.Module):
    """Normalisations that are fused in the first steps; ``late`` runs from then on instead."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(WIDTH, WIDTH, 3, padding=1) for _ in "12")
        self.one, self.two = nn.BatchNorm2d(WIDTH), nn.BatchNorm2d(WIDTH)
        self.rows = nn.LayerNorm(8)
        self.head = nn.Linear(8, CLASSES)
        self.step = 0
        self.aside: list[Any] = []

    def body(self, x: Tensor) -> Tensor:
        y = F.relu(self.one(self.first(x)))
        return F.relu(self.two(self.second(y)) + y)

    def logits(self, x: Tensor) -> Tensor:
        return self.head(F.gelu(self.rows(x)).mean((1, 2)))

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(self.body(x))


def usual(m: Network, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m(x), y)


def also_read(m: Network, x: Tensor, y: Tensor) -> Tensor:
    z = m.one(m.first(x))
    z = F.relu(z) + 0.1 * z
    return F.cross_entropy(m.logits(z), y)


def sum_also_read(m: Network, x: Tensor, y: Tensor) -> Tensor:
    z = F.relu(m.one(m.first(x)))
    z = m.two(m.second(z)) + z
    return F.cross_entropy(m.logits(F.relu(z) - 0.1 * z), y)


def addend_changed(m: Network, x: Tensor, y: Tensor) -> Tensor:
    z = F.relu(m.one(m.first(x)))
    beside = z * 2
    z = m.two(m.second(z)) + beside
    beside.add_(1.0)
    return F.cross_entropy(m.logits(F.relu(z) + beside), y)


def two_passes(m: Network, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m(x), y) + F.cross_entropy(m(x.flip(0)), y)


def put_aside(m: Network, x: Tensor, y: Tensor) -> Tensor:
    z = m.one(m.first(x))
    m.aside = [z]
    return F.cross_entropy(m.logits(F.relu(z)), y) + 0 * z.detach().sum()


def logits_aside(m: Network, x: Tensor, y: Tensor) -> Tensor:
    m.aside = [m(x)]
    return F.cross_entropy(m.aside[0], y)


def logits_read(m: Network, x: Tensor, y: Tensor) -> Tensor:
    found = m(x)
    return F.cross_entropy(found, y) + 1e-3 * found.logsumexp(-1).square().mean()


def penalised(m: Network, x: Tensor, y: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    loss = F.cross_entropy(m(x), y)
    (slope,) = torch.autograd.grad(m.body(x).sum(), x, create_graph=True)
    return loss + 1e-3 * slope.square().sum()


def penalised_through_the_loss(m: Network, x: Tensor, y: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    loss = F.cross_entropy(m(x), y)
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + slope.square().sum()


def hooked(m: Network, x: Tensor, y: Tensor) -> Tensor:
    seen: list[Tensor] = []
    handle = m.one.register_forward_hook(lambda _m, _i, out: seen.append(out.detach().abs()))
    loss = usual(m, x, y)
    handle.remove()
    return loss + 0.1 * seen[0].mean()


def changing_hook(m: Network, x: Tensor, y: Tensor) -> Tensor:
    handle = m.two.register_forward_hook(lambda _m, _i, out: out * 0.5)
    loss = usual(m, x, y)
    handle.remove()
    return loss


def gradient_hook(m: Network, x: Tensor, y: Tensor) -> Tensor:
    def scale(_m: nn.Module, _i: Any, out: Tensor) -> None:
        out.register_hook(lambda g: g * 0.5)

    handle = m.one.register_forward_hook(scale)
    loss = usual(m, x, y)
    handle.remove()
    return loss


def functional(m: Network, x: Tensor, y: Tensor) -> Tensor:
    changed = {name: each * 0.9 for name, each in m.named_parameters()}
    return F.cross_entropy(torch.func.functional_call(m, changed, (x,)), y)


def evaluated(m: Network, x: Tensor, y: Tensor) -> Tensor:
    m.one.eval()
    loss = usual(m, x, y)
    m.one.train()
    return loss


def other_order(m: Network, x: Tensor, y: Tensor) -> Tensor:
    z = F.relu(m.two(m.second(x)))
    return F.cross_entropy(m.logits(F.relu(m.one(m.first(z))) + z), y)


def in_place(m: Network, x: Tensor, y: Tensor) -> Tensor:
    z = m.one(m.first(x))
    z += x
    return F.cross_entropy(m.logits(F.relu_(z) * z.sigmoid()), y)


def unseen(m: Network, x: Tensor, y: Tensor) -> Tensor:
    z = m.one(m.first(x))
    with torch._C.DisableTorchFunction():
        z = z.sin()
    return F.cross_entropy(m.logits(z), y)


def forward_mode(m: Network, x: Tensor, y: Tensor) -> Tensor:
    with forward_ad.dual_level():
        found = m.logits(m.body(forward_ad.make_dual(x, torch.ones_like(x))))
        tangent = forward_ad.unpack_dual(found).tangent
    return usual(m, x, y) + 1e-3 * tangent.square().mean()


LATER: dict[str, Late] = {
    each.__name__: each
    for each in (
        *(also_read, sum_also_read, addend_changed, two_passes, put_aside, logits_aside),
        *(logits_read, penalised, penalised_through_the_loss, hooked, changing_hook),
        *(gradient_hook, functional, evaluated, other_order, in_place, unseen, forward_mode),
    )
}


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(8, WIDTH, 8, 8, generator=generator),
        torch.randint(CLASSES, (8, 8), generator=generator).T.flatten()[:8],
    )


def trained(
    schedule: list[str], *, fused: bool, change: Callable[[Network], object] = lambda _: None
) -> tuple[dict[str, Tensor], list[float], Session | None]:
    """The state after one step by each name, and the losses."""
    torch.manual_seed(0)
    model = Network()
    change(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x, y = batch()

    def loss_fn(model: Network, batch: tuple[Tensor, Tensor]) -> Tensor:
        late = LATER.get(schedule[model.step], usual)
        return late(model, *batch)

    losses, session = [], None
    if fused:
        session = Session(model, optimizer, None)
        policy = with_fused_operators(plain_policy())
        session.plan = Plan(policy, len(x), 0, return_freed_blocks=False)
    for step in range(len(schedule)):
        model.step = step
        if session is not None:
            losses.append(session.step((x, y), loss_fn).loss)
        else:
            optimizer.zero_grad()
            loss = loss_fn(model, (x, y))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert not any(each.isnan().any() for each in model.aside)
    return model.state_dict(), losses, session


def assert_trains_alike(
    schedule: list[str], change: Callable[[Network], object] = lambda _: None
) -> Session:
    expected, true, _ = trained(schedule, fused=False, change=change)
    found, losses, session = trained(schedule, fused=True, change=change)
    assert losses == pytest.approx(true, rel=1e-4)
    for name, each in expected.items():
        torch.testing.assert_close(found[name], each, rtol=1e-3, atol=1e-4)
    assert session is not None
    return session


def fusions(session: Session) -> dict[str, tuple[str, str]]:
    return {each.module: (each.pattern, each.reason) for each in session._capture.fusions()}


def test_the_usual_step_is_fused() -> None:
    session = assert_trains_alike([""] * STEPS)
    found = fusions(session)
    assert found["one"] == ("batch_norm + relu", "")
    assert found["two"] == ("batch_norm + add + relu", "")
    assert found["head"] == ("linear + cross_entropy", "")
    assert found["rows"][0] == "layer_norm"


@pytest.mark.parametrize("late", LATER)
def test_a_step_that_reads_otherwise_later(late: str) -> None:
    assert_trains_alike([""] * LATE + [late] * 2 + [""])


@given(st.lists(st.sampled_from(["", "", *sorted(LATER)]), min_size=3, max_size=8))
@settings(max_examples=at_most(60, 6), deadline=None)
def test_any_schedule_of_them(schedule: list[str]) -> None:
    assert_trains_alike(["", *schedule])


@pytest.mark.parametrize("late", ["penalised", "penalised_through_the_loss", "also_read"])
def test_every_fourth_step(late: str) -> None:
    assert_trains_alike(["", "", "", late] * 2)


def test_what_fell_back_stays_so_and_the_reason_is_told() -> None:
    session = assert_trains_alike(["", "", "also_read", "", ""])
    assert fusions(session)["one"] == ("batch_norm", "its result is read after its ReLU")
    assert [each.module for each in session._capture.fallen_back()] == ["one"]
    assert fusions(session)["two"] == ("batch_norm + add + relu", "")
    session = assert_trains_alike(["", "", "penalised_through_the_loss", ""])
    pattern, reason = fusions(session)["head"]
    assert pattern == ""
    assert "second derivative" in reason


@pytest.mark.parametrize(
    "change",
    [
        lambda m: parametrizations.weight_norm(m.first),
        lambda m: parametrizations.spectral_norm(m.head),
        lambda m: parametrizations.orthogonal(m.head),
    ],
    ids=["weight norm", "spectral norm", "orthogonal"],
)
def test_parametrized_layers(change: Callable[[Network], object]) -> None:
    assert_trains_alike(["", "", "also_read", "penalised", ""], change)


def test_a_loss_that_is_not_finite_and_second_derivatives_of_one_s_own_stay_errors() -> None:
    x, y = batch()
    model = Network()
    session = Session(model, torch.optim.SGD(model.parameters(), 0.01), None)
    policy = with_fused_operators(plain_policy())
    session.plan = Plan(policy, len(x), 0, return_freed_blocks=False)
    for _ in range(2):
        session.step((x, y), lambda m, b: usual(m, *b))
    with pytest.raises(NonFiniteLossError):
        session.step((x, y), lambda m, b: usual(m, *b) * float("nan"))

    def own(model: Network, batch: tuple[Tensor, Tensor]) -> Tensor:
        hidden = model.body(batch[0]).mean((1, 2))
        loss = chunked_cross_entropy(hidden, model.head.weight, batch[1])
        (slope,) = torch.autograd.grad(loss, hidden, create_graph=True)
        return loss + slope.square().sum()

    with pytest.raises(DoubleBackwardError):
        session.step((x, y), own)
