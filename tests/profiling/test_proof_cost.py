"""A proof takes few passes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from daf import Session
from daf.memory import process_memory
from daf.profiling.constant_random import ConstantRandom
from daf.profiling.split_proof import SplitProof
from daf.step.batch_cut import possible_cuts
from daf.step.loss_weights import Weighing

Batch = tuple[Tensor, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5))


def batch() -> Batch:
    return torch.randn(16, 6), torch.arange(16) // 4


def mean(asked: nn.Module, part: Batch) -> Tensor:
    return F.cross_entropy(asked(part[0]), part[1])


def class_weighted(asked: nn.Module, part: Batch) -> Tensor:
    return F.cross_entropy(asked(part[0]), part[1], torch.arange(1.0, 6.0))


def over_all_examples(asked: nn.Module, part: Batch) -> Tensor:
    """Sum over the labels that count, divided by all examples: the operator tells another mean."""
    counted = (part[1] >= 0).sum()
    return F.cross_entropy(asked(part[0]), part[1]) * counted / len(part[1])


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (mean, Weighing.EXAMPLES),
        (class_weighted, Weighing.LOSS),
        (over_all_examples, Weighing.EXAMPLES),
    ],
)
def test_two_pairs_of_examples_show_in_a_trial_each_how_parts_are_weighed(
    loss: Loss, expected: Weighing, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    forward = SplitProof._forward

    def noted(proof: SplitProof, part: Batch, examples: int, disturbed: int) -> Any:
        sizes.append(examples)
        return forward(proof, part, examples, disturbed)

    monkeypatch.setattr(SplitProof, "_forward", noted)
    whole = batch()
    proof = SplitProof(model(), loss, statistics=False)
    assert proof.run(whole, next(possible_cuts(whole)), 2) == (expected, "")
    assert sizes == 2 * [1, 1, 2]  # two that differ, and two that are alike


@pytest.mark.parametrize("loss", [class_weighted, over_all_examples])
def test_labels_that_stop_counting_leave_the_whole_gradient(loss: Loss) -> None:
    asked, (x, y) = model(), batch()
    less = torch.where(torch.arange(16) % 3 == 0, -100, y)
    expected = torch.autograd.grad(loss(asked, (x, less)), [*asked.parameters()])
    budget = process_memory.resident_bytes() + 2**31
    with Session(
        asked, torch.optim.SGD(asked.parameters(), lr=0.0), budget, tolerance=0
    ) as session:
        plan = session.prepare((x, y), loss)
        session.plan = replace(plan, micro_batch=3)
        assert session.step((x, y), loss).micro_batch == 3
        report = session.step((x, less), loss)
    assert report.loss == pytest.approx(loss(asked, (x, less)).item(), rel=1e-6)
    for parameter, gradient in zip(asked.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


class Checkpointed(nn.Module):
    """Runs a part again in backward, which drops half: by PyTorch's function, or in a script."""

    def __init__(self, is_scripted: bool) -> None:
        super().__init__()
        inner = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5))
        self.inner = torch.jit.script(inner) if is_scripted else inner
        self.first, self.last = nn.Linear(6, 6), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(checkpoint(self.inner, self.first(x), use_reentrant=True))
        return found


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("is_scripted", [False, True])
def test_what_a_checkpoint_draws_again_in_backward_is_constant_too(is_scripted: bool) -> None:
    whole = batch()
    proof = SplitProof(Checkpointed(is_scripted), mean, statistics=True)
    assert proof.run(whole, next(possible_cuts(whole)), 4)[1] == ""


def viewed(asked: nn.Module, part: Batch) -> Tensor:
    labels = part[1].view(-1)
    assert labels.shape[0] == labels.size(0) == len(labels)
    return F.nll_loss(F.log_softmax(asked(part[0]), 1), labels)


def by_class(asked: nn.Module, part: Batch) -> Tensor:
    alike = (part[1][:, None] == part[1]).float().fill_diagonal_(0.0)
    found = asked(part[0])
    return F.cross_entropy(found, part[1]) + (alike * torch.cdist(found, found)).sum()


def looked_up(asked: nn.Module, part: Batch) -> Tensor:
    return F.cross_entropy(asked(part[0]), torch.arange(5).flip(0)[part[1]])


@pytest.mark.parametrize("loss", [mean, viewed, by_class, looked_up])
def test_a_proof_takes_three_examples_of_which_two_are_of_a_class(
    loss: Loss, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    run = SplitProof.run

    def noted(proof: SplitProof, whole: Batch, cut: Any, count: int) -> Any:
        taken.append(count)
        return run(proof, whole, cut, count)

    monkeypatch.setattr(SplitProof, "run", noted)
    asked = model()
    budget = process_memory.resident_bytes() + 2**31
    with Session(asked, torch.optim.SGD(asked.parameters(), lr=0.0), budget) as session:
        session.prepare(batch(), loss)
        assert bool(session.split_refusal) == (loss is by_class)
    assert taken[0] == 3


PROVE = """
import sys, torch
from daf.profiling.split_proof import SplitProof
from daf.step.batch_cut import possible_cuts
whole = torch.randn(4, 6), torch.randn(4, 5)
loss = lambda model, part: (model(part[0]) - part[1]).square().mean()
proof = SplitProof(torch.nn.Linear(6, 5), loss, statistics=True)
assert proof.run(whole, next(possible_cuts(whole)), 4)[1] == ""
print("sympy" in sys.modules)
"""


def test_a_proof_does_not_make_pytorch_import_sympy() -> None:
    """In a process of its own: here, other tests may have."""
    done = subprocess.run([sys.executable, "-c", PROVE], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


class Dropping(nn.Module):
    """A residual sum that writes into what dropout returns: in training that is no saved ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 5)
        self.attention = nn.MultiheadAttention(16, 2, dropout=0.3, batch_first=True)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(input=F.relu(self.first(x)))
        hidden += 1.0
        rows = hidden[:, None]
        result: Tensor = self.last(self.attention(rows, rows, rows)[0][:, 0])
        return result


def test_dropout_keeps_everything_in_a_proof_which_looks_for_draws_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: list[int] = []
    dispatched = ConstantRandom.__torch_dispatch__
    forward = SplitProof._forward

    def noted(mode: ConstantRandom, *arguments: Any, **keywords: Any) -> Any:
        looked[-1] += 1
        return dispatched(mode, *arguments, **keywords)

    def counted(proof: SplitProof, *arguments: Any) -> Any:
        looked.append(0)
        return forward(proof, *arguments)

    monkeypatch.setattr(ConstantRandom, "__torch_dispatch__", noted)
    monkeypatch.setattr(SplitProof, "_forward", counted)
    asked, whole = Dropping(), batch()
    proof = SplitProof(asked, mean, statistics=False)
    assert proof.run(whole, next(possible_cuts(whole)), 2) == (Weighing.EXAMPLES, "")
    assert looked[0] > 0
    assert looked[1:] == [0] * 5
    assert all(each.training for each in asked.modules())
    assert "forward" not in vars(asked.drop)
