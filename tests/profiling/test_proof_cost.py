"""A proof takes few passes, and what it has run is not run again to be timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf import Session
from daf.memory import process_memory
from daf.profiling.split_proof import SplitProof
from daf.profiling.step_times import StepTimer
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
def test_two_examples_of_one_label_show_in_one_trial_how_parts_are_weighed(
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
    assert sizes == [1, 1, 2]
    assert sorted(proof.pass_ms) == [1, 2]
    assert min(proof.pass_ms.values()) > 0.0


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


class ScriptedTimer(StepTimer):
    """Takes the times that it is given."""

    def __init__(self, times_ms: list[float], proven_ms: dict[int, float]) -> None:
        nothing: Any = None
        super().__init__(nothing, nothing, nothing, lambda: None, proven_ms)
        self.left_ms = times_ms

    def _once(self, *_: Any) -> float:
        return self.left_ms.pop(0)


def test_a_step_that_a_proof_ran_is_timed_once() -> None:
    nothing: Any = None
    timer = ScriptedTimer([11.0, 99.0], {2: 10.0})
    assert timer.plainly(nothing, nothing, 2) == 11.0
    assert (timer.left_ms, timer.spared_ms) == ([99.0], 10.0)


@pytest.mark.parametrize("proven_ms", [{2: 10.0}, {1: 50.0}, {}])
def test_a_step_that_was_disturbed_or_not_proven_is_timed_twice(
    proven_ms: dict[int, float],
) -> None:
    nothing: Any = None
    timer = ScriptedTimer([31.0, 12.0], proven_ms)
    assert timer.plainly(nothing, nothing, 2) == 12.0
    assert (timer.left_ms, timer.spared_ms) == ([], 0.0)
