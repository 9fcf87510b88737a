"""Optimizers of other packages step within a budget as they do by themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import daf

pytestmark = pytest.mark.filterwarnings("ignore::Warning")
WIDTH, ROWS, STEPS = 2048, 1024, 5
PLAIN_BYTES = 5 * 4 * WIDTH * ROWS
WHOLE_BYTES, CUT_BYTES = 78_000_000, 40_000_000
Budget = Callable[[int], int]
Batch = tuple[Tensor, Tensor]


def net() -> nn.Sequential:
    """Saves 40 KB for each of its examples."""
    torch.manual_seed(0)
    smooth = (nn.GELU(), nn.Tanh(), nn.SiLU(), nn.Sigmoid())
    return nn.Sequential(nn.Linear(16, WIDTH), *smooth, nn.Linear(WIDTH, 4))


def batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randn(ROWS, 16, generator=generator) for _ in range(STEPS)]
    return [(x, x.argmax(1) % 4) for x in rows]


def classified(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


@pytest.fixture
def uncompiled() -> Iterator[None]:
    """Runs what torchao compiles as it stands: compiling takes seconds for each kind of state."""
    with torch.compiler.set_stance("force_eager"):
        yield


def distance(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return sum(float((a - b).square().sum()) for a, b in pairs) ** 0.5


def check(
    make: Callable[[Any], Any],
    budget: Budget,
    *,
    stores: str = "Tensor",
    whole_bytes: int = WHOLE_BYTES,
) -> None:
    """Train plainly, with a whole batch (bit for bit) and with one cut (but for reordered sums).

    ``make`` takes parameters. ``stores``: a type, or number format, that its state must have.
    """
    plain = net()
    optimizer = make(plain.parameters())
    if is_schedule_free := hasattr(optimizer, "train"):
        optimizer.train()
    for batch in batches():
        optimizer.zero_grad()
        classified(plain, batch).backward()
        optimizer.step()
    held = [each for state in optimizer.state.values() for each in state.values()]
    assert stores in {type(e).__name__ for e in held} | {str(getattr(e, "dtype", "")) for e in held}
    moved = distance(plain, net())
    for split, room_bytes, furthest in ((False, whole_bytes, 0.0), ("auto", CUT_BYTES, moved / 50)):
        model, bound = net(), budget(room_bytes)
        optimizer = make(model.parameters())
        if is_schedule_free:
            optimizer.train()
        with daf.Session(model, optimizer, bound, tolerance=0, split=split) as session:
            reports = [session.step(batch, classified) for batch in batches()]
        assert distance(model, plain) <= furthest < moved
        assert (reports[-1].micro_batch < ROWS) == (split == "auto")
        assert reports[-1].saved_bytes < PLAIN_BYTES
        assert session.peak_bytes <= bound


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("AdamW8bit", "OptimState8bit"),
        ("AdamW4bit", "OptimState4bit"),
        ("AdamWFp8", "OptimStateFp8"),
    ],
)
def test_torchao(name: str, state: str, budget: Budget, uncompiled: None) -> None:
    optim = pytest.importorskip("torchao.optim", reason="its optimizers")
    check(lambda parameters: getattr(optim, name)(parameters, lr=1e-3), budget, stores=state)


@pytest.mark.thorough
def test_torchao_compiled(budget: Budget) -> None:
    """The compiler's own memory is in the process too."""
    optim = pytest.importorskip("torchao.optim", reason="its optimizers")
    make = partial(optim.AdamW8bit, lr=1e-3)
    check(make, budget, stores="OptimState8bit", whole_bytes=WHOLE_BYTES + 20_000_000)


@pytest.mark.parametrize("name", ["AdamW8bit", "Lion8bit", "PagedAdamW8bit", "SGD8bit"])
def test_bitsandbytes(name: str, budget: Budget) -> None:
    optim = pytest.importorskip("bitsandbytes.optim", reason="its optimizers")
    options = {"momentum": 0.9} if name == "SGD8bit" else {}

    def make(parameters: Any) -> Any:
        return getattr(optim, name)(parameters, lr=1e-3, **options)

    check(make, budget, stores="torch.uint8")


@pytest.mark.parametrize("name", ["AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree"])
def test_schedule_free(name: str, budget: Budget) -> None:
    schedulefree = pytest.importorskip("schedulefree", reason="its optimizers")
    check(lambda parameters: getattr(schedulefree, name)(parameters, lr=1e-3), budget)
