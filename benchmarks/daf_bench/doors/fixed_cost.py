"""What a door adds to each step of a network so small that nothing else counts (ms)."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import daf
from daf.memory import process_memory
from daf_bench.doors.loops import DOORS

WIDTH, EXAMPLES = 32, 16
ROOM_BYTES = 500_000_000
WARM_UP_STEPS = 30
Batch = tuple[Tensor, Tensor]


def fixed_costs(steps: int, seed: int = 0) -> dict[str, float]:
    """Return by door the median of its step less plain's, in turn, ``steps`` pairs of each."""
    makers = {"step": _by_step, "backward": _by_backward, "compress": _by_compress}
    return {name: _beside_plain(makers[name], steps, seed) for name in DOORS}


def _beside_plain(make: Callable[[], Callable[[Batch], None]], steps: int, seed: int) -> float:
    torch.manual_seed(seed)
    batch = torch.randn(EXAMPLES, WIDTH), torch.randint(0, 4, (EXAMPLES,))
    ours, plain = make(), _plainly()
    differences = []
    for index in range(WARM_UP_STEPS + steps):
        own_ms, plain_ms = _ms(ours, batch), _ms(plain, batch)
        if index >= WARM_UP_STEPS:
            differences.append(own_ms - plain_ms)
    return median(differences)


def _ms(step: Callable[[Batch], None], batch: Batch) -> float:
    start_s = time.perf_counter()
    step(batch)
    return 1000 * (time.perf_counter() - start_s)


def _network() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def _budget() -> int:
    return process_memory.resident_bytes() + ROOM_BYTES


def _plainly() -> Callable[[Batch], None]:
    model, optimizer = _network()

    def step(batch: Batch) -> None:
        optimizer.zero_grad()
        _loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def _by_step() -> Callable[[Batch], None]:
    model, optimizer = _network()
    session = daf.Session(model, optimizer, _budget(), tolerance=0)

    def step(batch: Batch) -> None:
        session.step(batch, _loss)

    return step


def _by_backward() -> Callable[[Batch], None]:
    model, optimizer = _network()
    session = daf.Session(model, optimizer, _budget(), tolerance=0)

    def step(batch: Batch) -> None:
        optimizer.zero_grad()
        session.backward(batch, _loss)
        optimizer.step()

    return step


def _by_compress() -> Callable[[Batch], None]:
    model, optimizer = _network()
    door = daf.compress(model, budget=_budget(), tolerance=0)

    def step(batch: Batch) -> None:
        optimizer.zero_grad()
        with door:
            loss = _loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step
