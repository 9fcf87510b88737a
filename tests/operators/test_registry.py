"""An operator from outside the library: registered by name, it runs in a model's training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf.capture.compress import compress
from daf.core.errors import UnknownNameError
from daf.core.policy import Policy, exact_policy
from daf.operators.fusion_table import CallSite
from daf.operators.protocol import FusedOperator, OperatorCall
from daf.operators.registry import register_operator


class Squared(torch.autograd.Function):
    """``relu(x) ** 2`` that saves the ReLU's result alone."""

    reads_only_what_it_saved = True

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        positive = x.clamp(min=0)
        ctx.save_for_backward(positive)
        return positive * positive

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (positive,) = ctx.saved_tensors
        return 2 * positive * gradient


def squared_relu(x: Tensor) -> Tensor:
    found: Tensor = Squared.apply(x)  # type: ignore[no-untyped-call]
    return found


class SquaredInPlaceOfSoftsign(FusedOperator):
    """A toy: another function of another name, so that it shows where it ran."""

    name = "toy"
    functions = frozenset({F.softsign})

    def replacement(self, call: OperatorCall) -> Callable[[], Any] | None:
        (x,) = call.arguments
        path, count = self.context.state.tracker.present_call(call.name)
        site = CallSite(path, call.name, count)
        reason = "its input is small" if x.shape[-1] < 8 else ""
        self.table.decide(site, "" if reason else "toy", reason)
        return None if reason else partial(self.context.hooks.run, squared_relu, (x,), {})


class Model(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, width), nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(F.softsign(self.first(x)))
        return out


def trained(model: nn.Module, policy: Policy) -> tuple[list[float], Any]:
    """Losses of some steps, and the capture."""
    torch.manual_seed(0)
    x, labels = torch.randn(64, 16), torch.randint(4, (64,))
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    capture = compress(model, policy=policy)
    for _ in range(8):
        optimizer.zero_grad()
        with capture:
            loss = F.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, capture


def test_a_toy_operator_trains_a_model() -> None:
    register_operator(SquaredInPlaceOfSoftsign)
    torch.manual_seed(1)
    model = Model()
    losses, capture = trained(model, replace(exact_policy(), operators=frozenset({"toy"})))
    assert losses[-1] < 0.9 * losses[0]
    (report,) = capture.fusions()
    assert (report.module, report.operator, report.pattern) == ("", "softsign", "toy")
    (saved,) = (each for each in capture.sites() if each.site.operator == "squared_relu")
    assert saved.plain_bytes == 4 * 64 * 32
    expected, _ = trained(Model(), exact_policy())
    assert losses != expected


def test_an_operator_says_why_it_does_not_run() -> None:
    register_operator(SquaredInPlaceOfSoftsign)
    torch.manual_seed(1)
    model = Model(width=4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    losses, capture = trained(model, replace(exact_policy(), operators=frozenset({"toy"})))
    (report,) = capture.fusions()
    assert (report.pattern, report.reason) == ("", "its input is small")
    model.load_state_dict(before)
    assert trained(model, exact_policy())[0] == losses


def test_an_operator_that_nobody_registered_is_refused() -> None:
    policy = replace(exact_policy(), operators=frozenset({"nowhere"}))
    capture = compress(Model(), policy=policy)
    with pytest.raises(UnknownNameError, match=r"'nowhere'; registered: batch_norm"), capture:
        pass
