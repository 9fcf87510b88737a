"""Lossy capture: unbiased where it says so, and better with more bits."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf.capture.capture import Capture
from daf.capture.compress import compress
from daf.core.code_format import header_bytes, plane_bytes
from daf.core.policy import Method, Need, policy_for
from daf.pool.store import PlainStore

BATCH = 64


def input_weight_gradient(
    layer: nn.Module, x: Tensor, bits: int | None, seed: int = 0, loss: Tensor | None = None
) -> Tensor:
    """Gradient of a layer's weight behind an identity, so that its input is an activation."""
    model = nn.Sequential(nn.Identity(), layer)
    weights = torch.linspace(-1, 1, 7)

    def forward() -> Tensor:
        out = model(x * 1)
        return (out.flatten()[:, None] * weights).sin().sum()

    x = x.detach().requires_grad_()
    if bits is None:
        forward().backward()
    else:
        with Capture(model).step(policy_for(bits), seed, 0):
            out = model(x * 1)
        value = (out.flatten()[:, None] * weights).sin().sum()
        value.backward()
    gradient = layer.weight.grad
    layer.weight.grad = None
    assert gradient is not None
    return gradient


def relative_error(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).square().sum() / expected.square().sum()).item()


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(64, 32), (BATCH, 64)),
    "conv2d": (lambda: nn.Conv2d(8, 8, 3), (8, 8, 12, 12)),
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(8, 4, 3), (8, 8, 12, 12)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_are_unbiased(name: str) -> None:
    """Averaging k seeds divides the squared error by k, which a bias would stop."""
    make, shape = LAYERS[name]
    layer, x = make(), torch.randn(shape)
    exact = input_weight_gradient(layer, x, None)
    samples = torch.stack([input_weight_gradient(layer, x, 1, seed) for seed in range(32)])
    single = sum(relative_error(sample, exact) for sample in samples) / len(samples)
    averaged = relative_error(samples.mean(0), exact)
    assert single > 1e-4
    assert averaged < 1.6 * single / len(samples)


@pytest.mark.parametrize("name", LAYERS)
def test_error_shrinks_with_bits(name: str) -> None:
    make, shape = LAYERS[name]
    layer, x = make(), torch.randn(shape)
    exact = input_weight_gradient(layer, x, None)
    errors = [
        sum(relative_error(input_weight_gradient(layer, x, bits, seed), exact) for seed in range(4))
        for bits in (1, 2, 3, 4, 8)
    ]
    assert all(later < 0.6 * earlier for earlier, later in itertools.pairwise(errors))


@pytest.mark.parametrize("bits", [1, 2, 4, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_held_bytes_are_those_of_the_format(bits: int, dtype: torch.dtype) -> None:
    model = nn.Linear(70, 30, dtype=dtype)
    x = torch.randn(99, 70, dtype=dtype, requires_grad=True)
    capture = Capture(model, PlainStore())
    with capture.step(policy_for(bits), 0, 0):
        loss = model(x * 1).sum()
    assert capture.stats.plain_bytes == x.nbytes
    assert capture.stats.held_bytes == plane_bytes(x.numel(), bits) + header_bytes(x.numel())
    (report,) = capture.sites()
    assert report.held_bytes == capture.stats.held_bytes
    assert report.plain_bytes == x.nbytes
    assert report.need is Need.LINEAR
    loss.backward()
    assert capture.stats.held_bytes == capture.stats.plain_bytes == 0


def test_the_relu_mask_is_exact_at_one_bit() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    x = torch.randn(BATCH, 64)

    def hidden_gradient(bits: int | str) -> Tensor:
        hidden = model[0](x).detach().requires_grad_()
        with compress(model, bits):
            loss = model[2](model[1](hidden)).sum()
        loss.backward()
        assert hidden.grad is not None
        return hidden.grad

    assert torch.equal(hidden_gradient(1), hidden_gradient("plain"))


def test_nan_stays_visible() -> None:
    model, x = nn.Linear(64, 64), torch.randn(BATCH, 64)
    x[3, 3] = float("nan")
    gradient = input_weight_gradient(model, x, 2)
    assert torch.isnan(gradient).any()


@pytest.mark.parametrize(
    "activation",
    [F.gelu, F.silu, F.mish, F.softplus, F.elu, F.hardswish, torch.sigmoid, torch.tanh],
    ids=lambda function: function.__name__,
)
def test_smooth_activations_keep_a_derivative_code(activation: Callable[[Tensor], Tensor]) -> None:
    model, x = nn.Identity(), torch.randn(64, 128, requires_grad=True)
    slopes = {}
    for bits in ("plain", 2, 4):
        capture = compress(model, bits)
        with capture:
            loss = activation(x * 1).sum()
        if bits != "plain":
            (report,) = capture.sites()
            assert report.treatment.method is Method.DERIVATIVE
            assert report.held_bytes == plane_bytes(x.numel(), int(bits))
        loss.backward()
        slopes[bits], x.grad = x.grad, None
    coarse, fine = (slopes[bits] - slopes["plain"] for bits in (2, 4))
    levels = slopes[2].unique()
    assert len(levels) <= 4
    assert coarse.abs().max() < 1.02 * levels.diff().max()  # one of two neighbours
    assert abs(coarse.mean()) < 4 * coarse.std() / 90  # of 8192, at random
    assert fine.square().mean() < 0.25 * coarse.square().mean()


def test_gelu_levels_cover_its_derivative_s_range() -> None:
    """The derivative's extremes lie at -sqrt(2) and sqrt(2)."""
    x = torch.linspace(-5, 5, 4096).requires_grad_()
    with compress(nn.Identity(), 2):
        loss = F.gelu(x * 1).sum()
    loss.backward()
    levels = x.grad.unique()
    ends = torch.tensor([-(2**0.5), 2**0.5], requires_grad=True)
    F.gelu(ends).sum().backward()
    expected = torch.linspace(*ends.grad.tolist(), 4)
    torch.testing.assert_close(levels, expected, atol=1e-4, rtol=0)


def test_attention_gets_at_least_four_bits_and_stays_close() -> None:
    q, k, v = (torch.randn(2, 4, 32, 16, requires_grad=True) for _ in range(3))
    found = {}
    for bits in ("plain", 1):
        capture = compress(nn.Identity(), bits)
        with capture:
            loss = F.scaled_dot_product_attention(q * 1, k * 1, v * 1).square().sum()
        if bits == 1:
            products = [r for r in capture.sites() if r.need is Need.PRODUCT]
            assert len(products) == 4
            assert all(r.treatment.bits >= 4 for r in products)
        loss.backward()
        found[bits] = [t.grad for t in (q, k, v)]
        q.grad = k.grad = v.grad = None
    for coded, plain in zip(found[1], found["plain"], strict=True):
        assert relative_error(coded, plain) < 0.2


def test_slices_of_one_storage_are_coded_without_their_gaps() -> None:
    model = nn.Linear(16, 48)
    capture = Capture(model, PlainStore())
    with capture.step(policy_for(4), 0, 0):
        q, k, v = model(torch.randn(64, 16) * 1).chunk(3, dim=-1)
        loss = ((q @ k.t()) @ v).sum()
    count = 64 * 16
    reports = [r for r in capture.sites() if r.site.operator == "matmul" and r.held_bytes]
    one = plane_bytes(count, 4) + header_bytes(count)
    assert [r.held_bytes for r in reports if r.plain_bytes != 4 * 64 * 64][:2] == [one, one]
    loss.backward()
    assert torch.isfinite(model.weight.grad).all()


def test_two_uses_of_one_tensor_are_stored_once() -> None:
    first, second = nn.Linear(64, 64), nn.Linear(64, 64)
    model = nn.ModuleList([first, second])
    capture = Capture(model, PlainStore())
    x = torch.randn(BATCH, 64, requires_grad=True)
    with capture.step(policy_for(2), 0, 0):
        shared = x * 1
        loss = first(shared).sum() + second(shared).sum()
    assert capture.stats.held_bytes == plane_bytes(x.numel(), 2) + header_bytes(x.numel())
    assert [report.held_bytes > 0 for report in capture.sites()] == [True, False]
    loss.backward()
    assert torch.equal(first.weight.grad, second.weight.grad)


def test_freed_addresses_do_not_alias_what_is_saved_next() -> None:
    """Each tensor is freed before the next is made, most often at the same address."""
    model = nn.ModuleList([nn.Linear(64, 64, bias=False) for _ in range(8)])
    with compress(model, 8):
        loss = sum(
            layer(torch.full((BATCH, 64), float(i)) * 1).sum() for i, layer in enumerate(model)
        )
    loss.backward()
    for value, layer in enumerate(model):
        torch.testing.assert_close(layer.weight.grad, torch.full((64, 64), 64.0 * value))


def test_a_tensor_that_is_kept_anyway_is_not_coded_too() -> None:
    model = nn.Linear(64, 64)
    capture = compress(model, 2)
    x = torch.randn(BATCH, 64, requires_grad=True)
    with capture:
        loss = model((x * 1).exp()).sum()
    assert capture.stats.held_bytes == x.nbytes
    loss.backward()


@pytest.mark.parametrize(
    ("exponent", "need"), [(2, Need.LINEAR), (3, Need.PRODUCT), (4, Need.EXACT), (0.5, Need.EXACT)]
)
def test_powers_need_what_their_derivative_reads(exponent: float, need: Need) -> None:
    capture = compress(nn.Identity(), 2)
    with capture:
        loss = (torch.rand(64, 64, requires_grad=True) * 1).pow(exponent).sum()
    (report,) = capture.sites()
    assert report.need is need
    loss.backward()


@pytest.mark.parametrize("power", [3, 4, 5])
def test_one_code_never_stands_twice_in_a_product(power: int) -> None:
    """A factor of several products has a wide code for all but the first: errors never square."""
    x = torch.randn(64, 256, requires_grad=True)

    def product() -> Tensor:
        h = x * 1
        found = h
        for _ in range(power - 1):
            found = found * h
        return found

    def gradient(seed: int | None) -> Tensor:
        if seed is None:
            return torch.autograd.grad(product().sum(), x)[0]
        with (capture := Capture(nn.Identity())).step(policy_for(1), seed, 0):
            out = product()
        found = torch.autograd.grad(out.sum(), x)[0]
        needs = [each.need for each in capture.sites() if each.site.operator == "mul"]
        assert needs.count(Need.PRODUCT) == power - 2
        return found

    plain = gradient(None)
    errors = torch.stack([gradient(seed) - plain for seed in range(200)])
    noise = errors.square().sum((1, 2)).mean()
    bias = errors.mean(0).square().sum() - noise / len(errors)
    assert bias < 0.001 * plain.square().sum() < noise


@pytest.mark.parametrize(
    ("function", "count"),
    [
        (lambda h: h * h, 0),  # both factors of one call: errors add
        (lambda h: h * h.tanh(), 0),
        (lambda h: h[:, :128] * h[:, 128:], 0),
        (lambda h: h * h.exp() + h * h.cos(), 1),
    ],
)
def test_only_a_factor_of_several_calls_needs_more(
    function: Callable[[Tensor], Tensor], count: int
) -> None:
    x = torch.randn(64, 256, requires_grad=True)
    with (capture := Capture(nn.Identity())).step(policy_for(2), 0, 0):
        out = function(x * 1)
    out.sum().backward()
    assert [each.need for each in capture.sites()].count(Need.PRODUCT) == count


def test_double_precision_is_kept() -> None:
    model = nn.Linear(64, 64).double()
    capture = compress(model, 2)
    with capture:
        loss = model(torch.randn(BATCH, 64, dtype=torch.float64, requires_grad=True) * 1).sum()
    assert {report.treatment.method for report in capture.sites()} == {Method.KEEP}
    loss.backward()


@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (lambda: nn.LayerNorm(256), (64, 256)),
        (lambda: nn.BatchNorm2d(16), (8, 16, 16, 16)),
        (lambda: nn.GroupNorm(4, 16), (8, 16, 16, 16)),
    ],
    ids=["layer", "batch", "group"],
)
def test_the_bias_behind_a_norm_is_small(
    norm: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    """The normalised value y enters twice (g - y mean(g y)), so its code is not quite unbiased.

    Measured with a gradient that has y's direction in it: squared bias below
    0.0003 of the gradient's square, where a single draw's error is 0.13.
    """
    model, x, draws = norm(), torch.randn(shape), 32
    gradient = torch.randn(shape) + model(x).detach()

    def slope(bits: int | str, seed: int) -> Tensor:
        leaf = x.clone().requires_grad_()
        with Capture(model).step(policy_for(bits), seed, 0):
            out = model(leaf * 1)
        out.backward(gradient)
        assert leaf.grad is not None
        return leaf.grad

    exact = slope("plain", 0)
    samples = torch.stack([slope(2, seed) for seed in range(draws)])
    single = sum(relative_error(sample, exact) for sample in samples) / draws
    bias = relative_error(samples.mean(0), exact) - single / draws
    assert 0.05 < single < 0.2
    assert abs(bias) < 0.002
