"""Tables of derivative codes are found once for all widths."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from daf.capture.compress import compress
from daf.core.policy import Need, coded_policy
from daf.saved_tensors import activation_codes


def test_tables_take_little_memory_as_they_may_be_made_in_mid_training() -> None:
    """16 MB of arrays, where a budget had no room for them, refused a job that was planned."""
    activation_codes._code.cache_clear()
    for name, parameters in (("GeluBackward0", ("none",)), ("SiluBackward0", ())):
        tracemalloc.start()
        try:
            assert activation_codes._code(name, parameters, 4) is not None
            assert tracemalloc.get_traced_memory()[1] < 7 * 2**20
        finally:
            tracemalloc.stop()


def test_no_width_is_looked_for_when_a_later_plan_asks_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    activation_codes._find_planned.cache_clear()
    activation_codes._code.cache_clear()
    looked_for: list[int] = []
    find = activation_codes.derivative_lines

    def noted(places: Any, steps: Any) -> Any:
        looked_for.append(int(np.log2(np.round(steps.max()) + 1)))
        return find(places, steps)

    monkeypatch.setattr(activation_codes, "derivative_lines", noted)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU())
    for bits in (1, 3, 4):
        with compress(model, bits):
            loss = model(torch.randn(64, 64)).square().mean()
        loss.backward()
        assert looked_for == list(activation_codes.PLANNED_BITS)
    assert {coded_policy(bits).by_need[Need.SMOOTH].bits for bits in range(1, 9)} == set(looked_for)


@pytest.mark.parametrize("activation", [torch.tanh, torch.sigmoid])
def test_where_nearly_all_inputs_are_far_out_codes_stay_unbiased(activation: Any) -> None:
    """Each end of the range had the mean slope near it, and not that of saturated values."""
    bits, draws, far = 4, 32, 3000.0
    torch.manual_seed(0)
    layer = nn.Linear(64, 64)

    class Saturated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return activation(far * self.layer(x))

    model, x, weights = Saturated(), torch.randn(256, 64), torch.randn(256, 64)

    def gradient() -> torch.Tensor:
        model.zero_grad()
        (model(x) * weights).sum().backward()
        assert layer.weight.grad is not None
        return layer.weight.grad.clone()

    exact, found = gradient(), []
    compressed = compress(model, bits)
    for _ in range(draws):
        with compressed:
            found.append(gradient())
    errors = torch.stack(found) - exact
    energy = exact.square().sum()
    noise = errors.square().sum() / draws / energy
    bias = (errors.mean(0).square() - errors.var(0) / draws).sum() / energy
    assert 0.0 < noise < 0.05  # of all inputs, few are where the slope is not 0
    assert abs(bias) < 2e-3
