"""A value that is not finite spoils no other: its tensor is kept, not coded."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from daf import Session
from daf.capture.compress import compress
from daf.codecs.coder import Coder
from daf.core.code_format import code_bytes
from daf.core.policy import Method, Need, Treatment, coded_policy
from daf.pool.paged_pool import make_store

ROWS, WIDTH = 64, 40  # a block of 256 crosses rows
ODD = (math.nan, math.inf, -math.inf)
Forward = Callable[[nn.Module, Tensor, Tensor, float], Tensor]


def softmax(layer: nn.Module, x: Tensor, whole: Tensor, odd: float) -> Tensor:
    """A row of padding alone: 0 / 0, put to zero behind the softmax and by its product."""
    scores = layer(x).masked_fill(~whole, -math.inf).softmax(-1) + torch.where(whole, 0.0, odd)
    return (torch.where(whole, scores, 0.0) @ x.T).square().mean()


def normalised(layer: nn.Module, x: Tensor, whole: Tensor, odd: float) -> Tensor:
    made = F.layer_norm(torch.where(whole, layer(x), odd), (WIDTH,))
    return torch.where(whole, made, 0.0).square().mul(x).mean()


def smooth(layer: nn.Module, x: Tensor, whole: Tensor, odd: float) -> Tensor:
    made = F.gelu(torch.where(whole, layer(x), odd))
    return torch.where(whole, made, 0.0).square().mul(x).mean()


def gradient(forward: Forward, odd: float, **how: object) -> tuple[Tensor, Tensor, compress]:
    """Return the gradients of the input and of a bias, and what compressed."""
    torch.manual_seed(0)
    layer, x = nn.Linear(WIDTH, WIDTH), torch.randn(ROWS, WIDTH, requires_grad=True)
    whole = torch.ones(ROWS, 1, dtype=torch.bool)
    whole[7] = False
    found = compress(layer, **(how or {"bits": "plain"}))  # type: ignore[arg-type]
    with found:
        loss = forward(layer, x, whole, odd)
    loss.backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert layer.bias.grad is not None
    return x.grad, layer.bias.grad, found


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("forward", [softmax, normalised, smooth])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_gradients_are_finite_where_plain_s_are(
    bits: int, fused: bool, forward: Forward, odd: float
) -> None:
    *plain, _ = gradient(forward, odd)
    *found, _ = gradient(forward, odd, bits=bits, fused=fused)
    assert plain[1].isfinite().all()
    for ours, theirs in zip(found, plain, strict=True):
        assert torch.equal(ours.isfinite(), theirs.isfinite())


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("by_channel", [False, True])
def test_one_range_for_all_is_not_asked_of_what_is_not_finite(by_channel: bool, odd: float) -> None:
    code = Treatment(Method.RANGED, 4, by_channel=by_channel)
    by_need = dict(coded_policy(4).by_need) | dict.fromkeys(
        (Need.LINEAR, Need.NORM, Need.PRODUCT), code
    )
    policy = replace(coded_policy(4), name="ranged", by_need=MappingProxyType(by_need))
    for forward in (softmax, normalised):
        *plain, _ = gradient(forward, odd)
        *found, _ = gradient(forward, odd, policy=policy)
        for ours, theirs in zip(found, plain, strict=True):
            assert torch.equal(ours.isfinite(), theirs.isfinite())


def test_only_the_tensor_that_has_the_value_is_kept() -> None:
    *_, found = gradient(normalised, math.nan, bits=2)
    *_, without = gradient(normalised, 1.0, bits=2)
    kept = ROWS * WIDTH * 4
    more = found.stats.held_peak_bytes - without.stats.held_peak_bytes
    assert kept - code_bytes(ROWS * WIDTH, 2) <= more <= kept


@given(
    st.sampled_from((*ODD, 0.0, 3e38, -1e-40)),
    st.integers(0, 1999),
    st.sampled_from([Method.ROTATED, Method.MINMAX]),
    st.integers(1, 8),
)
def test_a_code_knows_whether_its_values_are_finite(
    odd: float, place: int, method: Method, bits: int
) -> None:
    bits = min(bits, 4) if method is Method.ROTATED else bits
    values = torch.randn(2000, generator=torch.Generator().manual_seed(1))
    values[place] = odd
    code = Coder(make_store()).values(values, Treatment(method, bits), 3, None)
    assert code.is_finite == math.isfinite(odd)
    out = torch.empty(2000)
    code.decode(out)
    block = torch.arange(2000) // 256 == place // 256
    assert out[~block].isfinite().all()
    assert out[block].isnan().all() == (not code.is_finite)


def test_a_session_under_codes_trains_on_padding() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(WIDTH, WIDTH), torch.randn(ROWS, WIDTH)
    whole = torch.ones(ROWS, 1, dtype=torch.bool)
    whole[9] = False
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Session(model, optimizer, None, bits=2) as session:
        losses = [
            session.step((x, whole), lambda m, b: softmax(m, *b, math.nan)).loss for _ in range(8)
        ]
    assert all(each.isfinite().all() for each in model.parameters())
    assert losses[-1] < losses[0]
