"""Training the same model plainly and with gradients released, to compare bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import daf

Batch = tuple[Tensor, Tensor]
OptimizerMaker = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, OptimizerMaker] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "sgd momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
    "sgd nesterov": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "sgd foreach": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=True),
    "sgd fused": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.1),
    "adam amsgrad": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "adam foreach": lambda p: torch.optim.Adam(p, 0.01, foreach=True),
    "adam fused": lambda p: torch.optim.Adam(p, 0.01, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01),
    "adamw maximize": lambda p: torch.optim.AdamW(p, 0.01, maximize=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.01, lr_decay=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p, 0.5),
    "adamax": lambda p: torch.optim.Adamax(p, 0.01),
    "nadam": lambda p: torch.optim.NAdam(p, 0.01),
    "radam": lambda p: torch.optim.RAdam(p, 0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p, 0.01),
    "asgd": lambda p: torch.optim.ASGD(p, 0.01, t0=1),
    "adafactor": lambda p: torch.optim.Adafactor(p, 0.01),
}


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def batches(count: int = 4, width: int = 6) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(5)
    for _ in range(count):
        yield (
            torch.randn(8, width, generator=generator),
            torch.randint(3, (8,), generator=generator),
        )


def two_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3))


def trained_plainly(model: nn.Module, make: OptimizerMaker, data: list[Any]) -> tuple[Any, Any]:
    model = deepcopy(model)
    optimizer = make(list(model.parameters()))
    for batch in data:
        optimizer.zero_grad(set_to_none=True)
        loss_of(model, batch).backward()
        optimizer.step()
    return model.state_dict(), optimizer.state_dict()


def trained_releasing(
    model: nn.Module, make: OptimizerMaker, data: list[Any], **options: Any
) -> tuple[Any, Any, daf.Session, daf.StepReport]:
    model = deepcopy(model)
    optimizer = make(list(model.parameters()))
    settings: dict[str, Any] = {"budget": None, "release_gradients": True} | options
    with daf.Session(model, optimizer, **settings) as session:
        for batch in data:
            report = session.step(batch, loss_of)
    return model.state_dict(), optimizer.state_dict(), session, report


def assert_same(found: Any, expected: Any) -> None:
    """Bit for bit, in any nest."""
    assert type(found) is type(expected)
    if isinstance(expected, Tensor):
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected


def assert_released_exactly(
    model: nn.Module, released: int, make: OptimizerMaker = OPTIMIZERS["sgd momentum"]
) -> None:
    """``released`` parameters are stepped inside backward, and the result is plain's."""
    data = list(batches())
    parameters, state, session, report = trained_releasing(model, make, data)
    assert_same((parameters, state), trained_plainly(model, make, data))
    assert report.released_gradients == released
    with_gradient = sum(p.requires_grad for p in session.model.parameters())
    assert session._gradient.release.count.left_to_the_end <= with_gradient - released
