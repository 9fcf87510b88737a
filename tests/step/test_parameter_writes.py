"""What a forward pass does to parameters, and to what it names elsewhere, is undone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from daf.core.errors import CommittedStepError, FusionError
from daf.recompute.python_state import Surroundings
from daf.session.session import Session
from daf.step.state_snapshot import StepSnapshot, preserved_state


def lerp(t: nn.Parameter, s: nn.Parameter) -> None:
    with torch.no_grad():
        t.lerp_(s, 0.5)


def operator(t: nn.Parameter, s: nn.Parameter) -> None:
    with torch.no_grad():
        t *= 0.5
        t += s


def index(t: nn.Parameter, _s: nn.Parameter) -> None:
    with torch.no_grad():
        t[0] = 0.0


def by_out(t: nn.Parameter, s: nn.Parameter) -> None:
    with torch.no_grad():
        torch.add(t, s, out=t)


def data(t: nn.Parameter, s: nn.Parameter) -> None:
    t.data.mul_(0.5).add_(s.data)


def replaced(t: nn.Parameter, s: nn.Parameter) -> None:
    t.data = t.data * 0.5 + s.data


def view(t: nn.Parameter, _s: nn.Parameter) -> None:
    t.detach().view(-1)[:2].zero_()


def many(t: nn.Parameter, s: nn.Parameter) -> None:
    with torch.no_grad():
        torch._foreach_add_([t], [s])


def initialised(t: nn.Parameter, _s: nn.Parameter) -> None:
    nn.init.normal_(t)


def stepped(t: nn.Parameter, _s: nn.Parameter) -> None:
    t.grad = torch.ones_like(t)
    torch.optim.SGD([t], 0.1).step()
    t.grad = None


WAYS = [*(lerp, operator, index, by_out, data, replaced), *(view, many, initialised, stepped)]


class Distilled(nn.Module):
    """A teacher that follows its student in every forward pass."""

    def __init__(self, follow: Callable[[nn.Parameter, nn.Parameter], None]) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)
        self.follow = follow

    def forward(self, x: Tensor) -> Tensor:
        for t, s in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            self.follow(t, s)
        found: Tensor = self.student(x) - self.teacher(x)
        return found


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = model(x).square().mean()
    return found


@pytest.mark.parametrize("follow", WAYS)
def test_values_and_memory_are_as_before(follow: Callable[..., None]) -> None:
    model = Distilled(follow)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    places = [(each.data_ptr(), each._version) for each in model.student.parameters()]
    memory = [each.data_ptr() for each in model.teacher.parameters()]
    with preserved_state(model, gradients=True):
        for _ in range(3):
            loss_of(model, torch.randn(4, 8)).backward()
        assert not torch.equal(model.teacher.weight, before["teacher.weight"])
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert memory == [each.data_ptr() for each in model.teacher.parameters()]
    # What nobody wrote was not touched either.
    assert places == [(each.data_ptr(), each._version) for each in model.student.parameters()]


@pytest.mark.parametrize("follow", [lerp, replaced])
def test_preparing_a_session_moves_no_teacher(follow: Callable[..., None]) -> None:
    torch.manual_seed(0)
    model = Distilled(follow)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.student.parameters(), 0.1)
    with Session(model, optimizer, "8GB") as session:
        session.prepare(torch.randn(64, 8), loss_of)
        assert "writes parameters" in session.split_refusal
        assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


def test_generators_and_lists_that_functions_close_over_are_restored() -> None:
    source, listed = torch.Generator().manual_seed(3), [np.random.default_rng(3)]
    seen: list[Tensor] = []
    model = Distilled(lerp)
    model.draw = lambda: torch.rand((), generator=source).item() + listed[0].random()
    model.student.register_forward_hook(lambda _m, _i, out: seen.append(out * model.draw()))
    with preserved_state(model):
        first = loss_of(model, torch.ones(4, 8)), seen[0].sum().item()
        loss_of(model, torch.ones(4, 8))
        assert seen[0].sum() != seen[1].sum()
    assert seen == []
    loss_of(model, torch.ones(4, 8))
    assert seen[0].sum().item() == first[1]


def test_states_that_a_loss_carries_move_once_a_step() -> None:
    """Measured, tried anew after a refusal, or not."""

    class Carried:
        def __init__(self) -> None:
            self.calls, self.kept, self.seen = 0, torch.zeros(16, 8), []

        def loss(self, model: nn.Module, x: Tensor) -> Tensor:
            self.calls += 1
            state = model(x + self.kept)
            self.kept = state.detach()
            self.seen.append(float(state.detach().sum()))
            return state.square().mean()

    def run(budget: str | None) -> Carried:
        torch.manual_seed(0)
        model, carried = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), Carried()
        with Session(
            model, torch.optim.SGD(model.parameters(), 0.1), budget, tolerance=0
        ) as session:
            for _ in range(3):
                session.step(torch.ones(16, 8), carried.loss)
        return carried

    plain, planned = run(None), run("8GB")
    assert plain.calls == planned.calls == 3
    assert planned.seen == plain.seen
    assert torch.equal(planned.kept, plain.kept)


@pytest.mark.parametrize("follow", [lerp, replaced])
def test_a_step_that_moved_a_teacher_is_not_run_again(follow: Callable[..., None]) -> None:
    model = Distilled(follow)
    snapshot = StepSnapshot(Surroundings.of(model, loss_of))
    snapshot.check_parameters()
    loss_of(model, torch.randn(4, 8))
    snapshot.restore()
    with pytest.raises(CommittedStepError, match="itself had changed parameters"):
        snapshot.check_parameters()


def test_an_error_that_no_other_operators_mend_is_raised() -> None:
    def failing(_model: nn.Module, _x: Tensor) -> Tensor:
        raise FusionError("of the user's own")

    model = nn.Linear(8, 8)
    session = Session(model, torch.optim.SGD(model.parameters(), 0.1), None, split=False)
    with pytest.raises(FusionError, match="user's own"):
        session.step(torch.randn(4, 8), failing)
