"""Replay from coded inputs: unbiased where linear, and one code for all who hold the same."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from daf.capture.capture import Capture
from daf.core.code_format import header_bytes, plane_bytes
from daf.core.policy import Method, Need, Policy, Treatment, plain_policy
from daf.pool.store import PlainStore

WIDTH, ROWS, BITS = 128, 32, 2
SIZE_BYTES = ROWS * WIDTH * 4
CODE_BYTES = header_bytes(ROWS * WIDTH) + plane_bytes(ROWS * WIDTH, BITS)
ROTATED = Treatment(Method.ROTATED, BITS)
CODED = Policy("coded", {Need.INPUT: ROTATED, Need.LINEAR: ROTATED})


def gradient(model: nn.Module, weights: Tensor, policy: Policy, seed: int) -> Tensor:
    model.zero_grad()
    x = torch.ones(ROWS, WIDTH).cumsum(0) / ROWS
    with Capture(model, PlainStore()).step(policy, seed, 0):
        loss = (model(x) * weights).sum()
    loss.backward()
    return model[2].weight.grad


def test_averaging_over_seeds_approaches_the_exact_gradient() -> None:
    """A linear module's gradient is linear in its input, so n seeds divide the error by n."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=False))
    weights = torch.randn(ROWS, WIDTH)
    exact = gradient(model, weights, plain_policy(), 0)
    policy = replace(CODED, replayed=frozenset({"2"}))
    found = [gradient(model, weights, policy, seed) for seed in range(48)]
    energy = exact.square().sum()
    stacked = torch.stack(found)
    single = ((stacked - exact).square().sum() / len(found) / energy).item()
    averaged = ((stacked.mean(0) - exact).square().sum() / energy).item()
    assert single > 0.01, "the input is not coded"
    assert averaged * len(found) == pytest.approx(single, rel=0.15)


class Branches(nn.Module):
    """One tensor read by a linear layer and by two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.direct = nn.Linear(WIDTH, WIDTH)
        self.left = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.right = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.direct(x) + self.left(x) + self.right(x)


@pytest.mark.parametrize("paths", [["left", "right"], ["direct", "left", "right"]])
def test_calls_and_sites_share_one_code_of_the_same_tensor(paths: list[str]) -> None:
    held, treatments = after_forward(paths)
    assert held == CODE_BYTES
    assert treatments == dict.fromkeys(paths, Method.ROTATED)


def after_forward(paths: Iterable[str]) -> tuple[int, dict[str, Method]]:
    model, x = Branches(), torch.randn(ROWS, WIDTH)
    capture = Capture(model, PlainStore())
    with capture.step(replace(CODED, replayed=frozenset(paths)), 0, 0, batch=x):
        loss = model(x).sum()
    inputs = [report for report in capture.sites() if report.site.operator == "input"]
    held = capture.stats.held_bytes
    loss.backward()
    assert capture.stats.held_bytes == 0
    return held, {report.site.module: report.treatment.method for report in inputs}


class Deep(nn.Module):
    """Saves its input and three results."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@pytest.mark.parametrize(
    ("paths", "held", "peak"),
    [
        ([], 13, 13),  # every input and result
        (["1"], 1, 13),  # the outer input; replayed, everything
        (["1.0", "1.1", "1.2", "1.3"], 4, 7),  # four inputs; with them the last block's results
        (["1", "1.0", "1.1", "1.2", "1.3"], 1, 7),  # one input; the same once it is replayed
    ],
)
def test_high_water_of_nested_calls(paths: list[str], held: int, peak: int) -> None:
    """An inner call holds its input only while the outer one is rebuilt (tensors of one size)."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(*[Deep() for _ in range(4)]))
    x = torch.randn(ROWS, WIDTH)
    capture = Capture(model, PlainStore())
    with capture.step(replace(plain_policy(), replayed=frozenset(paths)), 0, 0, batch=x):
        loss = model(x).sum()
    assert capture.stats.held_bytes == held * SIZE_BYTES
    loss.backward()
    assert capture.stats.held_peak_bytes == peak * SIZE_BYTES
    assert capture.stats.plain_peak_bytes == 13 * SIZE_BYTES
    assert capture.stats.held_bytes == 0
