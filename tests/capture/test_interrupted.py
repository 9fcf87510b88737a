"""An interrupt or an error in the middle of a forward pass leaves nothing of its graph alive."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from daf_bench.faults.interrupts import InterruptedAt
from thoroughness import at_most
from torch import Tensor, nn

from daf.capture.capture import Capture
from daf.core.policy import Policy, exact_policy, policy_for, with_fused_operators

pytestmark = pytest.mark.usefixtures("code_everything")


def network() -> nn.Sequential:
    """Most of these save their own result, which holds the graph that the save is part of."""
    smooth = (nn.Tanh(), nn.Sigmoid(), nn.ReLU(), nn.GELU(), nn.Softmax(-1), nn.LayerNorm(64))
    return nn.Sequential(nn.Linear(16, 64), *smooth, nn.Dropout(0.5), nn.Linear(64, 4))


def watched_results(model: nn.Sequential) -> list[weakref.ref[Tensor]]:
    results: list[weakref.ref[Tensor]] = []

    def note(_module: nn.Module, _inputs: Any, result: Tensor) -> None:
        results.append(weakref.ref(result))

    for module in model:
        module.register_forward_hook(note)
    return results


def is_interrupted(capture: Capture, policy: Policy, line: int) -> bool:
    try:
        with InterruptedAt(line), capture.step(policy, seed=0, step_index=0):
            capture.model(torch.randn(8, 16, requires_grad=True))
    except KeyboardInterrupt:
        return True
    return False


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(exact_policy(), id="exact", marks=pytest.mark.thorough),
        pytest.param(policy_for(2), id="two-bits"),
        pytest.param(with_fused_operators(exact_policy()), id="fused"),
    ],
)
def test_an_interrupt_at_any_line_of_a_forward_pass_leaves_no_result_alive(policy: Policy) -> None:
    model = network()
    results, capture = watched_results(model), Capture(model)
    assert not is_interrupted(capture, policy, 10**9)
    line = 40
    while is_interrupted(capture, policy, line):
        gc.collect()
        assert [result for result in results if result() is not None] == [], line
        line += at_most(13, 29)
    assert line > 2000  # lines of one forward pass
