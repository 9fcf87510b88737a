"""A model copied or pickled in mid-step, by its forward or a loss: the copy knows nothing of it."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import daf
from daf.capture.capture import Capture
from daf.memory import process_memory


class Mean(nn.Module):
    """Copies itself in its forward pass, as self-distillation does, and pickles itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.GELU())
        self.head = nn.Linear(256, 4)

    def forward(self, x: Tensor) -> Tensor:
        if len(COPIES) < 40:
            COPIES.extend((copy.deepcopy(self), pickle.loads(pickle.dumps(self))))
        return self.head(self.layers(x))  # type: ignore[no-any-return]


COPIES: list[nn.Module] = []


@pytest.fixture(autouse=True)
def _none_yet() -> None:
    COPIES.clear()


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(128, 64), torch.randint(0, 4, (128,))


def loss_fn(model: nn.Module, rows: Any) -> Tensor:
    COPIES.extend((copy.deepcopy(model), pickle.loads(pickle.dumps(model))))
    return F.cross_entropy(model(rows[0]), rows[1])


def hooks_of(model: nn.Module) -> int:
    """That do anything: a copy's are called by a value that none has."""
    found = 0
    for module in model.modules():
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            found += hook(None, None, None) is not None
    return found


def check(model: nn.Module) -> None:
    copies = [*COPIES, copy.deepcopy(model)]
    assert len(copies) > 4
    rows, plain = batch(), list(model.eval().state_dict().values())
    for each in copies:
        assert "forward" not in vars(each)
        assert not hooks_of(each)
        each.load_state_dict(dict(zip(each.state_dict(), plain, strict=True)))
        assert torch.equal(each.eval()(rows[0]), model(rows[0]))


@pytest.mark.parametrize("bits", ["exact", 2, None])
def test_in_a_session_s_step(bits: Any) -> None:
    torch.manual_seed(0)
    model = Mean()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    options: dict[str, Any] = {"bits": bits} if bits else {"tolerance": 1.0}
    budget = None if bits else process_memory.resident_bytes() + 300_000_000
    with daf.Session(model, optimizer, budget, **options) as session:
        for _ in range(2):
            session.noise.tracker.schedule.trained_ms = 1e9  # sensitivities are measured too
            session.step(batch(), loss_fn)
    check(model)


@pytest.mark.parametrize("options", [{"bits": 2, "fused": True}, {"bits": "exact"}])
def test_in_compress(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Mean()
    with daf.compress(model, **options):
        loss = loss_fn(model, batch())
    loss.backward()
    check(model)


def test_a_copy_keeps_nothing_of_the_step_alive() -> None:
    model = Mean()
    capture = Capture(model)
    with capture.step(daf.core.policy.policy_for(2), 0, 0):
        loss_fn(model, batch()).backward()
    gone = weakref.ref(capture)
    del capture
    gc.collect()
    assert gone() is None
    check(model)


def test_a_model_that_holds_its_session_is_copied_without() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4))
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    found: list[Any] = []

    def loss_fn(model: nn.Module, rows: Any) -> Tensor:
        both = (model, optimizer, schedule)
        found.extend((copy.deepcopy(both), pickle.loads(pickle.dumps(both))))
        return F.cross_entropy(model(rows[0]), rows[1])

    budget = process_memory.resident_bytes() + 300_000_000
    with daf.Session(model, optimizer, budget) as session, daf.compress(model, bits=2) as codes:
        model.session, model.codes = session, codes
        session.step(batch(), loss_fn)
        loss_fn(model, batch())
    assert len(found) >= 4
    for twin, steps, later in found:
        assert twin.session is None
        assert twin.codes is None
        F.cross_entropy(twin(batch()[0]), batch()[1]).backward()
        before = twin[0].weight.clone()
        ours = torch.optim.Adam(twin.parameters())
        ours.load_state_dict(steps.state_dict())
        ours.step()
        assert not torch.equal(twin[0].weight, before)
        assert later.last_epoch == schedule.last_epoch
