"""Eager training without torch's compiler in the process: the same numbers, 70 MB less."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from daf.torch_compat import compiler

pytestmark = pytest.mark.smoke

TRAIN = """
import json, sys, torch
from torch import nn
from daf.torch_compat import compiler

if sys.argv[1] == "ours":
    assert compiler.keep_out()
values = []
for kind, settings in (
    (torch.optim.SGD, dict(lr=0.1, momentum=0.9, weight_decay=1e-3)),
    (torch.optim.AdamW, dict(lr=0.1)),
    (torch.optim.Adam, dict(lr=0.1, amsgrad=True)),
    (torch.optim.RMSprop, dict(lr=0.1)),
    (torch.optim.Adagrad, dict(lr=0.1)),
):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = kind(model.parameters(), **settings)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().sum().backward()
        compiler.step(optimizer) if sys.argv[1] == "ours" else optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    values.append([each.tolist() for each in model.parameters()])
print(json.dumps(dict(values=values, loaded="torch._dynamo" in sys.modules)))
"""


def train(whose: str) -> dict[str, object]:
    """In a process of its own: here, other tests' optimizers may have loaded the compiler."""
    done = subprocess.run(
        [sys.executable, "-c", TRAIN, whose], capture_output=True, text=True, check=True
    )
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


def test_the_compiler_stays_out_and_every_bit_is_the_same() -> None:
    ours, ordinary = train("ours"), train("ordinary")
    assert ours["values"] == ordinary["values"]
    assert ordinary["loaded"] is True
    assert ours["loaded"] is False


class Counting(torch.optim.SGD):
    """A class made elsewhere, whose own step must run."""

    calls = 0

    def step(self, closure: None = None) -> None:
        self.calls += 1
        super().step(closure)


def with_gradient() -> Tensor:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    return parameter


def test_a_foreign_class_is_stepped_by_itself() -> None:
    optimizer = Counting([with_gradient()], lr=0.1)
    compiler.step(optimizer)
    assert optimizer.calls == 1
    assert optimizer.param_groups[0]["params"][0].tolist() == pytest.approx([0.9, 0.9])


def test_hooks_and_schedulers_are_obeyed() -> None:
    optimizer = torch.optim.SGD([with_gradient()], lr=0.1)
    calls: list[str] = []
    handle = optimizer.register_step_post_hook(lambda *_: calls.append("hook"))
    compiler.step(optimizer)
    handle.remove()
    assert calls == ["hook"]
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    compiler.step(optimizer)
    schedule.step()  # warns, and warnings are errors, if the optimizer's step was not counted
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
