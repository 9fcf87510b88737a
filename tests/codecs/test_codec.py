"""Codes and layouts: what goes in comes out, in every dense layout."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from daf.codecs.codes import ElementsCode, ValueCode
from daf.codecs.layout import is_dense, layout_of, overlaps
from daf.core.code_format import Predicate, header_bytes, plane_bytes
from daf.core.errors import CodecError, KernelError
from daf.core.policy import Method, Treatment
from daf.kernels import Codec
from daf.kernels.normalisation import Channels, ElementCode
from daf.pool.store import PlainStore

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
INTEGERS = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
SETTINGS = settings(max_examples=60, deadline=None)


def coded(tensor: Tensor, bits: int, code: ElementCode, store: PlainStore) -> ElementsCode:
    found = ElementsCode.encode(store, tensor, bits, code)
    assert found is not None
    return found


@st.composite
def shapes_and_orders(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    return shape, draw(st.permutations(range(len(shape))))


def permuted(shape: list[int], order: list[int], make: Tensor) -> Tensor:
    """A dense tensor of ``shape`` with its dimensions in the given order in memory."""
    stored = make.reshape([shape[axis] for axis in order])
    return stored.permute([order.index(axis) for axis in range(len(shape))])


@SETTINGS
@given(shapes_and_orders(), st.sampled_from(FLOATS), st.integers(0, 2**31))
def test_masks_round_trip(
    geometry: tuple[list[int], list[int]], dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(math.prod(geometry[0]), generator=generator).to(dtype)
    tensor = permuted(*geometry, values)
    assert is_dense(tensor)
    code = coded(tensor, 1, ElementCode(Codec.MASK), PlainStore())
    out = layout_of(tensor).empty()
    code.decode(out, low=-1.0, high=1.0)
    assert out.stride() == tensor.stride()
    assert torch.equal(out, torch.where(tensor > 0, 1.0, -1.0).to(dtype))


@SETTINGS
@given(
    shapes_and_orders(),
    st.sampled_from(INTEGERS),
    st.integers(1, 62),
    st.integers(-(2**60), 2**60),
    st.integers(0, 2**31),
)
def test_integers_round_trip(
    geometry: tuple[list[int], list[int]], dtype: torch.dtype, bits: int, base: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    count = math.prod(geometry[0])
    if dtype is torch.bool:
        bits, base = 1, 0
    else:
        width = torch.iinfo(dtype).bits
        bits = min(bits, width - 1)
        base = max(-(2 ** (width - 1)), min(base, 2 ** (width - 1) - 2**bits))
    drawn = torch.randint(0, 2**bits, (count,), generator=generator) + base
    signed = torch.int8 if dtype is torch.uint8 else dtype
    values = drawn.to(signed).view(dtype) if dtype is not torch.bool else drawn.bool()
    tensor = permuted(*geometry, values)
    store = PlainStore()
    code = coded(tensor, bits, ElementCode(Codec.INTEGERS, base=base), store)
    assert store.live_bytes == code.nbytes == plane_bytes(count, bits)
    out = layout_of(tensor).empty()
    code.decode(out)
    assert out.stride() == tensor.stride()
    assert torch.equal(out, tensor)


@SETTINGS
@given(shapes_and_orders(), st.sampled_from(FLOATS), st.integers(1, 8), st.integers(0, 2**31))
def test_value_codes_do_not_care_how_dimensions_are_called(
    geometry: tuple[list[int], list[int]], dtype: torch.dtype, bits: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    flat = torch.randn(math.prod(geometry[0]), generator=generator).to(dtype)
    tensor = permuted(*geometry, flat)
    treatment = Treatment(Method.ROTATED if bits <= 4 else Method.MINMAX, bits)
    outs = []
    for source in (flat, tensor):
        code = ValueCode(PlainStore(), source, treatment, key=7)
        out = layout_of(source).empty()
        code.decode(out)
        outs.append(out)
    assert outs[1].stride() == tensor.stride()
    assert torch.equal(outs[1], permuted(*geometry, outs[0]))


@pytest.mark.parametrize("method", [Method.ROTATED, Method.MINMAX])
def test_channels_mask_and_accumulation_compose(method: Method) -> None:
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randn(4, 6, 50, generator=generator)
    scale, shift = torch.rand(6, generator=generator) + 0.5, torch.randn(6, generator=generator)
    code = ValueCode(PlainStore(), tensor, Treatment(method, 4), key=1)
    inside = ElementCode(Codec.MASK, predicate=Predicate.INSIDE)
    mask = coded(tensor, 1, inside, PlainStore())
    plain = torch.empty_like(tensor)
    code.decode(plain)
    out = torch.full_like(tensor, 3.0)
    code.decode(out, Channels(scale, shift, 50), mask, accumulate=True)
    expected = plain * scale[:, None] + shift[:, None] + 3.0
    assert torch.equal(out, torch.where(tensor > 0, expected, 0.0))


def test_encoding_through_channels_codes_the_mapped_values() -> None:
    tensor = torch.randn(4, 6, 50, generator=torch.Generator().manual_seed(0))
    scale, shift = torch.arange(1.0, 7.0), torch.arange(6.0)
    channels, treatment = Channels(scale, shift, 50), Treatment(Method.ROTATED, 3)
    outs = []
    for code in (
        ValueCode(PlainStore(), tensor, treatment, 5, channels),
        ValueCode(PlainStore(), tensor * scale[:, None] + shift[:, None], treatment, 5),
    ):
        outs.append(torch.empty_like(tensor))
        code.decode(outs[-1])
    assert torch.equal(*outs)


def test_derivative_codes_find_the_line() -> None:
    tensor = torch.tensor([-2.0, -0.5, 0.5, 2.0])
    borders, levels = torch.linspace(-1.4, 1.4, 15), torch.tensor([10.0, 20.0, 30.0, 40.0])
    constant = torch.cat([borders, torch.zeros(16), torch.arange(4.0).repeat_interleave(4)])
    intervals = ElementCode(Codec.DERIVATIVE, table=constant)
    code = coded(tensor, 2, intervals, PlainStore())
    out = torch.empty(4)
    code.decode(out, table=levels)
    assert torch.equal(out, levels)
    store = PlainStore()
    assert ElementsCode.encode(store, torch.tensor([math.nan]), 2, intervals) is None
    assert store.live_bytes == 0


@pytest.mark.parametrize("table", [None, torch.tensor([-1.0, 0.0, 1.0]), torch.zeros(47).double()])
def test_derivative_codes_refuse_other_tables(table: Tensor | None) -> None:
    with pytest.raises(KernelError, match="asked for 47 lines' numbers"):
        coded(torch.randn(4), 2, ElementCode(Codec.DERIVATIVE, table=table), PlainStore())


def test_bytes_are_given_back_with_the_last_reference() -> None:
    store = PlainStore()
    tensor = torch.randn(1000)
    code = ValueCode(store, tensor, Treatment(Method.ROTATED, 2), key=0)
    assert store.live_bytes == code.nbytes == plane_bytes(1000, 2) + header_bytes(1000)
    del code
    assert store.live_bytes == 0


def test_wrong_use_is_refused() -> None:
    store, tensor = PlainStore(), torch.randn(100)
    with pytest.raises(CodecError, match="float64"):
        ValueCode(store, tensor.double(), Treatment(Method.ROTATED, 2), key=0)
    with pytest.raises(CodecError, match="rotated or minmax"):
        ValueCode(store, tensor, Treatment(Method.MASK, 1), key=0)
    code = ValueCode(store, tensor, Treatment(Method.ROTATED, 2), key=0)
    with pytest.raises(CodecError, match="100 elements into a tensor of 99"):
        code.decode(torch.empty(99))


@SETTINGS
@given(shapes_and_orders())
def test_permutations_are_dense_and_gaps_are_not(geometry: tuple[list[int], list[int]]) -> None:
    shape, order = geometry
    tensor = permuted(shape, order, torch.zeros(math.prod(shape)))
    assert is_dense(tensor)
    assert not overlaps(tensor)
    gaps = torch.zeros([2 * size for size in shape])[tuple(slice(0, size) for size in shape)]
    assert not overlaps(gaps)
    assert is_dense(gaps) == (math.prod(shape) == max(shape) and shape[-1] == max(shape))


def test_expanded_tensors_overlap() -> None:
    row = torch.zeros(1, 4)
    assert overlaps(row.expand(3, 4))
    assert not is_dense(row.expand(3, 4))
    assert overlaps(torch.zeros(10).as_strided((4, 4), (2, 1)))
    assert not overlaps(torch.zeros(3, 8)[:, :4])
