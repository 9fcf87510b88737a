"""Loops of SAM, schedule-free optimizers, several of them, adversaries: as in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import daf
from daf.core.errors import BudgetError, OptionError
from daf.memory.recycling_allocator import unsupported_reason

ROWS, STEPS = 32, 4
Batch = tuple[Tensor, Tensor]


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimisation as published: a closure, or two calls, for the second pass."""

    def __init__(self, params: Any, rho: float = 0.05, **options: Any) -> None:
        super().__init__(params, {"rho": rho, **options})
        self.base = torch.optim.SGD(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        each = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in each]).norm()
        for parameter in each:
            self.state[parameter]["before"] = parameter.clone()
            parameter.add_(parameter.grad * (self.param_groups[0]["rho"] / (norm + 1e-12)))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data = self.state[parameter]["before"]
        self.base.step()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None, "SAM needs a closure"
        self.first_step()
        closure()
        self.second_step()


class OwnPasses(Sam):
    """One that makes both passes by its closure."""

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        loss = closure()
        super().step(closure)
        return loss


class Greedy(OwnPasses):
    """One that asks for memory of its own between its passes."""

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        loss = closure()
        self.state["history"] = torch.empty(2**33, dtype=torch.uint8)
        return loss


class ScheduleFree(torch.optim.Optimizer):
    """Averages its steps; parameters are others in evaluation, and steps need training mode."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "is_training": False, "count": 0})

    def _move(self, share: float, *, to_train: bool) -> None:
        for group in self.param_groups:
            if group["is_training"] is not to_train:
                for each in (p for p in group["params"] if p in self.state):
                    each.data.lerp_(self.state[each]["z"], share)
                group["is_training"] = to_train

    def train(self) -> None:
        self._move(0.1, to_train=True)

    def eval(self) -> None:
        self._move(1 - 1 / 0.9, to_train=False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["is_training"]:
                raise Exception("not in train mode")
            group["count"] += 1
            for each in group["params"]:
                state = self.state[each]
                state.setdefault("z", each.clone()).sub_(each.grad, alpha=group["lr"])
                each.lerp_(state["z"], 1 / group["count"])


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, 4))


def batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(ROWS, 16, generator=generator),
            torch.randint(0, 4, (ROWS,), generator=generator),
        )
        for _ in range(STEPS)
    ]


def classified(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


class Plain:
    """What a session does, by hand."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self.model, self.optimizer = model, optimizer

    def backward(self, batch: Any, loss: Any) -> None:
        loss(self.model, batch).backward()

    def step(self, batch: Any, loss: Any) -> None:
        def closure() -> Any:
            self.optimizer.zero_grad()
            self.backward(batch, loss)

        if not isinstance(self.optimizer, OwnPasses):
            closure()
        self.optimizer.step(*[closure] * isinstance(self.optimizer, Sam))


Make = Callable[[nn.Module, Any], Any]


def sam(make: Make, kind: Any = Sam) -> nn.Module:
    model = network()
    session = make(model, kind(model.parameters(), lr=0.1, momentum=0.9))
    for batch in batches():
        session.step(batch, classified)
    return model


def sam_by_hand(make: Make) -> nn.Module:
    model = network()
    optimizer = Sam(model.parameters(), lr=0.1, momentum=0.9)
    session = make(model, optimizer)
    for batch in batches():
        session.backward(batch, classified)
        optimizer.first_step()
        session.backward(batch, classified)
        optimizer.second_step()
        optimizer.zero_grad()
    return model


def sam_by_closure(make: Make) -> nn.Module:
    model = network()
    optimizer = Sam(model.parameters(), lr=0.1)
    session = make(model, optimizer)
    for batch in batches():
        session.backward(batch, classified)
        optimizer.step(lambda batch=batch: session.backward(batch, classified))
        optimizer.zero_grad()
    return model


def schedule_free(make: Make) -> nn.Module:
    model = network()
    optimizer = ScheduleFree(model.parameters())
    session = make(model, optimizer)
    for batch in batches():
        optimizer.train()
        session.step(batch, classified)
        optimizer.eval()
    return model


def several(make: Make) -> nn.Module:
    model = network()
    first = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
    second = torch.optim.AdamW([*model[1].parameters(), *model[3].parameters()], lr=0.01)
    session = make(model, first)
    for batch in batches():
        first.zero_grad()
        second.zero_grad()
        session.backward(batch, classified)
        first.step()
        second.step()
    return model


def adversaries(make: Make, *, steps: bool) -> nn.Module:
    maker, judge = nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    ways = [torch.optim.Adam(each.parameters(), lr=1e-3) for each in (maker, judge)]
    makes, judges = make(maker, ways[0]), make(judge, ways[1])

    def judged(model: nn.Module, rows: Tensor) -> Tensor:
        return F.softplus(-model(rows)).mean() + F.softplus(model(maker(rows).detach())).mean()

    def made(model: nn.Module, rows: Tensor) -> Tensor:
        return F.softplus(-judge(model(rows))).mean()

    for rows, _ in batches():
        for optimizer, session, loss in ((ways[1], judges, judged), (ways[0], makes, made)):
            optimizer.zero_grad()
            if steps:
                session.step(rows, loss)
            else:
                session.backward(rows, loss)
                optimizer.step()
    return nn.ModuleList([maker, judge])


LOOPS: dict[str, Callable[[Make], nn.Module]] = {
    "sam": sam,
    "sam with passes of its own": lambda make: sam(make, OwnPasses),
    "sam in two calls": sam_by_hand,
    "sam by a closure": sam_by_closure,
    "schedule-free": schedule_free,
    "several optimizers": several,
    "adversaries, session.step": lambda make: adversaries(make, steps=True),
    "adversaries, session.backward": lambda make: adversaries(make, steps=False),
}


@pytest.mark.parametrize("budget", [None, "8GB"])
@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_the_parameters_are_those_of_a_plain_loop(loop: Any, budget: Any) -> None:
    sessions: list[daf.Session] = []

    def session_of(model: nn.Module, optimizer: Any) -> daf.Session:
        sessions.append(daf.Session(model, optimizer, budget, tolerance=0, split=False))
        return sessions[-1]

    torch.manual_seed(0)
    plain = loop(Plain)
    torch.manual_seed(0)
    found = loop(session_of)
    for each in sessions:
        each.close()
    for one, other in zip(plain.state_dict().values(), found.state_dict().values(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", [Sam, OwnPasses, torch.optim.LBFGS])
def test_an_update_alone_says_what_such_an_optimizer_needs(kind: Any) -> None:
    model = network()
    with daf.Session(model, kind(model.parameters(), lr=0.1), None) as session:
        session.backward(batches()[0], classified)
        with pytest.raises(OptionError, match=r"try session\.step"):
            session.update()


@pytest.mark.skipif(bool(unsupported_reason()), reason=str(unsupported_reason()))
def test_memory_refused_to_an_optimizer_between_its_passes_is_a_budget_error() -> None:
    model = network()
    with daf.Session(model, Greedy(model.parameters(), lr=0.1), "2GB") as session:
        with pytest.raises(BudgetError, match="needs at least") as found:
            session.step(batches()[0], classified)
        assert isinstance(found.value, torch.OutOfMemoryError)
        assert found.value.least_bytes > 2**33


def test_what_an_optimizer_raises_is_its_own_with_a_note() -> None:
    model = network()
    with (
        daf.Session(model, ScheduleFree(model.parameters()), None) as session,
        pytest.raises(Exception, match="not in train mode") as found,
    ):
        session.step(batches()[0], classified)
    assert "without a closure" in found.value.__notes__[0]
