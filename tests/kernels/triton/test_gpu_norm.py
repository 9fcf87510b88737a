"""Normalisations on a GPU (or interpreted) against the oracle: byte for byte, part by part."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from reference import channel_norm as reference_norm
from reference import codecs as reference
from reference import row_norm as reference_rows
from reference.elements import Floats, narrow, widen
from reference.reductions import Sums, measure_products
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from daf.core.code_format import ElementType, block_count
from daf.core.errors import KernelError

pytest.importorskip("triton", reason="triton is not installed: daf-train[gpu]")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("no CUDA device; test_gpu_interpreted runs these", allow_module_level=True)

from backends import coding_by_triton
from device_cases import (
    DEVICE,
    allocate_flat,
    bytes_of,
    check_guard,
    elements,
    gathered,
    in_pages,
    make_affine,
    poisoned,
    to_device,
)

from daf.kernels.normalisation import (
    Channels,
    Decoding,
    Geometry,
    KeptValues,
    MaskedGradient,
    NormOutput,
    RowBackward,
    RunningStatistics,
)
from daf.kernels.normalisation import Sums as DeviceSums
from daf.kernels.triton import norms as triton_norm
from daf.kernels.triton.backend import TritonBackend
from daf.kernels.triton.planes import DevicePlanes

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
    planes = allocate_flat(count, 1, headers=False)
    planes.region.copy_(to_device(words).view(planes.region.shape))
    return words, planes


def parts_of(count: int, step: int) -> list[tuple[int, int]]:
    """Blocks [first, last) of a tensor, so many at a time."""
    blocks = block_count(count)
    return [(first, min(first + step, blocks)) for first in range(0, blocks, step)]


def value_parts(
    values: Floats, x: Floats, forward: Channels, kind: ElementType, step: int, *, kept: bool
) -> Iterator[triton_norm.Values]:
    """The values decoded, or the input that they are computed from."""
    for first, last in parts_of(len(x), step):
        part = to_device(values[first * 256 : last * 256])
        if kept:
            yield triton_norm.Values(elements(narrow(x, kind), kind), (first, last), forward)
        else:
            yield triton_norm.Values(part, (first, last))


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
        output = NormOutput(found, result, given, None if most is None else mask, bound)
        triton_norm.emit(source, theirs, output)
        assert bytes_of(found) == narrow(expected.result, kind).tobytes()
        check_guard(found)
        triton_norm.emit(source, theirs, output._replace(out=source))
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
            decoding = Decoding(found, result, chosen, before is not None, blocks)
            triton_norm.derive(source, theirs, decoding)
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
        sums = triton_norm.ChannelProducts(given, channels, inner)
        step = 2 * sums.span_blocks
        for part in value_parts(values, x, theirs, kind, step, kept=kept):
            sums.add(part, chosen)
        masked = reference_norm.masked(gradient, bits)
        expected = measure_products(masked, values, channels, inner)
        found = [total.cpu().numpy().tobytes() for total in sums.totals()]
        assert found == [expected.sums.tobytes(), expected.squares.tobytes()]
    with pytest.raises(KernelError, match="spans have"):
        sums.add(triton_norm.Values(to_device(values[:256]), (1, 2)), None)


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
                triton_norm.write_gradient(
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
    affine = reference_rows.row_affine(x, length, 1e-5, centred=centred)
    measured = Channels(
        *torch.full((2, rows), 7.0, dtype=torch.float32, device=DEVICE).unbind(), length
    )
    triton_norm.measure_rows(elements(narrow(x, kind), kind), measured, 1e-5, centred=centred)
    assert bytes_of(measured.scale) == affine.scale.tobytes()
    assert bytes_of(measured.shift) == affine.shift.tobytes()

    values = affine.apply(x, 0)
    theirs = Channels(to_device(affine.scale), to_device(affine.shift), length)
    given = elements(narrow(gradient, kind), kind)
    for weight, kept in ((None, True), (gamma, False)):
        expected = reference_rows.row_gradients(
            values, gradient, affine.scale, weight, centred=centred
        )
        on_device = None if weight is None else to_device(weight)
        job = RowBackward(length, centred, given, None, on_device, theirs.scale, summing=True)
        products = triton_norm.RowProducts(job)
        step = products.span_blocks
        for part in value_parts(values, x, theirs, kind, step, kept=kept):
            products.add(part)
        columns = products.columns()
        assert columns is not None
        found = [each.cpu().numpy().tobytes() for each in columns]
        assert found == [expected.beta.tobytes(), expected.gamma.tobytes()]
        of_value = products.of_value
        written = poisoned(count, kind)
        for part in value_parts(values, x, theirs, kind, step, kept=kept):
            triton_norm.write_gradient(
                given, part, written, theirs.scale, of_value, gamma=on_device
            )
        assert bytes_of(written) == narrow(expected.x, kind).tobytes()
        check_guard(written)


# --- vectors --------------------------------------------------------------------------------


def awkward_sums(channels: int, seed: int) -> list[np.ndarray]:
    """Sums and those of squares: ordinary, of rounding below zero, of nothing, infinite, NaN."""
    random = np.random.default_rng(seed)
    sums = random.normal(0, 100, channels)
    squares = sums**2 / 50 + random.uniform(0, 50, channels)
    if channels > 5:
        squares[:5] = sums[0] ** 2 / 50 * (1 - 1e-12), 0.0, np.inf, np.nan, 5.0
        sums[1:4] = 0.0, np.inf, 1.0
    return [sums, squares]


@pytest.mark.parametrize(("channels", "count"), [(3, 2), (200, 50), (1, 3_000_000_019)])
@pytest.mark.parametrize("epsilon", [1e-5, 0.0, 0.3])
def test_statistics_of_sums_are_the_oracle_s(channels, count, epsilon) -> None:
    sums, squares = awkward_sums(channels, count % 7)
    ours = DeviceSums(*(to_device(each) for each in (sums, squares)))
    theirs = Sums(sums, squares)
    running = [np.linspace(-1, 2, channels, dtype=np.float32) for _ in range(2)]
    plain = triton_norm.channel_statistics(ours, count, epsilon, None)
    expected = reference_norm.statistics_of_sums(theirs, count, epsilon)
    assert [bytes_of(each) for each in plain] == [each.tobytes() for each in expected[:2]]
    for momentum in (0.1, 1.0, 1 / 3):
        followed = RunningStatistics(*(to_device(each.copy()) for each in running), momentum)
        found = triton_norm.channel_statistics(ours, count, epsilon, followed)
        expected = reference_norm.statistics_of_sums(
            theirs, count, epsilon, (running[0], running[1]), momentum
        )
        everything = [*found, followed.mean, followed.variance]
        assert [bytes_of(each) for each in everything] == [each.tobytes() for each in expected]


@pytest.mark.parametrize("channels", [1, 7, 300])
@pytest.mark.parametrize("count", [1, 3, 1 << 33])
def test_factors_of_sums_are_the_oracle_s(cases, channels, count) -> None:
    sums, products = awkward_sums(channels, channels)
    inverse = np.abs(cases.gaussian(channels, 3))
    gammas = None, cases.gaussian(channels, 5)
    for gamma, writes in product(gammas, product((False, True), repeat=2)):
        expected = reference_norm.factors_of_sums(Sums(sums, products), count, inverse, gamma)
        written = [to_device(np.zeros(channels, np.float32)) if each else None for each in writes]
        of_value, of_gradient = triton_norm.channel_factors(
            DeviceSums(to_device(sums), to_device(products)),
            Geometry(channels, 1, count * channels),
            to_device(inverse),
            None if gamma is None else to_device(gamma),
            (written[0], written[1]),
        )
        found = (of_value.scale, of_value.shift, of_gradient.scale)
        assert [bytes_of(each) for each in found] == [each.tobytes() for each in expected[:3]]
        for mine, own in zip(written, expected[3:], strict=True):
            assert mine is None or bytes_of(mine) == own.tobytes()


class Operators(TorchDispatchMode):
    """Notes every operator of PyTorch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        self.names.add(function.name().removeprefix("aten::").split(".")[0])
        return function(*arguments, **(keywords or {}))


@pytest.fixture
def kernels_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter copies tensors to and fro by operators of PyTorch's."""
    if not INTERPRETED:
        return
    from triton.runtime.interpreter import GridExecutor

    run = GridExecutor.__call__

    def unseen(*arguments: Any, **keywords: Any) -> None:
        with _disable_current_modes():
            run(*arguments, **keywords)

    monkeypatch.setattr(GridExecutor, "__call__", unseen)


VIEWS = {"select", "unbind", "view", "as_strided", "detach", "slice", "alias"}


@pytest.mark.usefixtures("kernels_unseen")
def test_a_normalisation_runs_its_own_kernels_and_no_operators_beside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each would cost a start of its own; and by a plain number PyTorch divides on a GPU as it
    multiplies by the inverse: two roundings.
    """
    x = torch.linspace(-1, 1, 12 * 100, dtype=torch.float32, device=DEVICE)
    geometry, vector = Geometry(12, 1, 1200), torch.zeros(12, dtype=torch.float32, device=DEVICE)
    running = RunningStatistics(vector.clone(), vector.clone() + 1, 0.1)
    affine = Channels(*torch.empty(2, 12, dtype=torch.float32, device=DEVICE).unbind(), 100)
    versions = [each._version for each in running[:2]]
    backend = TritonBackend()
    if INTERPRETED:
        coding_by_triton(monkeypatch)
    with Operators() as seen:
        statistics = backend.channel_statistics(x, geometry, 1e-5, running)
        values = KeptValues(x, statistics.forward(1))
        sums = backend.sum_gradient(values, MaskedGradient(x, None, None), geometry)
        backend.gradient_factors(
            sums, geometry, statistics.inverse_deviation, vector, (vector, None)
        )
        triton_norm.measure_rows(x, affine, 1e-5, centred=True)
        products = triton_norm.RowProducts(row_job(x, affine.scale, 100))
        products.add(triton_norm.Values(x, (0, block_count(1200)), affine))
        beside = seen.names - VIEWS
        assert (x[:1] / 3).isfinite().all()
    assert beside - {"mul", "neg"} <= {"empty", "zeros", "zero_", "new_empty"}, beside
    assert "div" in seen.names  # the mode does see them
    assert [each._version for each in running[:2]] == versions  # as after PyTorch's own


def row_job(gradient: torch.Tensor, scale: torch.Tensor, length: int) -> RowBackward:
    """The backward of centred rows without gamma or sums."""
    return RowBackward(length, True, gradient, None, None, scale, summing=False)


def test_what_the_kernels_refuse() -> None:
    x = torch.zeros(600, dtype=torch.float32, device=DEVICE)
    forward = Channels(x[:3] + 1, x[:3] + 1, 1)
    with pytest.raises(KernelError, match="give the input's own type"):
        triton_norm.emit(x, forward, NormOutput(x.half()))
    with pytest.raises(KernelError, match="give a range within"):
        triton_norm.derive(x, forward, Decoding(x, blocks=(0, 4)))
    with pytest.raises(KernelError, match="give a length that divides"):
        triton_norm.RowProducts(row_job(x, x[:1], 7))
    with pytest.raises(KernelError, match="300 rows by 7 scales"):
        triton_norm.RowProducts(row_job(x, x[:7], 2))
    with pytest.raises(KernelError, match="300 rows into 3 places"):
        triton_norm.measure_rows(x, Channels(x[:3], x[:3], 2), 1e-5, centred=True)
    summing = triton_norm.RowProducts(row_job(x, x[:300], 2))
    assert summing.columns() is None
    with pytest.raises(KernelError, match="spans have 512"):
        summing.add(triton_norm.Values(x[:256], (0, 1)))
