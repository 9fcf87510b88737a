"""What a session adds to every step: few walks over the model, few readings of memory."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf.core.policy import plain_policy
from daf.memory import process_memory
from daf.memory.recycling_allocator import unsupported_reason
from daf.session.session import Session
from daf.torch_compat import modules

Batch = tuple[Tensor, Tensor]

WALKS, READINGS = 6, 3
STEPS = 5


class Leaf(nn.Linear):
    """Only walks over the model come by here."""


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def settled(loss: Any = loss_of) -> tuple[Session, Batch]:
    torch.manual_seed(0)
    model = nn.Sequential(Leaf(8, 8), nn.ReLU(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session = Session(model, optimizer, process_memory.resident_bytes() + 2**29, tolerance=0)
    batch = torch.randn(16, 8), torch.randint(0, 4, (16,))
    plan = session.prepare(batch, loss)
    session.plan = replace(plan, policy=plain_policy(), micro_batch=16)
    for _ in range(2):  # what a pass saves is known from the one before
        session.step(batch, loss)
    return session, batch


def test_a_step_walks_over_the_model_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    session, batch = settled()
    walks: Counter[type] = Counter()
    is_usual = modules._is_usual

    def counted(kind: type) -> bool:
        walks[kind] += 1
        return bool(is_usual(kind))

    monkeypatch.setattr(modules, "_is_usual", counted)
    with session:
        for _ in range(STEPS):
            session.step(batch, loss_of)
    assert walks[Leaf] <= WALKS * STEPS


@pytest.mark.skipif(bool(unsupported_reason()), reason="no limit follows from the process's size")
def test_a_step_reads_the_process_s_memory_at_its_begin_its_bound_and_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session, batch = settled()
    fields: list[tuple[str, ...]] = []
    read, thread = process_memory._own_bytes, threading.get_ident()

    def noted(*names: str) -> list[int]:
        if threading.get_ident() == thread:  # another one watches limits
            fields.append(names)
        return read(*names)

    monkeypatch.setattr(process_memory, "_own_bytes", noted)
    with session:
        report = session.step(batch, loss_of)
    assert len(fields) == READINGS
    assert all("VmSwap" in names for names in fields)
    assert report.peak_bytes >= report.swapped_bytes


def test_what_a_loss_function_puts_aside_in_a_step_is_freed_as_without_a_session() -> None:
    kept = torch.zeros(4)
    gone: list[bool] = []

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        nonlocal kept
        before, kept = weakref.ref(kept), torch.zeros(4)
        gone.append(before() is None)
        return loss_of(model, batch)

    session, batch = settled(loss)
    gone.clear()
    with session:
        for _ in range(STEPS):
            session.step(batch, loss)
    assert gone == [True] * STEPS


def test_gradients_that_an_update_changes_are_still_the_session_s() -> None:
    class Halving(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            found = super().step(closure)
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.grad.mul_(0.5)  # as decay that is added to it
            return found

    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    batch = torch.randn(16, 8), torch.randint(0, 4, (16,))
    with Session(model, Halving(model.parameters(), lr=0.0), None) as session:
        session.step(batch, loss_of)
        first = model.weight.grad.clone()
        session.step(batch, loss_of)  # finds none of the user's
        assert torch.equal(model.weight.grad, first)
        session.backward(batch, loss_of)
        session.update()
        session.step(batch, loss_of)
        assert torch.equal(model.weight.grad, first)
