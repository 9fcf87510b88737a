"""Convolution that goes through its batch a chunk at a time, against PyTorch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from daf.capture.compress import compress
from daf.codecs.codes import ElementsCode, ValueCode
from daf.codecs.layout import layout_of
from daf.codecs.scratch import Scratch
from daf.core.policy import Method, Treatment
from daf.kernels import Codec
from daf.kernels.normalisation import Channels, ElementCode
from daf.operators.chunked import weight_gradient
from daf.pool.paged_pool import PagedStore
from daf.pool.store import PlainStore
from daf.saved_tensors.ledger import Ledger
from daf.saved_tensors.packed_tensor import Rederived, Stored, Term

FORMATS = [torch.contiguous_format, torch.channels_last]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_gradient, "CHUNK_BYTES", 3000)


def recipe_of(shape: tuple[int, ...], layout: Any, bits: int, store: Any) -> Rederived:
    """Two coded terms, the second with channels and a mask."""
    first, second = (torch.randn(shape).to(memory_format=layout) for _ in "12")
    ledger, treatment = Ledger(), Treatment(Method.ROTATED if bits < 5 else Method.MINMAX, bits)
    codes = [Stored(ledger, ValueCode(store, t, treatment, 7)) for t in (first, second)]
    code = ElementsCode.encode(store, first, 1, ElementCode(Codec.MASK))
    assert code is not None
    mask = Stored(ledger, code)
    inner = 1 if layout is torch.channels_last else shape[2] * shape[3]
    channels = Stored(ledger, Channels(torch.randn(shape[1]), torch.randn(shape[1]), inner))
    return Rederived((Term(codes[0]), Term(codes[1], channels, mask)), layout_of(first))


@settings(max_examples=40, deadline=None)
@given(
    shape=st.tuples(*[st.integers(1, n) for n in (9, 20, 9, 9)]),
    layout=st.sampled_from(FORMATS),
    bits=st.sampled_from([2, 6]),
    paged=st.booleans(),
    data=st.data(),
)
def test_a_part_is_a_part_of_the_whole(shape, layout, bits, paged, data) -> None:
    store = PagedStore(page_bytes=32) if paged else PlainStore()
    held = recipe_of(shape, layout, bits, store)
    if paged and bits == 2:
        store.evict(64)
    first = data.draw(st.integers(0, shape[0] - 1))
    last = data.draw(st.integers(first + 1, shape[0]))
    whole, part = held.restore(Scratch()), held.restore_part(first, last)
    assert torch.equal(part, whole[first:last])
    assert part.stride() == whole.stride()


def test_chunks_cover_the_batch_in_order() -> None:
    for shape in ((7, 10, 10, 10), (1, 100, 10, 10), (64, 3, 2, 2), (5, 8, 9, 9)):
        chunks = weight_gradient.chunks_of(shape)
        assert [first for first, _ in chunks] == [0, *(last for _, last in chunks[:-1])]
        assert chunks[-1][1] == shape[0]
        image_bytes = 4 * shape[1] * shape[2] * shape[3]
        assert all((b - a) * image_bytes <= max(3000 + image_bytes, image_bytes) for a, b in chunks)


CONVOLUTIONS: dict[str, dict[str, Any]] = {
    "plain": {"padding": 1},
    "bias": {"bias": True},
    "strided": {"stride": 2, "padding": (1, 2)},
    "dilated": {"dilation": 2},
    "grouped": {"groups": 4, "bias": True},
    "depthwise": {"groups": 8},
    "same": {"padding": "same"},
}


def steps(model: nn.Module, x: Tensor, bits: Any, **options: bool) -> tuple[dict[str, Tensor], Any]:
    """Result and gradients of a second step."""
    capture = compress(model, bits, **options) if bits is not None else None
    for _ in range(2):
        model.zero_grad()
        x.grad = None
        if capture is None:
            out = model(x)
        else:
            with capture:
                out = model(x)
        torch.manual_seed(5)
        out.backward(torch.randn_like(out))
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    return found | {"out": out.detach(), "x": x.grad}, (capture, out)


def make(layout: Any, **options: Any) -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    conv = nn.Conv2d(8, 8, 3, **{"bias": False} | options)
    model = nn.Sequential(nn.Tanh(), conv).to(memory_format=layout)
    return model, torch.randn(9, 8, 10, 11).to(memory_format=layout).requires_grad_()


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_gradients_are_those_of_the_same_code_used_whole(name, layout) -> None:
    """What differs is the order of additions only."""
    model, x = make(layout, **CONVOLUTIONS[name])
    found, (_, out) = steps(model, x, 4, chunked=True)
    expected, _ = steps(model, x, 4)
    is_chunked = out.grad_fn.name() == "ChunkedConvolutionBackward"
    assert is_chunked == (name != "same")  # words stay PyTorch's
    assert torch.equal(found["out"], expected["out"])
    for key, value in expected.items():
        torch.testing.assert_close(
            found[key], value, rtol=1e-4, atol=1e-4 * float(value.abs().max())
        )


def test_an_exact_policy_computes_the_input_again_to_every_bit() -> None:
    model, x = make(torch.channels_last)
    found, (capture, _) = steps(model, x, "exact", chunked=True)
    expected, _ = steps(model, x, None)
    differing = [key for key, value in expected.items() if not torch.equal(found[key], value)]
    assert differing == []
    (conv,) = (r for r in capture.sites() if r.site.operator == "conv2d")
    assert conv.treatment.method is Method.RECOMPUTE  # tanh of the caller's own tensor


def test_no_more_than_a_chunk_is_decoded_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []
    decode = ValueCode.decode

    def spy(self: ValueCode, out: Tensor, *arguments: Any, **keywords: Any) -> None:
        decoded.append(out.numel())
        decode(self, out, *arguments, **keywords)

    model, x = make(torch.channels_last)
    monkeypatch.setattr(ValueCode, "decode", spy)
    steps(model, x, 2, chunked=True)
    per_image = 8 * 10 * 11
    assert len(decoded[-9:]) == 9
    assert max(decoded[-9:]) < per_image + 2 * 256
    assert x.numel() not in decoded[-9:]


def test_the_site_is_the_one_it_was() -> None:
    model, x = make(torch.contiguous_format)
    told = []
    for on in (False, True):
        _, (capture, _) = steps(model, x, 2, chunked=on)
        told.append({str(r.site): (r.need, r.treatment) for r in capture.sites()})
        assert capture.stats.held_bytes == capture.stats.plain_bytes == 0
    assert told[0] == told[1]


@pytest.mark.parametrize("frozen", ["weight", "bias", "x"])
def test_only_what_asks_gets_a_gradient(frozen: str) -> None:
    model, x = make(torch.channels_last, bias=True)
    if frozen == "x":
        x.requires_grad_(False)
    else:
        getattr(model[1], frozen).requires_grad_(False)
    results = []
    for on in (False, True):
        capture = compress(model, 4, chunked=on)
        model.zero_grad()
        x.grad = None
        for _ in range(2):
            with capture:
                out = model(x * 1)
        out.sum().backward()
        results.append([x.grad, *(p.grad for p in model.parameters())])
    for found, expected in zip(*results, strict=True):
        assert (found is None) == (expected is None)
        if expected is not None:
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


def test_a_weight_changed_before_backward_is_reported() -> None:
    model, x = make(torch.channels_last)
    capture = compress(model, 2, chunked=True, fused=True)
    with capture:
        out = model(x)
    with torch.no_grad():
        model[1].weight.mul_(2)
    with pytest.raises(RuntimeError, match="inplace operation"):
        out.sum().backward()


def test_a_weight_used_by_two_convolutions() -> None:
    model, x = make(torch.channels_last, padding=1)

    def forward() -> Tensor:
        y = F.relu(F.conv2d(x * 1, model[1].weight, None, 1, 1))
        return F.conv2d(y, model[1].weight, None, 1, 1)

    capture = compress(model, 8, chunked=True)
    with capture:
        out = forward()
    out.sum().backward()
    found = model[1].weight.grad.clone()
    (expected,) = torch.autograd.grad(forward().sum(), model[1].weight)
    assert (found - expected).norm() < 0.02 * expected.norm()
