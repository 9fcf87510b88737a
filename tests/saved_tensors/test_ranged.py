"""Whole steps under codes of a tensor's own range, or each channel's: what is held, what comes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf.capture.compress import compress
from daf.codecs import ranges
from daf.codecs.ranged import WHOLE, Cut
from daf.core.code_format import plane_bytes
from daf.core.policy import Method, Need, Policy, Treatment, coded_policy

VALUES = (Need.LINEAR, Need.NORM, Need.PRODUCT)


def ranged(bits: int, *, by_channel: bool) -> Policy:
    code = Treatment(Method.RANGED, bits, by_channel=by_channel)
    by_need = dict(coded_policy(bits).by_need) | dict.fromkeys(VALUES, code)
    return replace(coded_policy(bits), name="ranged", by_need=MappingProxyType(by_need))


def gradients(model: nn.Module, loss: Callable[[], Tensor], policy: Policy, seed: int = 0):
    model.zero_grad()
    with compress(model, policy=policy, seed=seed) as coded:
        result = loss()
    result.backward()
    return torch.cat([each.grad.flatten() for each in model.parameters()]), coded


@pytest.fixture
def cuts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Cut]]:
    """What ranges are asked for: elements, and which share a range."""
    asked: list[tuple[int, Cut]] = []
    find = ranges.Ranges.channel_ends

    def noted(made: ranges.Ranges, tensor: Tensor, cut: Cut) -> ranges.Ends:
        asked.append((tensor.numel(), cut))
        return find(made, tensor, cut)

    monkeypatch.setattr(ranges.Ranges, "channel_ends", noted)
    return asked


@pytest.mark.parametrize("channels_last", [False, True])
def test_images_have_a_range_for_each_channel_and_rows_for_each_feature(
    cuts: list[tuple[int, Cut]], channels_last: bool
) -> None:
    layout = torch.channels_last if channels_last else torch.contiguous_format
    tail = (nn.Conv2d(6, 8, 3), nn.Flatten(), nn.Linear(8 * 14 * 14, 4))
    model = nn.Sequential(nn.Conv2d(3, 6, 1), *tail).to(memory_format=layout)
    images = torch.randn(12, 3, 16, 16).to(memory_format=layout)

    def loss() -> Tensor:
        return model(images).square().mean()

    _, coded = gradients(model, loss, ranged(4, by_channel=True))
    inner = 1 if channels_last else 256
    assert cuts == [(12 * 1536, Cut(6, inner)), (12 * 1568, Cut(1568, 1))]
    held = {site.site.module: site.held_bytes for site in coded.sites()}
    assert held["1"] == plane_bytes(12 * 1536, 4) + 6 * 8
    cuts.clear()
    gradients(model, loss, ranged(4, by_channel=False))
    assert [cut for _, cut in cuts] == [WHOLE, WHOLE]


def test_one_tensor_that_is_saved_twice_is_coded_once(cuts: list[tuple[int, Cut]]) -> None:
    first, second = nn.Linear(64, 32, bias=False), nn.Linear(64, 32, bias=False)
    model, x = nn.ModuleList([first, second]), torch.randn(256, 64)

    def loss() -> Tensor:
        return (first(x) + 2 * second(x)).sum()

    found, coded = gradients(model, loss, ranged(2, by_channel=True))
    assert cuts == [(x.numel(), Cut(64, 1))]
    # Four bytes of a step and four of a least value for every channel, beside the planes.
    assert [site.held_bytes for site in coded.sites()] == [plane_bytes(x.numel(), 2) + 64 * 8, 0]
    one, other = found.view(2, -1)
    assert torch.equal(2 * one, other)


@pytest.mark.parametrize("by_channel", [False, True])
def test_gradients_come_closer_with_bits_and_are_right_on_average(by_channel: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    images = torch.randn(8, 4, 16, 16) * torch.logspace(-2, 1, 4).view(1, 4, 1, 1)
    target = torch.randn(8, 8, 12, 12)

    def loss() -> Tensor:
        return F.mse_loss(model(images), target)

    exact, _ = gradients(model, loss, replace(coded_policy(4), by_need=MappingProxyType({})))

    def errors(bits: int, seeds: int) -> tuple[float, float]:
        policy = ranged(bits, by_channel=by_channel)
        drawn = torch.stack([gradients(model, loss, policy, seed)[0] for seed in range(seeds)])
        one = (drawn - exact).square().sum(1).mean()
        return float(one), float((drawn.mean(0) - exact).square().sum())

    coarse, of_mean = errors(2, 64)
    fine, _ = errors(5, 8)
    assert of_mean * 64 == pytest.approx(coarse, rel=0.35)
    # A step is 31 / 3 as wide, and the error follows its square.
    assert coarse / fine == pytest.approx((31 / 3) ** 2, rel=0.5)
