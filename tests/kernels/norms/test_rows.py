"""The kernels of row normalisations against the oracle, byte for byte, in every instruction set."""

from __future__ import annotations

from typing import NamedTuple

import native_calls
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import channel_norm as reference_norm
from reference import codecs as reference
from reference import row_norm as reference_rows

from daf.core.code_format import ElementType
from daf.core.errors import KernelError
from daf.kernels import RowMoments
from daf.kernels.cpu import reductions
from daf.kernels.cpu.instruction_sets import instruction_sets, use_instruction_set
from daf.pool.paged_pool import PagedStore

KEY = 0xFEDCBA9876543210
F32 = ElementType.FLOAT32
EPSILON = 1e-5
# (rows, length): one element, shorter and longer than a block, aligned with blocks and not, spans.
SHAPES = ((1, 1), (3, 5), (7, 64), (1, 1000), (5, 256), (6, 384), (300, 33), (600, 17), (9, 1024))
CODECS = ("rotated", "minmax", "kept")


class Case(NamedTuple):
    """Rows to normalise, gamma and beta, and the result's gradient."""

    x: np.ndarray
    length: int
    centred: bool
    gamma: np.ndarray
    beta: np.ndarray
    gradient: np.ndarray

    @property
    def count(self) -> int:
        return len(self.x)

    @property
    def affine(self) -> reference.Affine:
        return reference_rows.row_affine(self.x, self.length, EPSILON, centred=self.centred)

    @property
    def values(self) -> np.ndarray:
        return self.affine.apply(self.x, 0)

    @property
    def result(self) -> reference.Affine:
        return reference.Affine(self.gamma, self.beta, 1)


def make_case(cases, row_count: int, length: int, *, centred: bool, kind: str = "smooth") -> Case:
    count = row_count * length
    x = getattr(cases, kind)(max(count, 16))[:count]
    vectors = (cases.gaussian(length, seed) for seed in (3, 4))
    return Case(x, length, centred, *vectors, cases.gaussian(count, 9))


def same_bytes(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(
        np.ascontiguousarray(found).view(np.uint8), np.ascontiguousarray(expected).view(np.uint8)
    )


class Forward:
    """Runs one forward pass in guarded memory; the code's planes stay for backward."""

    def __init__(self, cases, case: Case, codec: str, threads: int = 1, bits: int = 2) -> None:
        row_count = case.count // case.length
        self.scale, self.shift = (cases.guarded(row_count, np.float32, 4) for _ in range(2))
        self.out = cases.guarded(case.count, np.float32, offset=8)
        self.x = cases.guarded(case.count, np.float32, offset=12).fill(case.x)
        self.store = PagedStore(page_bytes=512)
        self.planes = self.store.allocate_planes(case.count, bits, minimum_bits=1)
        at = (self.scale.address, self.shift.address)
        self.affine = native_calls.vectors(row_count, case.length, *at)
        result = native_calls.affine_of(case.result)
        emission = native_calls.output(self.out.address, affine=result)
        moments, fields = RowMoments(EPSILON, case.centred), self.planes.view.fields
        source, options = self.x.address, (threads, self.affine)
        if codec == "kept":
            native_calls.emit(source, case.count, self.affine, emission, threads, moments)
        elif codec == "rotated":
            native_calls.encode_rotated(source, F32, fields, KEY, *options, emission, moments)
        else:
            native_calls.encode_minmax(source, F32, fields, KEY, *options, emission, moments)
        self.planes.seal()


def decoded(case: Case, codec: str, bits: int = 2) -> np.ndarray:
    """The oracle's values for backward."""
    target = reference.Target(case.count)
    if codec == "kept":
        return case.values
    if codec == "rotated":
        code = reference.encode_rotated(case.x, bits, KEY, case.affine)
        return reference.decode_rotated(code, target, bits, KEY)
    return reference.decode_minmax(
        reference.encode_minmax(case.x, bits, KEY, case.affine), target, bits
    )


def run_backward(cases, case: Case, done: Forward, codec: str, *, threads: int = 1, **what):
    """(input's gradient or None, beta's, gamma's), in guarded memory."""
    gradient = cases.guarded(case.count, np.float32, offset=4).fill(case.gradient)
    other = cases.guarded(case.count, np.float32, offset=8)
    sums, products = (cases.guarded(case.length, np.float64) for _ in range(2))
    size = reductions.rows_workspace_bytes(case.count, case.length, threads)
    workspace = cases.guarded(size, np.uint8, offset=1)
    target = {"over": gradient.address, "beside": other.address, "none": 0}[what["target"]]
    asked = native_calls.row_gradient(
        case.length,
        centred=case.centred,
        gradient=gradient.address,
        destination=target,
        gamma=case.gamma.ctypes.data if what["gamma"] else 0,
        scale=done.scale.address,
        sums=sums.address if what.get("summing", True) else 0,
        products=products.address if what.get("summing", True) else 0,
        workspace=workspace.address,
    )
    with done.planes.pinned() as view:
        if codec == "kept":
            native_calls.backward_kept(done.x.address, case.count, done.affine, asked, threads)
        elif codec == "rotated":
            native_calls.backward_rotated(view.fields, KEY, asked, threads)
        else:
            native_calls.backward_minmax(view.fields, asked, threads)
    workspace.opened()
    if what["target"] != "over":
        same_bytes(gradient.opened(), case.gradient)
    found = {"over": gradient, "beside": other, "none": None}[what["target"]]
    x = found.opened() if found is not None else None
    return x, sums.opened(), products.opened()


def expect_backward(case: Case, values: np.ndarray, *, gamma: bool) -> reference_rows.RowGradients:
    scale = case.affine.scale
    given = case.gamma if gamma else None
    return reference_rows.row_gradients(values, case.gradient, scale, given, centred=case.centred)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("codec", CODECS)
def test_both_passes_are_the_oracle_s(cases, on_every_set, codec, centred, shape) -> None:
    for kind in ("smooth", "mixed", "broken"):
        case = make_case(cases, *shape, centred=centred, kind=kind)
        emitted = reference_norm.emit(case.values, case.result, None, rectify=False)
        values = decoded(case, codec)
        passes = [
            (target, gamma, expect_backward(case, values, gamma=gamma))
            for target, gamma in (("over", True), ("beside", False))
        ]

        def check(case=case, emitted=emitted, passes=passes) -> None:
            done = Forward(cases, case, codec)
            same_bytes(done.scale.opened(), case.affine.scale)
            same_bytes(done.shift.opened(), case.affine.shift)
            same_bytes(done.out.opened(), emitted.result)
            for target, gamma, expected in passes:
                asked = {"target": target, "gamma": gamma}
                x, beta, of_gamma = run_backward(cases, case, done, codec, **asked)
                same_bytes(x, expected.x)
                same_bytes(beta, expected.beta)
                same_bytes(of_gamma, expected.gamma)

        on_every_set(check)


def test_without_a_destination_only_sums_are_taken(cases, instruction_set) -> None:
    case = make_case(cases, 40, 48, centred=True)
    done = Forward(cases, case, "rotated")
    x, beta, gamma = run_backward(cases, case, done, "rotated", target="none", gamma=True)
    expected = expect_backward(case, decoded(case, "rotated"), gamma=True)
    assert x is None
    same_bytes(beta, expected.beta)
    same_bytes(gamma, expected.gamma)


def test_without_sums_only_the_input_s_gradient_is_written(cases, instruction_set) -> None:
    case = make_case(cases, 40, 48, centred=False)
    done = Forward(cases, case, "minmax")
    asked = {"target": "over", "gamma": True, "summing": False}
    x, beta, gamma = run_backward(cases, case, done, "minmax", **asked)
    same_bytes(x, expect_backward(case, decoded(case, "minmax"), gamma=True).x)
    untouched = cases.guarded(case.length, np.float64).opened()
    same_bytes(beta, untouched)
    same_bytes(gamma, untouched)


@pytest.mark.parametrize("length", [1, 100, 512])
def test_threads_change_nothing(cases, length) -> None:
    case = make_case(cases, 1500, length, centred=True)
    values = decoded(case, "rotated")
    expected = expect_backward(case, values, gamma=True)
    emitted = reference_norm.emit(case.values, case.result, None, rectify=False)
    for threads in (1, 2, 3, 5):
        done = Forward(cases, case, "rotated", threads)
        same_bytes(done.out.opened(), emitted.result)
        asked = {"threads": threads, "target": "over", "gamma": True}
        x, beta, gamma = run_backward(cases, case, done, "rotated", **asked)
        same_bytes(x, expected.x)
        same_bytes(beta, expected.beta)
        same_bytes(gamma, expected.gamma)


def test_planes_given_up_are_not_read(cases, instruction_set) -> None:
    case = make_case(cases, 320, 512, centred=True)
    done = Forward(cases, case, "rotated")
    done.store.evict(5 * 512)
    values = np.empty(case.count, np.float32)
    with done.planes.pinned() as view:
        assert 0 < view.fields.full_runs < view.fields.runs
        native_calls.decode_rotated(view.fields, KEY, values.ctypes.data, F32, 1)
    x, _, gamma = run_backward(cases, case, done, "rotated", target="over", gamma=True)
    expected = expect_backward(case, values, gamma=True)
    same_bytes(x, expected.x)
    same_bytes(gamma, expected.gamma)


@settings(max_examples=40, deadline=None)
@given(
    row_count=st.integers(1, 40),
    length=st.integers(1, 700),
    centred=st.booleans(),
    codec=st.sampled_from(CODECS),
    gamma=st.booleans(),
)
def test_any_shape(cases, row_count, length, centred, codec, gamma) -> None:
    case = make_case(cases, row_count, length, centred=centred)
    expected = expect_backward(case, decoded(case, codec), gamma=gamma)
    for name in instruction_sets():
        with use_instruction_set(name):
            done = Forward(cases, case, codec)
            x, beta, of_gamma = run_backward(cases, case, done, codec, target="over", gamma=gamma)
        same_bytes(x, expected.x)
        same_bytes(beta, expected.beta)
        same_bytes(of_gamma, expected.gamma)


@pytest.mark.parametrize("centred", [True, False])
def test_the_oracle_is_the_derivative(cases, centred) -> None:
    """Central differences in float64 of a normalisation of rows, against the oracle's float32."""
    case = make_case(cases, 3, 20, centred=centred)
    x, weights = case.x.astype(np.float64), case.gradient.astype(np.float64)

    def loss(given: np.ndarray) -> float:
        each = given.reshape(-1, case.length)
        moved = each - each.mean(1, keepdims=True) if centred else each
        y = moved / np.sqrt((moved**2).mean(1, keepdims=True) + EPSILON)
        return float(((y * case.gamma + case.beta).reshape(-1) * weights).sum())

    step = 1e-6
    unit = np.eye(len(x)) * step
    slope = np.array([(loss(x + e) - loss(x - e)) / (2 * step) for e in unit])
    found = expect_backward(case, case.values, gamma=True)
    np.testing.assert_allclose(found.x, slope, rtol=2e-4, atol=2e-5 * np.abs(slope).max())
    y = case.values.reshape(3, -1)
    given = case.gradient.reshape(3, -1)
    np.testing.assert_allclose(found.gamma, (given * y).sum(0), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found.beta, given.sum(0), rtol=1e-5, atol=1e-5)


def test_calls_outside_the_contract_are_refused(cases) -> None:
    case = make_case(cases, 4, 8, centred=True)
    done = Forward(cases, case, "kept")
    at, moments = done.x.address, RowMoments(EPSILON, centred=True)
    emission = native_calls.output(done.out.address)
    with pytest.raises(KernelError, match="length that divides"):
        reductions.rows_workspace_bytes(33, 8, 1)
    with pytest.raises(KernelError, match="room for the affine"):
        native_calls.emit(at, case.count, None, emission, 1, moments)
    with pytest.raises(KernelError, match="room for the affine"):
        native_calls.emit(at, case.count, done.affine._replace(inner=4), emission, 1, moments)
    with pytest.raises(KernelError, match="epsilon"):
        native_calls.emit(at, case.count, done.affine, emission, 1, RowMoments(-1.0, centred=True))
    planes = PagedStore().allocate_planes(case.count, 2, minimum_bits=1)
    options = (planes.view.fields, KEY, 1, done.affine, emission, moments)
    with pytest.raises(KernelError, match="float32"):
        native_calls.encode_rotated(at, ElementType.FLOAT16, *options)
    good = {"length": 8, "centred": True, "scale": done.scale.address}
    good |= dict.fromkeys(("gradient", "destination", "sums", "products", "workspace"), at)
    for name in ("gradient", "scale", "sums", "products", "workspace"):
        asked = native_calls.row_gradient(**(good | {name: 0}))
        with pytest.raises(KernelError, match=name):
            native_calls.backward_kept(at, case.count, done.affine, asked, 1)
    asked = native_calls.row_gradient(**(good | {"length": 5}))
    with pytest.raises(KernelError, match="length that divides"):
        native_calls.backward_kept(at, case.count, done.affine, asked, 1)
