"""A normalisation's kernels against the oracle, byte for byte, under every instruction set."""

from __future__ import annotations

import ctypes
import math
from functools import partial
from typing import Any, NamedTuple

import native_calls
import numpy as np
import pytest
import torch
from daf_bench.pool.plane_addresses import Pages
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import channel_norm as reference_norm
from reference import codecs as reference
from thoroughness import pairs

from daf.core.code_format import ElementType, words_per_plane
from daf.core.errors import KernelError
from daf.kernels.cpu import reductions
from daf.kernels.cpu.instruction_sets import instruction_sets, use_instruction_set
from daf.kernels.normalisation import NormOutput
from daf.pool.paged_pool import PagedStore
from daf.pool.store import PlainStore

KEY = 0xFEDCBA9876543210
F32 = ElementType.FLOAT32
# (count, channels, inner): channels-last and contiguous, ragged, one element, many blocks.
GEOMETRIES = (
    (1, 1, 1),
    (48, 16, 1),
    (255, 5, 3),
    (4096, 64, 1),
    (5000, 7, 1),
    (6144, 24, 4),
    (3 * 4096 + 768, 3, 256),
    (30_001, 96, 1),
    (9_000, 320, 1),
    (9_000, 2_100, 1),  # more channels than are laid out anew
)
INPUTS = ("mixed", "broken")


class Case(NamedTuple):
    """A normalisation: its input, the maps before and behind the values, addend and gradient."""

    x: np.ndarray
    channels: int
    inner: int
    forward: reference.Affine
    result: reference.Affine
    addend: np.ndarray
    gradient: np.ndarray

    @property
    def count(self) -> int:
        return len(self.x)

    @property
    def values(self) -> np.ndarray:
        return self.forward.apply(self.x, 0)


def make_case(cases, count: int, channels: int, inner: int, kind: str = "smooth") -> Case:
    scales = [cases.gaussian(channels, seed) for seed in range(4)]
    return Case(
        getattr(cases, kind)(max(count, 16))[:count],
        channels,
        inner,
        reference.Affine(scales[0], scales[1], inner),
        reference.Affine(scales[2], scales[3], inner),
        cases.gaussian(count, 8),
        cases.gaussian(count, 9),
    )


def same_bytes(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(
        np.ascontiguousarray(found).view(np.uint8), np.ascontiguousarray(expected).view(np.uint8)
    )


def mask_words(planes, count: int) -> np.ndarray:
    """(1, words) of a mask, its runs put together."""
    with planes.pinned() as view:
        found, start = np.zeros(words_per_plane(count), np.uint32), 0
        for run in range(Pages(view).runs):
            size = min(len(found) - start, Pages(view).run_elements // 32)
            words = (ctypes.c_uint32 * size).from_address(Pages(view).planes(run)[0])
            found[start : start + size] = words
            start += size
    return found.reshape(1, -1)


STORES = {"flat": PlainStore, "pages": lambda: PagedStore(page_bytes=512)}


class Room:
    """Guarded memory of a case's result and gradient, and planes for its code and mask."""

    def __init__(self, cases, case: Case, bits: int = 2, store: str = "pages") -> None:
        self.case, self.store = case, STORES[store]()
        self.out = cases.guarded(case.count, np.float32, offset=4)
        self.addend = cases.guarded(case.count, np.float32, offset=8).fill(case.addend)
        self.gradient = cases.guarded(case.count, np.float32, offset=12).fill(case.gradient)
        self.code = self.store.allocate_planes(case.count, bits, minimum_bits=1)
        self.mask = self.store.allocate_planes(case.count, 1, headers=False)

    def emission(self, *, addend: bool, rectify: bool, most: float = math.inf) -> NormOutput:
        return native_calls.output(
            self.out.address,
            self.addend.address if addend else 0,
            native_calls.affine_of(self.case.result),
            most,
            self.mask.view.fields if rectify else None,
        )

    def seal(self) -> None:
        self.code.seal()
        self.mask.seal()


def oracle_of(
    case: Case, *, addend: bool, rectify: bool, most: float = math.inf
) -> reference_norm.Emitted:
    extra = case.addend if addend else None
    return reference_norm.emit(case.values, case.result, extra, rectify, most)


@pytest.mark.parametrize(("geometry", "codec"), pairs(GEOMETRIES, ["rotated", "minmax", "none"]))
@pytest.mark.parametrize(("addend", "rectify"), [(False, True), (True, True), (False, False)])
def test_forward_is_the_oracle_s(cases, on_every_set, codec, addend, rectify, geometry) -> None:
    for kind in INPUTS:
        case = make_case(cases, *geometry, kind)
        expected = oracle_of(case, addend=addend, rectify=rectify)
        code = code_of(case, codec)

        def check(case=case, expected=expected, code=code) -> None:
            room = Room(cases, case)
            run_forward(case, room, codec, room.emission(addend=addend, rectify=rectify))
            same_bytes(room.out.opened(), expected.result)
            if rectify:
                same_bytes(mask_words(room.mask, case.count), expected.mask)
            if code is not None:
                assert_planes(room, code)

        on_every_set(check)


def code_of(case: Case, codec: str) -> reference.Code | None:
    if codec == "none":
        return None
    if codec == "rotated":
        return reference.encode_rotated(case.x, 2, KEY, case.forward)
    return reference.encode_minmax(case.x, 2, KEY, case.forward)


def run_forward(case: Case, room: Room, codec: str, emission: NormOutput) -> None:
    source, before, fields = (
        case.x.ctypes.data,
        native_calls.affine_of(case.forward),
        room.code.view.fields,
    )
    if codec == "none":
        native_calls.emit(source, case.count, before, emission, 1)
    elif codec == "rotated":
        native_calls.encode_rotated(source, F32, fields, KEY, 1, before, emission=emission)
    else:
        native_calls.encode_minmax(source, F32, fields, KEY, 1, before, emission=emission)
    room.seal()


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize(("addend", "rectify"), [(False, True), (True, True), (False, False)])
def test_the_result_is_derived_again_bit_for_bit(
    cases, instruction_set, addend, rectify, geometry
) -> None:
    """All of it, and every stretch of blocks by itself; onto an addend that lies there."""
    for kind in INPUTS:
        case = make_case(cases, *geometry, kind)
        room = Room(cases, case)
        source, maps = (
            case.x.ctypes.data,
            (native_calls.affine_of(case.forward), native_calls.affine_of(case.result)),
        )
        emission = room.emission(addend=addend, rectify=rectify)
        native_calls.emit(source, case.count, maps[0], emission, 1)
        room.seal()
        written = room.out.opened()
        mask = mask_words(room.mask, case.count) if rectify else None
        before = case.addend if addend else None
        same_bytes(reference_norm.derive(case.values, case.result, before, mask), written)
        total = -(-case.count // 256)
        with room.mask.pinned() as view:
            fields = view.fields if rectify else None
            for blocks in (None, (0, total), (total // 3, total), (total // 2, total // 2 + 1)):
                first, last = blocks or (0, total)
                there = slice(256 * first, min(256 * last, case.count))
                if there.start >= case.count:
                    continue
                size = there.stop - there.start
                out = cases.guarded(size, np.float32, offset=4)
                if addend:
                    out.fill(case.addend[there])
                native_calls.derive(
                    *(source, case.count, *maps, out.address, 1, fields),
                    accumulate=addend,
                    blocks=blocks,
                )
                same_bytes(out.opened(), written[there])


def test_only_blocks_that_there_are_are_derived(cases) -> None:
    case = make_case(cases, 5000, 7, 1)
    room = Room(cases, case)
    with pytest.raises(KernelError, match="the tensor has 20"):
        native_calls.derive(
            *(case.x.ctypes.data, case.count, None, None, room.out.address, 1), blocks=(3, 21)
        )
    with pytest.raises(KernelError, match="destination"):
        native_calls.derive(case.x.ctypes.data, case.count, None, None, 0, 1)


@pytest.mark.parametrize("addend", [False, True])
@pytest.mark.parametrize("most", [0.25, 6.0])
def test_a_rectifier_with_an_upper_bound(cases, instruction_set, most, addend) -> None:
    for kind in INPUTS:
        case = make_case(cases, 30_001, 96, 1, kind)
        room = Room(cases, case)
        emission = room.emission(addend=addend, rectify=True, most=most)
        native_calls.emit(
            case.x.ctypes.data, case.count, native_calls.affine_of(case.forward), emission, 1
        )
        room.seal()
        expected = oracle_of(case, addend=addend, rectify=True, most=most)
        same_bytes(room.out.opened(), expected.result)
        same_bytes(mask_words(room.mask, case.count), expected.mask)
        values = torch.from_numpy(
            reference_norm.emit(
                case.values, case.result, case.addend if addend else None, False
            ).result
        ).requires_grad_()
        passed = torch.nn.functional.hardtanh(values, 0.0, most)
        passed.sum().backward()
        np.testing.assert_array_equal(expected.result, passed.detach().numpy())
        bits = np.unpackbits(expected.mask.view(np.uint8), bitorder="little")[: case.count]
        number = ~np.isnan(expected.result)  # PyTorch's own kernels differ about NaN
        np.testing.assert_array_equal(bits[number], values.grad.numpy()[number])


@pytest.mark.parametrize("most", [0.0, -1.0, math.nan])
def test_a_bound_that_lets_nothing_pass_is_refused(cases, most) -> None:
    case = make_case(cases, 256, 16, 1)
    room = Room(cases, case)
    emission = room.emission(addend=False, rectify=True, most=most)
    with pytest.raises(KernelError, match="give a bound above 0"):
        native_calls.emit(
            case.x.ctypes.data, case.count, native_calls.affine_of(case.forward), emission, 1
        )
    without = room.emission(addend=False, rectify=False, most=6.0)
    with pytest.raises(KernelError, match="and a mask"):
        native_calls.emit(
            case.x.ctypes.data, case.count, native_calls.affine_of(case.forward), without, 1
        )


def assert_planes(room: Room, code: reference.Code) -> None:
    """The emission changed nothing of the code: it decodes to what the oracle's decodes to."""
    count = room.case.count
    with room.code.pinned() as view:
        start = 0
        for run in range(Pages(view).runs):
            size = min(words_per_plane(count) - start, Pages(view).run_elements // 32)
            for plane, place in enumerate(Pages(view).planes(run)):
                words = np.array((ctypes.c_uint32 * size).from_address(place), np.uint32)
                same_bytes(words, code.planes[plane, start : start + size])
            headers = np.array(
                (ctypes.c_uint16 * (size // 4)).from_address(Pages(view).headers(run))
            )
            same_bytes(headers, code.headers.reshape(-1)[start // 4 : (start + size) // 4])
            start += size


class Sums:
    """Guarded room for the sums of a first pass."""

    def __init__(self, cases, case: Case, threads: int = 1) -> None:
        geometry = (case.channels, case.inner)
        size = reductions.sums_workspace_bytes(case.count, threads, *geometry)
        self._sums = cases.guarded(case.channels, np.float64)
        self._products = cases.guarded(case.channels, np.float64)
        self._workspace = cases.guarded(size, np.uint8)
        at = (self._sums.address, self._products.address, self._workspace.address)
        self.where = native_calls.channel_sums(*geometry, *at)

    def same_as(self, expected) -> None:
        same_bytes(self._sums.opened(), expected.sums)
        same_bytes(self._products.opened(), expected.squares)
        self._workspace.opened()


class Held(NamedTuple):
    """Where backward's values come from, and what they are."""

    values: np.ndarray
    run: object


def held(case: Case, room: Room, codec: str, threads: int = 1) -> Held:
    """Code the case's values (or keep its input); the mask is every third bit and more."""
    before, source = native_calls.affine_of(case.forward), case.x.ctypes.data
    if codec == "kept":
        return Held(
            case.values,
            lambda g: native_calls.backward_kept(source, case.count, before, g, threads),
        )
    fields = room.code.view.fields
    if codec == "rotated":
        native_calls.encode_rotated(source, F32, fields, KEY, 1, before)
        code = reference.encode_rotated(case.x, fields.bits, KEY, case.forward)
        values = reference.decode_rotated(code, reference.Target(case.count), fields.bits, KEY)
        room.code.seal()

        def run(gradient: Any) -> None:
            with room.code.pinned() as view:
                native_calls.backward_rotated(view.fields, KEY, gradient, threads)
    else:
        native_calls.encode_minmax(source, F32, fields, KEY, 1, before)
        code = reference.encode_minmax(case.x, fields.bits, KEY, case.forward)
        values = reference.decode_minmax(code, reference.Target(case.count), fields.bits)
        room.code.seal()

        def run(gradient: Any) -> None:
            with room.code.pinned() as view:
                native_calls.backward_minmax(view.fields, gradient, threads)

    return Held(values, run)


def make_mask(case: Case, room: Room) -> np.ndarray:
    emission = room.emission(addend=True, rectify=True)
    native_calls.emit(
        case.x.ctypes.data, case.count, native_calls.affine_of(case.forward), emission, 1
    )
    room.mask.seal()
    return mask_words(room.mask, case.count)


@pytest.mark.parametrize(("geometry", "codec"), pairs(GEOMETRIES, ["rotated", "minmax", "kept"]))
@pytest.mark.parametrize("masked", [False, True])
def test_backward_is_the_oracle_s(cases, on_every_set, codec, masked, geometry) -> None:
    for kind in ("smooth", "broken"):
        case = make_case(cases, *geometry, kind)
        room = Room(cases, case, bits=3)
        mask = make_mask(case, room) if masked else None
        values, run = held(case, room, codec)
        shape = (case.channels, case.inner)
        passed = reference_norm.masked(case.gradient, mask)
        expected_sums = reference_norm.gradient_sums(values, case.gradient, mask, *shape)
        expected = reference_norm.input_gradient(
            values, case.gradient, mask, case.forward, case.result
        )
        answers = (passed, expected_sums, expected)
        on_every_set(partial(check_backward, cases, case, room, run, masked, answers))


def check_backward(cases, case, room, run, masked, answers) -> None:
    passed, expected_sums, expected = answers
    gradient = cases.guarded(case.count, np.float32, offset=12).fill(case.gradient)
    sums, written = Sums(cases, case), cases.guarded(case.count, np.float32, offset=4)
    with room.mask.pinned() as view:
        where = view.fields if masked else None
        at, there = gradient.address, written.address
        run(native_calls.gradient_pass(at, there, sums=sums.where, mask=where))
        same_bytes(written.opened(), passed)
        sums.same_as(expected_sums)
        factors = (native_calls.affine_of(case.forward), native_calls.affine_of(case.result))
        run(native_calls.gradient_pass(at, at, *factors, mask=where))  # onto the gradient itself
    same_bytes(gradient.opened(), expected)


def test_threads_change_nothing(cases, instruction_set) -> None:
    case = make_case(cases, 4 * 256 * 256 + 99, 64, 1)
    for threads in (1, 2, 3, 4):
        room = Room(cases, case)
        fields, emission = room.code.view.fields, room.emission(addend=True, rectify=True)
        before, source = native_calls.affine_of(case.forward), case.x.ctypes.data
        native_calls.encode_rotated(source, F32, fields, KEY, threads, before, emission=emission)
        room.seal()
        expected = oracle_of(case, addend=True, rectify=True)
        same_bytes(room.out.opened(), expected.result)
        code = reference.encode_rotated(case.x, 2, KEY, case.forward)
        values = reference.decode_rotated(code, reference.Target(case.count), 2, KEY)
        sums = Sums(cases, case, threads)
        with room.code.pinned() as view, room.mask.pinned() as mask:
            at = room.gradient.address
            gradient = native_calls.gradient_pass(at, at, sums=sums.where, mask=mask.fields)
            native_calls.backward_rotated(view.fields, KEY, gradient, threads)
        sums.same_as(
            reference_norm.gradient_sums(values, case.gradient, expected.mask, case.channels, 1)
        )
        same_bytes(room.gradient.opened(), reference_norm.masked(case.gradient, expected.mask))


def test_planes_given_up_are_not_read(cases, instruction_set) -> None:
    """Some runs have lost a plane: backward reads what is left, with the shorter code's levels."""
    case = make_case(cases, 40 * 4096, 64, 1)
    room = Room(cases, case)
    source, before = case.x.ctypes.data, native_calls.affine_of(case.forward)
    native_calls.encode_rotated(source, F32, room.code.view.fields, KEY, 1, before)
    room.seal()
    room.store.evict(5 * 512)
    decoded = np.empty(case.count, np.float32)
    sums = Sums(cases, case)
    with room.code.pinned() as view:
        assert 0 < view.fields.full_runs < view.fields.runs
        native_calls.decode_rotated(view.fields, KEY, decoded.ctypes.data, F32, 1)
        native_calls.backward_rotated(
            view.fields, KEY, native_calls.gradient_pass(room.gradient.address, sums=sums.where), 1
        )
    sums.same_as(reference_norm.gradient_sums(decoded, case.gradient, None, case.channels, 1))


@settings(max_examples=30, deadline=None)
@given(
    count=st.integers(1, 3000),
    channels=st.integers(1, 70),
    inner=st.integers(1, 40),
    addend=st.booleans(),
    store=st.sampled_from(sorted(STORES)),
)
def test_any_shape(cases, count, channels, inner, addend, store) -> None:
    case = make_case(cases, count, channels, inner)
    expected = oracle_of(case, addend=addend, rectify=True)
    code = reference.encode_rotated(case.x, 2, KEY, case.forward)
    values = reference.decode_rotated(code, reference.Target(count), 2, KEY)
    sums_expected = reference_norm.gradient_sums(
        values, case.gradient, expected.mask, channels, inner
    )
    for name in instruction_sets():
        with use_instruction_set(name):
            room = Room(cases, case, store=store)
            fields, emission = room.code.view.fields, room.emission(addend=addend, rectify=True)
            before, source = native_calls.affine_of(case.forward), case.x.ctypes.data
            native_calls.encode_rotated(source, F32, fields, KEY, 1, before, emission=emission)
            room.seal()
            same_bytes(room.out.opened(), expected.result)
            same_bytes(mask_words(room.mask, count), expected.mask)
            sums = Sums(cases, case)
            with room.code.pinned() as view, room.mask.pinned() as mask:
                at = room.gradient.address
                gradient = native_calls.gradient_pass(at, sums=sums.where, mask=mask.fields)
                native_calls.backward_rotated(view.fields, KEY, gradient, 1)
            sums.same_as(sums_expected)


def test_calls_outside_the_contract_are_refused(cases) -> None:
    case = make_case(cases, 5000, 7, 1)
    room = Room(cases, case)
    at = room.gradient.address
    with pytest.raises(KernelError, match="factors"):
        native_calls.backward_kept(
            case.x.ctypes.data, case.count, None, native_calls.gradient_pass(at, at), 1
        )
    with pytest.raises(KernelError, match="gradient"):
        native_calls.backward_kept(
            case.x.ctypes.data, case.count, None, native_calls.gradient_pass(0), 1
        )
    with pytest.raises(KernelError, match="destination"):
        native_calls.emit(case.x.ctypes.data, case.count, None, native_calls.output(0), 1)
    other = PlainStore().allocate_planes(256, 1, headers=False)
    emission = native_calls.output(room.out.address, mask=other.view.fields)
    with pytest.raises(KernelError, match="mask"):
        native_calls.emit(case.x.ctypes.data, case.count, None, emission, 1)
