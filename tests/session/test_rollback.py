"""A diverging run goes back to its last good state with wider codes, once."""

from __future__ import annotations

import json
import logging
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf.core.errors import DivergedError, NonFiniteLossError
from daf.core.plan import Plan
from daf.core.policy import Method, Need
from daf.memory import process_memory
from daf.session.rollback import DivergenceWatch
from daf.session.session import Session

Batch = tuple[Tensor, Tensor]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.Flatten(),
        nn.Linear(8 * 256, 10),
    )


def images(seed: int = 1) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(8, 3, 16, 16, generator=generator),
        torch.randint(0, 10, (8,), generator=generator),
    )


class Diverging:
    """A loss that goes wrong from one step on, for as long as codes are as narrow as now."""

    def __init__(self, session: Session, at: int, factor: float) -> None:
        self.session, self.at, self.factor = session, at, factor
        self.narrow = bits_of(session)

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        astray = (
            self.session._runner.counters.step_index >= self.at
            and bits_of(self.session) <= self.narrow
        )
        return loss * self.factor if astray else loss


def bits_of(session: Session) -> int:
    policy = session.plan.policy if session.plan else session._plan_controller.fixed_policy
    treatment = policy.by_need[Need.LINEAR]
    assert treatment.method is Method.ROTATED
    return treatment.bits


def session_for(**options: Any) -> Session:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session = Session(model, optimizer, None, sensitivity=False, **options)
    session._runner.rollback.watch = DivergenceWatch(window=4, patience=2, save_every=3)
    return session


def everything(session: Session) -> dict[str, Any]:
    """All that a later step depends on, copied."""
    state = session.optimizer.state_dict()["state"]
    return {
        "model": {name: each.clone() for name, each in session.model.state_dict().items()},
        "optimizer": {
            (index, name): value.clone()
            for index, own in state.items()
            for name, value in own.items()
        },
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state()[1].copy(),
        "python": random.getstate(),
    }


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for part in ("model", "optimizer"):
        assert found[part].keys() == expected[part].keys()
        for name, value in expected[part].items():
            assert torch.equal(found[part][name], value), name
    assert torch.equal(found["torch"], expected["torch"])
    assert np.array_equal(found["numpy"], expected["numpy"])
    assert found["python"] == expected["python"]


@pytest.mark.parametrize("factor", [math.nan, math.inf, 50.0])
@pytest.mark.parametrize("file", [True, Path("good.safetensors")])
def test_the_state_after_going_back_is_the_last_good_one_bit_for_bit(
    factor: float, file: Path | bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = tmp_path / file if isinstance(file, Path) else file
    with session_for(bits=2, rollback=kept) as session:
        loss_fn = Diverging(session, at=9, factor=factor)
        after: dict[int, dict[str, Any]] = {}
        report = None
        with caplog.at_level(logging.WARNING, "daf"):
            for index in range(20):
                report = session.step(images(index), loss_fn)
                if report.rolled_back_to is not None:
                    break
                after[session._runner.counters.step_index] = everything(session)
        assert report is not None
        assert report.rolled_back_to is not None
        assert report.rolled_back_to <= 9
        assert session._runner.counters.step_index == report.rolled_back_to
        assert_same(everything(session), after[report.rolled_back_to])
        assert not any(each.grad is not None for each in session.model.parameters())
        assert bits_of(session) == 3
        assert "going back" in caplog.text
        losses = [session.step(images(index), loss_fn).loss for index in range(9, 14)]
        assert all(map(math.isfinite, losses))
        assert max(losses) < 10
    assert isinstance(file, Path) == (tmp_path / "good.safetensors").exists()


@pytest.mark.parametrize(
    ("factor", "error"), [(math.nan, NonFiniteLossError), (50.0, DivergedError)]
)
def test_the_second_time_it_is_an_error(factor: float, error: type[Exception]) -> None:
    with session_for(bits=2, rollback=True) as session:
        loss_fn = Diverging(session, at=9, factor=factor)
        while session.step(images(), loss_fn).rolled_back_to is None:
            pass
        for _ in range(6):
            assert session.step(images(), loss_fn).rolled_back_to is None
        loss_fn.narrow = 8  # from now on wider codes do not help either
        if not math.isnan(factor):
            session.step(images(), loss_fn)  # the first of two
        before = [each.clone() for each in session.model.parameters()]
        with pytest.raises(error):
            session.step(images(), loss_fn)
        for value, old in zip(session.model.parameters(), before, strict=True):
            assert torch.equal(value, old)


def test_without_wider_codes_there_is_no_going_back() -> None:
    with session_for(bits=8, rollback=True) as session:
        session.step(images(), lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]))
        broken = {"now": False}

        def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
            loss = F.cross_entropy(model(batch[0]), batch[1])
            return loss * math.nan if broken["now"] else loss

        session.step(images(), loss_fn)
        broken["now"] = True
        # Derivative codes could be wider, but there are none here; min-max ones of 8 bits cannot.
        session.plan = _only_linear(session)
        with pytest.raises(DivergedError, match="cannot be wider"):
            session.step(images(), loss_fn)


def _only_linear(session: Session) -> Plan:
    plan = session.plan
    assert plan is not None
    by_need = {Need.LINEAR: plan.policy.by_need[Need.LINEAR]}
    return replace(plan, policy=replace(plan.policy, by_need=by_need))


@pytest.mark.parametrize("bits", ["plain", "exact"])
def test_what_loses_nothing_is_not_watched(bits: str) -> None:
    with session_for(bits=bits, rollback=True) as session:
        for _ in range(3):
            session.step(images(), lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]))
        assert session._runner.rollback.watch.good_step is None
        with pytest.raises(NonFiniteLossError):
            session.step(images(), lambda model, batch: model(batch[0]).sum() * math.nan)


def test_without_the_option_nothing_is_kept_and_nothing_caught() -> None:
    with session_for(bits=2) as session:
        loss_fn = Diverging(session, at=2, factor=math.nan)
        session.step(images(), loss_fn)
        session.step(images(), loss_fn)
        assert session._runner.rollback.watch.good_step is None
        with pytest.raises(NonFiniteLossError):
            session.step(images(), loss_fn)


def test_a_resumed_session_can_go_back_to_a_state_from_before(tmp_path: Path) -> None:
    file = tmp_path / "good.safetensors"
    with session_for(bits=2, rollback=file) as first:
        for index in range(6):
            first.step(images(index), Diverging(first, at=99, factor=1.0))
        state = json.loads(json.dumps(first.state_dict()))
        good = first._runner.rollback.watch.good_step
        assert good is not None
    with session_for(bits=2, rollback=file) as second:
        second.load_state_dict(state)
        report = second.step(images(), Diverging(second, at=0, factor=math.nan))
        assert report.rolled_back_to == good + 1
    with session_for(bits=2, rollback=True) as third:  # whose temporary file was another
        third.load_state_dict(state)
        with pytest.raises(NonFiniteLossError):
            third.step(images(), Diverging(third, at=0, factor=math.nan))


def test_under_a_budget_the_plan_itself_becomes_wider() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    budget = process_memory.resident_bytes() + 100_000_000
    with Session(model, optimizer, budget, bits=1, rollback=True) as session:
        session._runner.rollback.watch = DivergenceWatch(window=4, patience=2, save_every=3)
        session.prepare(images(), lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]))
        loss_fn = Diverging(session, at=2, factor=math.nan)
        reports = [session.step(images(), loss_fn) for _ in range(4)]
        assert [each.rolled_back_to for each in reports] == [None, None, 1, None]
        assert session.plan is not None
        assert session.plan.policy.name == "2-bit"
        assert session.plan.predicted_peak_bytes <= budget
        assert math.isfinite(reports[-1].loss)
