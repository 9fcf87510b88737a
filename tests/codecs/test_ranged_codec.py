"""Codes of a tensor's own range or each channel's: ranges found, the error of theory, no bias."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from daf.codecs import ranges
from daf.codecs.codes import ElementsCode
from daf.codecs.ranged import WHOLE, Cut, Grid, grid_of
from daf.core.code_format import plane_bytes
from daf.core.errors import CodecError
from daf.kernels import Codec
from daf.kernels.normalisation import ElementCode
from daf.pool.store import PlainStore

BITS = range(1, 9)


def grid_for(tensor: Tensor, cut: Cut, bits: int) -> Grid:
    return grid_of(*ranges.ours().channel_ends(tensor, cut), bits, cut.inner)


def coded(tensor: Tensor, bits: int, key: int, grid: Grid) -> ElementsCode:
    steps = ElementCode(Codec.STEPS, grid.to_steps, key)
    code = ElementsCode.encode(PlainStore(), tensor, bits, steps)
    assert code is not None
    return code


def restored(tensor: Tensor, cut: Cut, bits: int, key: int = 7) -> Tensor:
    grid = grid_for(tensor, cut, bits)
    out = torch.full_like(tensor, math.nan)
    coded(tensor, bits, key, grid).decode(out, channels=grid.from_steps)
    return out


def images(*shape: int) -> Tensor:
    """Channels of very different scales and means."""
    random = torch.Generator().manual_seed(3)
    tensor = torch.randn(shape, generator=random)
    spread = torch.logspace(-3, 3, shape[1]).view(1, -1, 1, 1)
    return tensor * spread + 5 * spread * torch.randn(1, shape[1], 1, 1, generator=random)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("channels_last", [False, True])
def test_no_value_is_further_off_than_a_step_of_its_own_range(bits, channels_last) -> None:
    tensor = images(3, 5, 9, 7)
    if channels_last:
        tensor = tensor.to(memory_format=torch.channels_last)
    found = restored(tensor, Cut.along(tensor, 1), bits)
    assert found.stride() == tensor.stride()
    low, high = (end(tensor, dim=(0, 2, 3), keepdim=True) for end in (torch.amin, torch.amax))
    step = (high - low) / (2**bits - 1)
    assert ((found - tensor).abs() <= step * 1.001).all()
    places = (found - low) / step
    torch.testing.assert_close(places, places.round(), atol=1e-3, rtol=0)
    # One range for all would round most channels away.
    whole = restored(tensor, WHOLE, bits)
    small = tensor[:, :1]
    assert (whole[:, :1] - small).square().mean() > 10 * (found[:, :1] - small).square().mean()


@pytest.mark.parametrize("bits", BITS)
def test_there_are_no_headers(bits: int) -> None:
    tensor = images(4, 6, 16, 16)
    code = coded(tensor, bits, 0, grid_for(tensor, WHOLE, bits))
    assert code.nbytes == plane_bytes(tensor.numel(), bits)


@pytest.mark.parametrize("bits", BITS)
def test_the_mean_over_seeds_is_the_tensor(bits: int) -> None:
    """The error falls as independent ones do, and is the f(1 - f) steps² of stochastic rounding."""
    tensor, seeds = images(4, 6, 16, 16), 64
    cut = Cut.along(tensor, 1)
    low, high = (end(tensor, dim=(0, 2, 3), keepdim=True) for end in (torch.amin, torch.amax))
    step = (high - low) / (2**bits - 1)
    part = ((tensor - low) / step).frac()
    expected = (part * (1 - part)).mean()
    drawn = [(restored(tensor, cut, bits, key) - tensor) / step for key in range(seeds)]
    single = torch.stack([each.square().mean() for each in drawn]).mean()
    assert single.item() == pytest.approx(expected.item(), rel=0.02)
    left = torch.stack(drawn).mean(0).square().mean()
    assert left.item() * seeds == pytest.approx(single.item(), rel=0.05)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 8),
    st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
    st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(1, 9), st.integers(1, 9)),
    st.floats(-30.0, 30.0),
    st.floats(1e-3, 1e3),
)
def test_ends_come_back_and_all_else_lies_between(bits, dtype, shape, middle, spread) -> None:
    random = torch.Generator().manual_seed(bits)
    tensor = (torch.randn(shape, generator=random) * spread + middle).to(dtype)
    found = restored(tensor, Cut.along(tensor, 1), bits)
    low, high = tensor.float().amin((0, 2, 3)), tensor.float().amax((0, 2, 3))
    slack = 2.0**-7 * (high - low) if dtype == torch.bfloat16 else 2.0**-10 * (high - low)
    slack = slack + 2.0**-7 * low.abs().maximum(high.abs()) * (dtype == torch.bfloat16)
    slack = slack + 2.0**-10 * low.abs().maximum(high.abs()) * (dtype == torch.float16)
    slack = slack + 2.0**-21 * low.abs().maximum(high.abs())
    assert (found.float().amin((0, 2, 3)) >= low - slack).all()
    assert (found.float().amax((0, 2, 3)) <= high + slack).all()


def test_what_is_all_one_value_is_exact_and_zero_stays_zero() -> None:
    constant = torch.full((2, 3, 4, 4), 0.1)
    constant[:, 1] = -7e30
    assert torch.equal(restored(constant, Cut.along(constant, 1), 2), constant)
    relu = torch.randn(2, 3, 40, 40, generator=torch.Generator().manual_seed(1)).relu()
    for cut in (WHOLE, Cut.along(relu, 1)):
        assert (restored(relu, cut, 3)[relu == 0] == 0).all()
    tiny = torch.linspace(0, 1e-44, 64).view(1, 1, 8, 8)
    assert ((restored(tiny, WHOLE, 8) - tiny).abs() <= 1e-44).all()


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_channel_that_is_not_finite_comes_back_as_nan_and_only_that(odd: float) -> None:
    tensor = images(2, 4, 8, 8)
    tensor[1, 2, 3, 3] = odd
    found = restored(tensor, Cut.along(tensor, 1), 4)
    assert found[:, 2].isnan().all()
    assert found[:, [0, 1, 3]].isfinite().all()
    assert restored(tensor, WHOLE, 4).isnan().all()


def test_other_dtypes_and_counts_are_refused() -> None:
    tensor = torch.zeros(300, dtype=torch.float64)
    grid = grid_for(tensor.float(), WHOLE, 2)
    with pytest.raises(CodecError, match="keep it"):
        coded(tensor, 2, 0, grid)
    code = coded(tensor.float(), 2, 0, grid)
    with pytest.raises(CodecError, match="coded shape"):
        code.decode(torch.zeros(301), channels=grid.from_steps)
