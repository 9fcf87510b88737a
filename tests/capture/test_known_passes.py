"""Passes that keep all are captured in one step of 64, and whenever something differs."""

from __future__ import annotations

from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from daf import Session
from daf.capture.capture import Capture
from daf.capture.known_passes import COUNTED_EVERY, KnownPasses
from daf.core.policy import exact_policy, plain_policy

PLAIN = plain_policy()
UNCOMPILED: Any = SimpleNamespace(attributes={})


def known_passes() -> KnownPasses:
    return KnownPasses(Capture(nn.Linear(2, 2)))


def test_one_pass_in_sixty_four_is_captured() -> None:
    passes = known_passes()
    found = [passes.begin(PLAIN, UNCOMPILED, index, "batch") for index in range(150)]
    assert [index for index, known in enumerate(found) if not known] == [0, 64, 128]
    assert COUNTED_EVERY == 64


def test_another_batch_is_captured() -> None:
    passes = known_passes()
    asked = ["batch", "batch", "other", "other", "batch", None, None, "batch", "batch"]
    found = [passes.begin(PLAIN, UNCOMPILED, index, what) for index, what in enumerate(asked)]
    assert found == [False, True, False, True, False, False, False, False, True]


def test_all_parts_of_a_step_are_captured_or_none() -> None:
    passes = known_passes()
    found = [passes.begin(PLAIN, UNCOMPILED, step, "batch") for step in range(66) for _ in range(3)]
    assert [index for index, known in enumerate(found) if not known] == [0, 1, 2, 192, 193, 194]


def test_passes_of_plans_that_do_anything_are_captured() -> None:
    passes = known_passes()
    compiled: Any = SimpleNamespace(attributes={"part": "forward"})
    assert not any(passes.begin(exact_policy(), UNCOMPILED, step, "batch") for step in range(3))
    assert not any(passes.begin(PLAIN, compiled, step, "batch") for step in range(3))
    assert not passes.begin(PLAIN, UNCOMPILED, 3, "batch")
    assert passes.begin(PLAIN, UNCOMPILED, 4, "batch")


def test_parts_that_keep_all_are_captured_in_a_plan_s_first_step_and_train_as_plainly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    captured: list[tuple[int, int]] = []
    step = Capture.step

    def watched(capture: Capture, *arguments: Any, **named: Any) -> Any:
        captured.append(arguments[2:4] if len(arguments) > 3 else (-1, 0))
        return step(capture, *arguments, **named)

    def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    plain = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)).double()
    model, batch = deepcopy(plain), torch.randn(8192, 64, dtype=torch.float64)
    roomy = torch.optim.SGD(model.parameters(), 0.1)
    with Session(model, roomy, "8GB", policy="accumulate", cache=False) as session:
        whole = session.prepare(batch, loss_of).predicted_peak_bytes
        least = session.least_feasible_bytes()
    assert least is not None
    optimizer, budget = torch.optim.SGD(model.parameters(), 0.1), (least + whole) // 2
    with Session(model, optimizer, budget, policy="accumulate", cache=False) as session:
        session.prepare(batch, loss_of)
        monkeypatch.setattr(Capture, "step", watched)
        reports = [session.step(batch, loss_of) for _ in range(12)]
    sizes = [each.micro_batch for each in reports]
    begun = [step for step in range(12) if step == 0 or sizes[step] != sizes[step - 1]]
    captured = [each for each in captured if each[0] >= 0]  # proofs that are renewed have others
    assert captured == [(step, part) for step in begun for part in range(-(-8192 // sizes[step]))]
    assert max(sizes) < 8192
    assert len(begun) < 6
    assert all(each.saved_bytes > 0 for each in reports)
    own = torch.optim.SGD(plain.parameters(), 0.1)
    for report in reports:
        loss = loss_of(plain, batch)
        loss.backward()
        own.step()
        own.zero_grad()
        assert report.loss == pytest.approx(loss.item(), rel=1e-12)
