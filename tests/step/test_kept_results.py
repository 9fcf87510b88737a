"""A step that is tried again begins with what the model kept of earlier calls, wherever it did."""

from __future__ import annotations

import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import daf
from daf.core.errors import FusionError
from daf.step.gradient import GradientStep

Batch = tuple[Tensor, Tensor]
Store = Callable[["Keeping", Tensor], object]
Read = Callable[["Keeping"], list[Tensor]]
STEPS = 4


def last(model: Keeping, result: Tensor) -> None:
    model.kept = [result]


# How it is kept: what there is at first, how a result is put there, and how all are read.
WAYS: dict[str, tuple[Callable[[], Any], Store, Read]] = {
    "attribute": (list, last, lambda m: list(m.kept)),
    "list": (list, lambda m, r: m.kept.append(r), lambda m: list(m.kept)),
    "list of lists": (list, lambda m, r: m.kept.append([r]), lambda m: [e[0] for e in m.kept]),
    "tuple": (tuple, lambda m, r: setattr(m, "kept", (*m.kept, r)), lambda m: list(m.kept)),
    "dict": (dict, lambda m, r: m.kept.update({len(m.kept): r}), lambda m: [*m.kept.values()]),
    "dict's entry": (dict, lambda m, r: m.kept.update(last=r), lambda m: [*m.kept.values()]),
    "ordered dict": (
        OrderedDict,
        lambda m, r: m.kept.update({str(len(m.kept)): r}),
        lambda m: [*m.kept.values()],
    ),
    "dict of lists": (
        lambda: defaultdict(list),
        lambda m, r: m.kept["all"].append(r),
        lambda m: list(m.kept["all"]),
    ),
    "deque": (lambda: deque(maxlen=2), lambda m, r: m.kept.append(r), lambda m: list(m.kept)),
    "object": (
        lambda: SimpleNamespace(last=None),
        lambda m, r: setattr(m.kept, "last", r),
        lambda m: [] if m.kept.last is None else [m.kept.last],
    ),
    "object's list": (
        lambda: SimpleNamespace(all=[]),
        lambda m, r: m.kept.all.append(r),
        lambda m: list(m.kept.all),
    ),
}


class Keeping(nn.Module):
    """Adds a part of what it kept to its result, and keeps that with its graph."""

    def __init__(self, way: str) -> None:
        super().__init__()
        make, self.put, self.read = WAYS[way]
        self.kept = make()
        self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, rows: Tensor) -> Tensor:
        result = self.head(torch.tanh(self.body(rows)))
        for each in self.read(self):
            result = result + 0.1 * each.detach().mean()
        self.put(self, result)
        return result


def classified(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def made(way: str) -> tuple[Keeping, torch.optim.Optimizer, list[Batch]]:
    torch.manual_seed(0)
    model = Keeping(way)
    batches = [(torch.randn(6, 8), torch.randint(0, 4, (6,))) for _ in range(STEPS)]
    return model, torch.optim.SGD(model.parameters(), lr=0.5), batches


@pytest.mark.parametrize("way", WAYS)
def test_a_retry_begins_with_what_the_first_attempt_found(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, optimizer, batches = made(way)
    for batch in batches:
        optimizer.zero_grad()
        classified(plain, batch).backward()
        optimizer.step()
    model, optimizer, batches = made(way)
    refused: dict[int, weakref.ref[Tensor]] = {}
    run = GradientStep.run

    def refusing(self: GradientStep, context: Any, *rest: Any, **options: Any) -> float:
        loss = run(self, context, *rest, **options)
        if context.index in refused:
            return loss
        refused[context.index] = weakref.ref(model.read(model)[-1])
        raise FusionError("refused, to be tried again")

    monkeypatch.setattr(GradientStep, "run", refusing)
    with daf.Session(model, optimizer, None) as session:
        # Each refusal looks as if an operator had fallen back.
        monkeypatch.setattr(
            session._runner.retries.capture, "fallen_back", lambda: [0] * len(refused)
        )
        for batch in batches:
            session.step(batch, classified)
    assert len(refused) == STEPS
    assert all(attempt() is None for attempt in refused.values()), "an attempt's graph is held"
    for one, other in zip(plain.read(plain), model.read(model), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)
