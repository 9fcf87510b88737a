"""Linear layers that go through their batch a chunk at a time, against PyTorch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf.capture.compress import compress
from daf.codecs.codes import ValueCode
from daf.core.policy import Method
from daf.operators.chunked import weight_gradient
from daf.torch_compat.parameter_reads import DECLARATION

pytestmark = pytest.mark.smoke

SHAPES = [(9, 40), (7, 6, 40), (5, 2, 3, 40)]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_gradient, "CHUNK_BYTES", 600)


def make(shape: tuple[int, ...], width: int = 24, *, bias: bool = True) -> tuple[Any, Tensor]:
    """A layer behind a layer normalisation, whose code it reads, and an input of 4 KiB or more."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(40), nn.Linear(40, width, bias=bias))
    rows = -(-1200 // torch.Size(shape[1:]).numel())
    return model, torch.randn(max(rows, shape[0]), *shape[1:], requires_grad=True)


def steps(model: nn.Module, x: Tensor, bits: Any, **options: bool) -> tuple[dict[str, Any], Any]:
    """Result and gradients of a second step."""
    capture = compress(model, bits, **options)
    for _ in range(2):
        model.zero_grad()
        x.grad = None
        with capture:
            out = model(x * 1)
        torch.manual_seed(5)
        out.backward(torch.randn_like(out))
    found = {name: p.grad for name, p in model.named_parameters()}
    return found | {"out": out.detach(), "x": x.grad}, (capture, out)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("width", [24, 40])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_are_those_of_the_same_code_used_whole(shape, width, bias) -> None:
    """What differs is the order of additions only."""
    model, x = make(shape, width, bias=bias)
    found, (capture, out) = steps(model, x, 4, chunked=True)
    expected, _ = steps(model, x, 4)
    assert out.grad_fn.name() == "ChunkedLinearBackward"
    (site,) = (r for r in capture.sites() if r.site.operator == "linear")
    assert site.treatment.method is Method.REDERIVE
    assert site.held_bytes == 0
    assert capture.stats.held_bytes == capture.stats.plain_bytes == 0
    assert torch.equal(found["out"], expected["out"])
    for key, value in expected.items():
        limit = 1e-5 * float(value.abs().max())
        torch.testing.assert_close(found[key], value, rtol=1e-5, atol=limit)


@pytest.mark.parametrize("shape", SHAPES)
def test_an_exact_policy_keeps_the_input_and_every_bit(shape: tuple[int, ...]) -> None:
    model, x = make(shape)
    found, (_, out) = steps(model, x, "exact", chunked=True)
    expected, _ = steps(model, x, "exact")
    assert out.grad_fn.name() == "ChunkedLinearBackward"
    assert [key for key, value in expected.items() if not torch.equal(found[key], value)] == []


@pytest.mark.parametrize("frozen", ["bias", "x"])
def test_only_what_asks_gets_a_gradient(frozen: str) -> None:
    torch.manual_seed(1)
    model, x = nn.Linear(40, 24), torch.randn(40, 40, requires_grad=frozen != "x")
    if frozen == "bias":
        model.bias.requires_grad_(False)
    x_in = x.clone() if frozen == "x" else x * 1
    with compress(model, 4, chunked=True):
        out = model(torch.tanh(x_in))
    out.sum().backward()
    assert (x.grad is None) == (frozen == "x")
    assert (model.bias.grad is None) == (frozen == "bias")
    true = torch.autograd.grad(model(torch.tanh(x)).sum(), model.weight)[0]
    assert (model.weight.grad - true).norm() < 0.15 * true.norm()


def test_a_frozen_weight_leaves_the_layer_as_it_is() -> None:
    """PyTorch saves no input there, so there is nothing to chunk."""
    model, x = make((9, 40))
    model[1].weight.requires_grad_(False)
    with compress(model, 4, chunked=True):
        out = model(x)
    assert out.grad_fn.name() != "ChunkedLinearBackward"


def test_no_more_than_a_chunk_is_decoded_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []
    decode = ValueCode.decode

    def spy(self: ValueCode, out: Tensor, *arguments: Any, **keywords: Any) -> None:
        decoded.append(out.numel())
        decode(self, out, *arguments, **keywords)

    monkeypatch.setattr(ValueCode, "decode", spy)
    torch.manual_seed(2)
    model, x = nn.Linear(40, 24), torch.randn(40, 40, requires_grad=True)
    with compress(model, 2, chunked=True):
        out = model(torch.tanh(x))
    decoded.clear()
    out.sum().backward()
    chunks = weight_gradient.chunks_of(x.shape)
    assert len(chunks) == -(-x.nbytes // 600)
    parts = [count for count in decoded if count != x.numel()]  # tanh's own is whole
    assert len(parts) == len(chunks)
    assert max(parts) < 4 * 40 + 2 * 256


def test_the_formulas_are_the_derivative() -> None:
    """In float64, by finite differences, chunk by chunk."""
    torch.manual_seed(3)
    from daf.operators.chunked.products import Linear

    x, weight, bias = (
        torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for shape in ((4, 3, 5), (6, 5), (6,))
    )

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            return F.linear(x, weight, bias)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            x, weight = ctx.saved_tensors
            cut = [slice(0, 1), slice(1, 4)]
            parts = [Linear.backward(gradient[c], x[c], weight, (True,) * 3) for c in cut]
            of_x, of_weight, of_bias = zip(*parts, strict=True)
            return torch.cat(of_x), sum(of_weight), sum(of_bias)

    assert torch.autograd.gradcheck(Probe.apply, (x, weight, bias))


def test_it_declares_that_it_reads_only_what_it_saved() -> None:
    from daf.operators.batch_norm.function import FusedNorm
    from daf.operators.chunked.products import ChunkedConvolution, ChunkedLinear

    for function in (ChunkedConvolution, ChunkedLinear, FusedNorm):
        assert getattr(function, DECLARATION) is True
