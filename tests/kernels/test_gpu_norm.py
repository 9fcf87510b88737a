"""Normalisations on a GPU (or interpreted) against the oracle: byte for byte, part by part."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from daf.errors import KernelError
from daf.kernels import (
    ElementType,
    RowMoments,
    block_count,
    reference,
    reference_norm,
    reference_rows,
)
from daf.kernels.elements import Floats, narrow, widen
from daf.kernels.reference_measure import measure_products

pytest.importorskip("triton", reason="triton is not installed: daf-train[gpu]")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("no CUDA device; test_gpu_interpreted runs these", allow_module_level=True)

from device_cases import (  # noqa: E402
    DEVICE,
    bytes_of,
    check_guard,
    elements,
    gathered,
    in_pages,
    make_affine,
    poisoned,
    to_device,
)

from daf.kernels import gpu_norm  # noqa: E402
from daf.kernels.gpu_launch import Affine  # noqa: E402
from daf.kernels.gpu_planes import DevicePlanes, allocate_flat  # noqa: E402
from daf.store import device_normalised  # noqa: E402
from daf.store.normalised import Geometry, Running, Sums  # noqa: E402

F32 = ElementType.FLOAT32
# (count, channels, inner): channels-last and contiguous, ragged, spans that channels cross.
GEOMETRIES = [
    (18_000, 32, 1),
    (40_000, 48, 1),
    (255, 5, 3),
    (4600, 7, 1),
    (2 * 4096 + 768, 3, 256),
    (5000, 20, 30),
    (4600, 1, 1),
]


@pytest.fixture(autouse=True)
def quiet_arithmetic() -> Iterator[None]:
    """And another default type than the kernels': nothing may be left to it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with np.errstate(all="ignore"):
            yield
    finally:
        torch.set_default_dtype(before)


def make_mask(cases, count: int, *, paged: bool) -> tuple[np.ndarray, DevicePlanes]:
    chosen = reference.Predicate.ABOVE
    words = reference.encode_mask(cases.gaussian(count, 9), chosen, 0.0, 0.0)
    headers = np.zeros((block_count(count), 2), np.uint16)
    if paged:
        return words, in_pages(words, headers, count, 256, None)
    planes = allocate_flat(count, 1, DEVICE, headers=False)
    planes.region.copy_(to_device(words).view(planes.region.shape))
    return words, planes


def parts_of(count: int, step: int) -> list[tuple[int, int]]:
    """Blocks [first, last) of a tensor, so many at a time."""
    blocks = block_count(count)
    return [(first, min(first + step, blocks)) for first in range(0, blocks, step)]


def value_parts(
    values: Floats, x: Floats, forward: Affine, kind: ElementType, step: int, *, kept: bool
) -> Iterator[gpu_norm.Values]:
    """The values decoded, or the input that they are computed from."""
    for first, last in parts_of(len(x), step):
        part = to_device(values[first * 256 : last * 256])
        if kept:
            yield gpu_norm.Values(elements(narrow(x, kind), kind), (first, last), forward)
        else:
            yield gpu_norm.Values(part, (first, last))


def as_stored(values: Floats, kind: ElementType) -> Floats:
    """Float32 of what the type keeps of them."""
    return widen(narrow(values, kind))


# --- forward --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "most", "paged"),
    [(0, math.inf, False), (1, 6.0, True), (2, None, False), (2, math.inf, True), (0, 6.0, True)],
)
def test_the_result_and_its_mask_are_the_oracle_s(cases, kind, most, paged) -> None:
    count, channels, inner, kind = 5 * 256 + 77, 7, 9, ElementType(kind)
    x = as_stored(cases.broken(count), kind)
    addend = as_stored(4 * cases.gaussian(count, 8), kind)
    (ours, theirs), (after, behind) = make_affine(cases, channels, inner), make_affine(cases, 3, 1)
    _, mask = make_mask(cases, count, paged=paged)
    for result, added in ((None, None), (behind, None), (None, addend), (behind, addend)):
        bound = math.inf if most is None else most
        expected = reference_norm.emit(
            ours.apply(x, 0), after if result else None, added, most is not None, bound
        )
        found = poisoned(count, kind)
        given = None if added is None else elements(narrow(added, kind), kind)
        source = elements(narrow(x, kind), kind)
        options = (given, None if most is None else mask, bound)
        gpu_norm.emit(source, theirs, found, result, *options)
        assert bytes_of(found) == narrow(expected.result, kind).tobytes()
        check_guard(found)
        gpu_norm.emit(source, theirs, source, result, *options)
        assert bytes_of(source) == bytes_of(found), "over its own input"
        if expected.mask is not None:
            words = gathered(mask)[0] if paged else mask.region.cpu().numpy().view(np.uint32)
            assert words.tobytes() == expected.mask.tobytes()


@pytest.mark.parametrize("kind", ElementType)
def test_parts_of_the_result_are_derived_again(cases, kind) -> None:
    count = 5 * 256 + 77
    x = as_stored(cases.broken(count), kind)
    onto = as_stored(cases.gaussian(count, 8), kind)
    (ours, theirs), (after, behind) = make_affine(cases, 7, 9), make_affine(cases, 3, 1)
    words, mask = make_mask(cases, count, paged=True)
    source = elements(narrow(x, kind), kind)
    for blocks in (None, (0, 2), (3, 6)):
        here = slice(None) if blocks is None else slice(blocks[0] * 256, blocks[1] * 256)
        for result, before, chosen in (
            (None, None, None),
            (behind, onto, None),
            (behind, None, mask),
            (None, onto, mask),
        ):
            expected = reference_norm.derive(
                ours.apply(x, 0), after if result else None, before, words if chosen else None
            )
            found = elements(narrow(onto, kind)[here], kind)
            gpu_norm.derive(source, theirs, found, result, chosen, before is not None, blocks)
            assert bytes_of(found) == narrow(expected, kind)[here].tobytes()


# --- backward, by channels ------------------------------------------------------------------


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize(("count", "channels", "inner"), GEOMETRIES)
def test_sums_of_gradient_and_products_are_the_oracle_s(
    cases, count, channels, inner, kept
) -> None:
    kind = ElementType(count % 3) if kept else F32
    x = as_stored((cases.mixed if channels % 2 else cases.broken)(count), kind)
    gradient = as_stored(cases.gaussian(count, 4), kind)
    ours, theirs = make_affine(cases, channels, inner)
    values = ours.apply(x, 0)
    words, mask = make_mask(cases, count, paged=kept)
    given = elements(narrow(gradient, kind), kind)
    for chosen, bits in ((None, None), (mask, words)):
        sums = gpu_norm.ChannelProducts(given, channels, inner)
        step = 2 * sums.span_blocks
        for part in value_parts(values, x, theirs, kind, step, kept=kept):
            sums.add(part, chosen)
        masked = reference_norm.masked(gradient, bits)
        expected = measure_products(masked, values, channels, inner)
        found = [total.cpu().numpy().tobytes() for total in sums.totals()]
        assert found == [expected.sums.tobytes(), expected.squares.tobytes()]
    with pytest.raises(KernelError, match="spans have"):
        sums.add(gpu_norm.Values(to_device(values[:256]), (1, 2)), None)


@pytest.mark.parametrize(("kind", "kept"), [(0, False), (0, True), (1, False), (2, True)])
def test_the_input_s_gradient_is_the_oracle_s(cases, kind, kept) -> None:
    count, channels, inner, kind = 5 * 256 + 77, 7, 9, ElementType(kind)
    x, gradient = (
        as_stored(each, kind) for each in (cases.broken(count), cases.gaussian(count, 4))
    )
    (ours, theirs), (a, of_value) = make_affine(cases, channels, inner), make_affine(cases, 7, 9)
    scale = cases.gaussian(channels, 3)
    values = ours.apply(x, 0)
    words, mask = make_mask(cases, count, paged=not kept)
    for chosen, bits in ((None, None), (mask, words)):
        expected = reference_norm.input_gradient(
            values, gradient, bits, a, reference.Affine(scale, scale, inner)
        )
        given, found = elements(narrow(gradient, kind), kind), poisoned(count, kind)
        for written in (found, given):  # the latter over itself
            for part in value_parts(values, x, theirs, kind, 3, kept=kept):
                gpu_norm.write_gradient(
                    given, part, written, to_device(scale), of_value, mask=chosen
                )
            assert bytes_of(written) == narrow(expected, kind).tobytes()
        check_guard(found)


# --- rows -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "length"), [(1, 1), (5, 77), (260, 3), (270, 18)])
@pytest.mark.parametrize("centred", [True, False])
def test_rows_are_the_oracle_s(cases, rows, length, centred) -> None:
    """Sums of the rows; of gradient and values by rows and by columns; the input's gradient."""
    count, kind = rows * length, ElementType((rows + centred) % 3)
    name = "mixed" if length % 2 else "broken"
    x = as_stored(getattr(cases, name)(max(16, count))[:count], kind)
    gradient, gamma = as_stored(cases.gaussian(count, 4), kind), cases.gaussian(length, 5)
    sums, squares = gpu_norm.row_sums(elements(narrow(x, kind), kind), length)
    wide = x.reshape(rows, length).astype(np.float64)
    assert known(sums.cpu().numpy()) == known(reference_rows._row_sums(wide))
    assert known(squares.cpu().numpy()) == known(reference_rows._row_sums(wide * wide))

    affine = reference_rows.row_affine(x, length, 1e-5, centred=centred)
    values = affine.apply(x, 0)
    theirs = Affine(to_device(affine.scale), to_device(affine.shift), length)
    given = elements(narrow(gradient, kind), kind)
    for weight, kept in ((None, True), (gamma, False)):
        expected = reference_rows.row_gradients(
            values, gradient, affine.scale, weight, centred=centred
        )
        on_device = None if weight is None else to_device(weight)
        products = gpu_norm.RowProducts(given, length, on_device, summing=True)
        step = products.span_blocks
        for part in value_parts(values, x, theirs, kind, step, kept=kept):
            products.add(part)
        columns = products.columns()
        assert columns is not None
        found = [each.cpu().numpy().tobytes() for each in columns]
        assert found == [expected.beta.tobytes(), expected.gamma.tobytes()]
        of_value = gpu_norm.row_factors(products, theirs.scale, centred=centred)
        written = poisoned(count, kind)
        for part in value_parts(values, x, theirs, kind, step, kept=kept):
            gpu_norm.write_gradient(given, part, written, theirs.scale, of_value, gamma=on_device)
        assert bytes_of(written) == narrow(expected.x, kind).tobytes()
        check_guard(written)


def known(sums: np.ndarray) -> bytes:
    """Which NaN infinities make is the device's own; who reads these sums makes it canonical."""
    return np.where(np.isnan(sums), np.nan, sums).tobytes()


class Divisions(TorchDispatchMode):
    """Notes every division by something that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.by_numbers: list[Any] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        if "div" in str(function) and not isinstance(arguments[1], torch.Tensor):
            self.by_numbers.append(arguments[1])
        return function(*arguments, **(keywords or {}))


def test_counts_divide_and_are_not_inverted_first() -> None:
    """By a plain number PyTorch divides on a GPU as it multiplies by the inverse: two roundings."""
    x = torch.linspace(-1, 1, 12 * 100, dtype=torch.float32, device=DEVICE)
    geometry, vector = Geometry(12, 1, 1200), torch.zeros(12, dtype=torch.float32, device=DEVICE)
    running = Running(vector.clone(), vector.clone() + 1, 0.1)
    moments = RowMoments(1e-5, centred=True)
    affine = Affine(*torch.empty(2, 12, dtype=torch.float32, device=DEVICE).unbind(), 100)
    products = gpu_norm.RowProducts(x, 100, None, summing=False)
    products.sums.fill_(1), products.products.fill_(1)
    wide = vector.double()
    with Divisions() as divisions:
        device_normalised.take_statistics(x, geometry, 1e-5, running)
        device_normalised.take_factors(Sums(wide, wide), geometry, vector, None, (None, None))
        gpu_norm.measure_rows(x, affine, moments.epsilon, centred=moments.centred)
        gpu_norm.row_factors(products, affine.scale, centred=True)
        assert divisions.by_numbers == []
        assert float((x[:1] / 3)[0]) < 0
    assert divisions.by_numbers == [3]  # the mode does see them


def test_what_the_kernels_refuse() -> None:
    x = torch.zeros(600, dtype=torch.float32, device=DEVICE)
    forward = Affine(x[:3] + 1, x[:3] + 1, 1)
    with pytest.raises(KernelError, match="give the input's own type"):
        gpu_norm.emit(x, forward, x.half())
    with pytest.raises(KernelError, match="give a range within"):
        gpu_norm.derive(x, forward, x, blocks=(0, 4))
    with pytest.raises(KernelError, match="give a length that divides"):
        gpu_norm.row_sums(x, 7)
    summing = gpu_norm.RowProducts(x, 2, None, summing=False)
    assert summing.columns() is None
    with pytest.raises(KernelError, match="spans have 512"):
        summing.add(gpu_norm.Values(x[:256], (0, 1)))
