"""Fused norms and activations, chunked linear layers and dropout together, in whole models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from daf_bench.harness.ablation_loop import LEVERS, LeveredLoop
from torch import Tensor, nn

from daf.core.policy import Method
from daf.operators.chunked import weight_gradient


class Gated(nn.Module):
    """A feed-forward block with a SiLU gate, as in today's decoders."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate, self.up = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def model(norm_first: bool) -> nn.Module:
    torch.manual_seed(0)
    options: dict[str, Any] = {"activation": "gelu", "batch_first": True, "norm_first": norm_first}
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, **options)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(nn.Linear(8, 32), encoder, Gated(32), nn.LayerNorm(32), nn.Linear(32, 4))


def train(norm_first: bool, levers: tuple[str, ...], bits: int | str) -> Any:
    """(losses of three steps, weights, the loop)."""
    trained = model(norm_first)
    loop = LeveredLoop(trained, torch.optim.SGD(trained.parameters(), 0.1), levers, bits, seed=0)
    torch.manual_seed(1)
    batch = (torch.randn(8, 24, 8), torch.randint(0, 4, (8,)))
    losses = [loop.step(batch, lambda m, b: F.cross_entropy(m(b[0]).mean(1), b[1])) for _ in "123"]
    return losses, trained.state_dict(), loop


@pytest.mark.parametrize("norm_first", [True, False])
def test_uncoded_training_is_plain_s(norm_first: bool) -> None:
    """But for the order of additions; dropout draws the same random numbers."""
    losses, weights, _ = train(norm_first, (), "plain")
    found, ours, loop = train(norm_first, ("codes", "fused", "chunked", "release"), "exact")
    assert found == pytest.approx(losses, rel=1e-5)
    for name, value in weights.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-3, atol=1e-5, msg=name)
    patterns = [report.pattern for report in loop.capture.fusions()]
    assert patterns.count("layer_norm") == 5
    assert patterns.count("rms_norm") == 1
    assert len(patterns) == 9  # the three activations have nothing coded to share


@pytest.mark.parametrize("norm_first", [True, False])
def test_coded_training_stays_close_and_codes_are_shared(norm_first, monkeypatch) -> None:
    monkeypatch.setattr(weight_gradient, "CHUNK_BYTES", 1 << 13)
    losses, _, _ = train(norm_first, (), "plain")
    found, _, loop = train(norm_first, LEVERS, 4)
    assert found == pytest.approx(losses, rel=0.02)
    assert all(report.pattern for report in loop.capture.fusions())
    sites = {str(r.site): r for r in loop.capture.sites()}
    derived = [f"1.layers.{i}.linear2:linear#0[0]" for i in (0, 1)]  # behind GELU and dropout
    derived += [f"1.layers.{i}.linear1:linear#0[0]" for i in (0, 1)]  # behind a norm
    derived += ["2.gate:linear#0[0]", "2.up:linear#0[0]", "4:linear#0[0]"]
    for name in derived:
        assert sites[name].treatment.method is Method.REDERIVE, name
        assert sites[name].held_bytes == 0
    _, _, apart = train(norm_first, ("codes",), 4)
    assert loop.saved_bytes_plain == apart.saved_bytes_plain
    assert loop.saved_bytes_peak < 0.93 * apart.saved_bytes_peak
