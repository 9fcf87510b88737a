"""Native kernels against the oracle, byte for byte, on every instruction set this machine has."""

from __future__ import annotations

import itertools
from functools import partial

import native_calls
import numpy as np
import pytest
from guarded import FlatCode
from native_calls import affine_of
from reference import codecs as reference
from reference.elements import widen_bfloat16
from thoroughness import ALL, at_most, pairs

from daf.core.code_format import ElementType, Predicate, words_per_plane
from daf.core.errors import KernelError
from daf.kernels import PageFields

KEY = 0xFEDCBA9876543210
INPUTS = ("smooth", "wild", "mixed", "broken", "peaked")
TYPES = tuple(ElementType)
POISON = 0xA5
# Every seventh size leaves every remainder by the kernels' powers of two.
MANY_COUNTS = (*range(1, 521, at_most(1, 7)), 4095, 4096, 4097, 70_001)
FEW_COUNTS = (1, 17, 255, 256, 257, 511, 2049, 5000)
AFFINES = ((96, 1), (512, 1), (64, 1), (3, 1), (7, 256), (5, 49), (2, 100), (1, 1), (300, 1))


def poisoned(count: int, dtype) -> np.ndarray:
    """Fresh memory full of rubbish, with a guard of 64 bytes behind it."""
    size = count * np.dtype(dtype).itemsize
    return np.full(size + 64, POISON, np.uint8)


def opened(memory: np.ndarray, count: int, dtype) -> np.ndarray:
    """The array in poisoned memory, once its guard proves untouched."""
    size = count * np.dtype(dtype).itemsize
    assert (memory[size:] == POISON).all(), "wrote beyond the end"
    return memory[:size].view(dtype)


def address(array: np.ndarray) -> int:
    return array.ctypes.data


def make_affine(cases, channels: int, inner: int) -> reference.Affine:
    return reference.Affine(cases.gaussian(channels, 5), cases.gaussian(channels, 6), inner)


def is_finite(code: reference.Code) -> bool:
    """Encoders tell whether a block holds a value that is not finite."""
    return bool(np.isfinite(widen_bfloat16(code.headers)).all())


class Native:
    """The native codecs behind the oracle's signatures."""

    def __init__(self, threads: int = 1) -> None:
        self.threads = threads

    def encode_rotated(self, source, element_type, bits, key, affine=None):
        room = FlatCode(len(source), bits)
        options = (key, self.threads, affine_of(affine))
        done = native_calls.encode_rotated(address(source), element_type, room.fields, *options)
        assert done == is_finite(room.code)
        return room.code

    def encode_minmax(self, source, element_type, bits, key, affine=None):
        room = FlatCode(len(source), bits)
        options = (key, self.threads, affine_of(affine))
        done = native_calls.encode_minmax(address(source), element_type, room.fields, *options)
        assert done == is_finite(room.code)
        return room.code

    def _decode(self, target: reference.Target, dtype, affine, call) -> np.ndarray:
        memory = poisoned(target.count, dtype)
        if target.accumulate_onto is not None:
            memory[: target.count * np.dtype(dtype).itemsize] = target.accumulate_onto.view(
                np.uint8
            )
        mask = None
        if target.mask is not None:
            mask = PageFields.flat(address(target.mask), target.count, 1)
        place = (address(memory), target.element_type, self.threads, affine_of(affine))
        call(*place, mask, target.accumulate_onto is not None)
        return opened(memory, target.count, dtype)

    def decode_rotated(self, code, target, dtype, bits, key, affine=None):
        room = FlatCode.of(*code, target.count, bits)
        call = partial(native_calls.decode_rotated, room.fields, key)
        return self._decode(target, dtype, affine, call)

    def decode_minmax(self, code, target, dtype, bits, affine=None):
        room = FlatCode.of(*code, target.count, bits)
        return self._decode(target, dtype, affine, partial(native_calls.decode_minmax, room.fields))

    def encode_steps(self, source, element_type, bits, key, affine=None):
        room = FlatCode(len(source), bits, headers=False)
        options = (key, self.threads, affine_of(affine))
        native_calls.encode_steps(address(source), element_type, room.fields, *options)
        return room.planes

    def decode_steps(self, planes, target, dtype, affine=None):
        fields = PageFields.flat(address(planes), target.count, len(planes))
        memory = poisoned(target.count, dtype)
        options = (target.element_type, self.threads, affine_of(affine))
        native_calls.decode_steps(fields, address(memory), *options)
        return opened(memory, target.count, dtype)


def same_bytes(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(
        np.ascontiguousarray(found).view(np.uint8), np.ascontiguousarray(expected).view(np.uint8)
    )


def same_code(found: reference.Code, expected: reference.Code) -> None:
    same_bytes(found.headers, expected.headers)
    same_bytes(found.planes, expected.planes)


def check_rotated(on_every_set, cases, source, element_type, bits) -> None:
    native, dtype = Native(), cases.dtype(element_type)
    code = reference.encode_rotated(source, bits, KEY)
    target = reference.Target(len(source), element_type)
    parts = [reference.Code(code.planes[:kept], code.headers) for kept in range(1, bits + 1)]
    values = [reference.decode_rotated(part, target, bits, KEY) for part in parts]

    def check() -> None:
        same_code(native.encode_rotated(source, element_type, bits, KEY), code)
        for part, expected in zip(parts, values, strict=True):
            found = native.decode_rotated(part, target, dtype, bits, KEY)
            same_bytes(found, expected)

    on_every_set(check)


def check_minmax(on_every_set, cases, source, element_type, bits) -> None:
    native, dtype = Native(), cases.dtype(element_type)
    code = reference.encode_minmax(source, bits, KEY)
    target = reference.Target(len(source), element_type)
    values = reference.decode_minmax(code, target, bits)

    def check() -> None:
        same_code(native.encode_minmax(source, element_type, bits, KEY), code)
        same_bytes(native.decode_minmax(code, target, dtype, bits), values)

    on_every_set(check)


def check_steps(on_every_set, cases, source, element_type, bits, affine=None) -> None:
    native, dtype = Native(), cases.dtype(element_type)
    planes = reference.encode_steps(source, bits, KEY, affine)
    target = reference.Target(len(source), element_type)
    values = reference.decode_steps(planes, target, affine)

    def check() -> None:
        same_bytes(native.encode_steps(source, element_type, bits, KEY, affine), planes)
        same_bytes(native.decode_steps(planes, target, dtype, affine), values)

    on_every_set(check)


@pytest.mark.parametrize(("kind", "element_type"), pairs(INPUTS, TYPES))
def test_rotated_equals_the_oracle(cases, on_every_set, kind, element_type) -> None:
    for count in FEW_COUNTS:
        source = cases.as_type(getattr(cases, kind)(count, count), element_type)
        for bits in (1, 2, 3, 4):
            check_rotated(on_every_set, cases, source, element_type, bits)


@pytest.mark.parametrize(("kind", "element_type"), pairs(INPUTS, TYPES))
def test_minmax_equals_the_oracle(cases, on_every_set, kind, element_type) -> None:
    for count in FEW_COUNTS:
        source = cases.as_type(getattr(cases, kind)(count, count), element_type)
        for bits in range(1, 9):
            check_minmax(on_every_set, cases, source, element_type, bits)


@pytest.mark.parametrize(("kind", "element_type"), pairs(INPUTS, TYPES))
def test_steps_equal_the_oracle(cases, on_every_set, kind, element_type) -> None:
    for count in FEW_COUNTS:
        source = cases.as_type(getattr(cases, kind)(count, count), element_type)
        for bits in range(1, 9):
            check_steps(on_every_set, cases, source, element_type, bits)


@pytest.mark.parametrize("channels_inner", AFFINES)
def test_steps_of_channels_equal_the_oracle(cases, on_every_set, channels_inner) -> None:
    affine = make_affine(cases, *channels_inner)
    for element_type in TYPES:
        for kind, count in (("smooth", 5000), ("mixed", 700), ("broken", 1024)):
            source = cases.as_type(getattr(cases, kind)(count, 8), element_type)
            check_steps(on_every_set, cases, source, element_type, 3, affine)


def test_every_ragged_size(cases, on_every_set) -> None:
    for count in MANY_COUNTS:
        source = cases.smooth(count, count)
        check_rotated(on_every_set, cases, source, ElementType.FLOAT32, 1 + count % 4)
        check_minmax(on_every_set, cases, source, ElementType.FLOAT32, 1 + count % 8)
        check_steps(on_every_set, cases, source, ElementType.FLOAT32, 1 + count % 8)


def test_nothing_happens_to_an_empty_tensor(instruction_set) -> None:
    fields, lines = PageFields.flat(0, 0, 2), np.arange(47, dtype=np.float32)
    native_calls.encode_rotated(0, ElementType.FLOAT32, fields, KEY, 1)
    native_calls.decode_rotated(fields, KEY, 0, ElementType.FLOAT32, 4)
    assert native_calls.encode_derivative(0, ElementType.FLOAT32, fields, address(lines), KEY, 1)


@pytest.mark.parametrize("channels_inner", AFFINES)
def test_affine_accumulate_and_mask_equal_the_oracle(cases, on_every_set, channels_inner):
    affine = make_affine(cases, *channels_inner)
    for element_type in TYPES:
        for kind, count in (("smooth", 5000), ("mixed", 700), ("broken", 1024)):
            source = cases.as_type(getattr(cases, kind)(count, 8), element_type)
            check_options(on_every_set, cases, source, element_type, affine)


def check_options(on_every_set, cases, source, element_type, affine) -> None:
    native, dtype, count = Native(), cases.dtype(element_type), len(source)
    mask = reference.encode_mask(source, Predicate.ABOVE, 0.1, 0.0)
    rotated = reference.encode_rotated(source, 3, KEY, affine)
    minmax = reference.encode_minmax(source, 4, KEY, affine)
    onto = cases.as_type(cases.mixed(count, 2), element_type)
    answers = []
    for options in itertools.product((None, onto), (None, mask), (None, affine)):
        target, after = reference.Target(count, element_type, *options[:2]), options[2]
        answers.append(
            (
                (target, after),
                reference.decode_rotated(rotated, target, 3, KEY, after),
                reference.decode_minmax(minmax, target, 4, after),
            )
        )

    def check() -> None:
        same_code(native.encode_rotated(source, element_type, 3, KEY, affine), rotated)
        same_code(native.encode_minmax(source, element_type, 4, KEY, affine), minmax)
        for (target, after), from_rotated, from_minmax in answers:
            found = native.decode_rotated(rotated, target, dtype, 3, KEY, after)
            same_bytes(found, from_rotated)
            same_bytes(native.decode_minmax(minmax, target, dtype, 4, after), from_minmax)

    on_every_set(check)


def test_a_broken_block_decodes_to_nan_except_where_masked_off(cases, instruction_set) -> None:
    source, affine = cases.broken(2560), make_affine(cases, 10, 256)
    onto, mask = np.ones(2560, np.float32), reference.encode_mask(source, Predicate.ABOVE, 0.0, 0.0)
    target = reference.Target(2560, ElementType.FLOAT32, onto, mask)
    code = Native().encode_rotated(source, ElementType.FLOAT32, 2, KEY)
    found = Native().decode_rotated(code, target, np.float32, 2, KEY, affine)
    chosen = reference.from_planes(mask).reshape(-1) == 1
    broken = ~np.isfinite(source).reshape(10, 256).all(axis=1).repeat(256)
    assert broken.sum() == 3 * 256
    assert np.isnan(found[broken & chosen]).all()
    assert not np.isnan(found[~broken | ~chosen]).any()
    assert (found[~chosen].view(np.uint32) == 0).all()


@pytest.mark.parametrize("offset", [1, 4, 20, 63])
def test_misaligned_memory(cases, instruction_set, offset) -> None:
    source = cases.smooth(3000)
    memory = np.zeros(12_000 + 64, np.uint8)
    moved = memory[offset : offset + 12_000]
    moved[:] = source.view(np.uint8)
    room = FlatCode(3000, 2, offset=offset)
    native_calls.encode_rotated(address(moved), ElementType.FLOAT32, room.fields, KEY, 1)
    expected = reference.encode_rotated(source, 2, KEY)
    same_code(room.code, expected)
    native_calls.decode_rotated(room.fields, KEY, address(moved), ElementType.FLOAT32, 1)
    back = reference.decode_rotated(expected, reference.Target(3000), 2, KEY)
    same_bytes(moved, back.view(np.uint8))


BOUNDS = ((0.0, np.inf), (0.0, 6.0), (-1.0, 1.0), (np.nan, 0.5), (-np.inf, np.nan), (0.1, -0.1))


@pytest.mark.parametrize(("kind", "element_type"), pairs(INPUTS, TYPES))
def test_masks_equal_the_oracle(cases, on_every_set, kind, element_type) -> None:
    for count in (*range(1, 300, 7 if ALL else 31), 2049):
        source = cases.as_type(getattr(cases, kind)(count, count), element_type)
        check_masks(on_every_set, source, element_type)


def check_masks(on_every_set, source, element_type) -> None:
    count, all_bounds = len(source), [(p, *bounds) for p in Predicate for bounds in BOUNDS]
    expected = [reference.encode_mask(source, *bounds) for bounds in all_bounds]
    values = reference.decode_mask(expected[-1], count, -0.1, 1 / 0.9, element_type)

    def check() -> None:
        words = poisoned(words_per_plane(count), np.uint32)
        fields = PageFields.flat(address(words), count, 1)
        for bounds, plane in zip(all_bounds, expected, strict=True):
            native_calls.encode_mask(address(source), element_type, fields, *bounds, 1)
            same_bytes(opened(words, words_per_plane(count), np.uint32), plane[0])
        back = poisoned(count, source.dtype)
        native_calls.decode_mask(fields, -0.1, 1 / 0.9, address(back), element_type, 1)
        same_bytes(opened(back, count, source.dtype), values)

    on_every_set(check)


@pytest.mark.parametrize("bits", range(1, 9))
def test_derivative_codes_equal_the_oracle(cases, instruction_set, bits) -> None:
    lines = cases.lines(bits, bits)
    levels = cases.gaussian(2**bits, bits + 20)
    for element_type in TYPES:
        for count in (1, 255, 256, 1000):
            source = cases.as_type(cases.gaussian(count, count), element_type)
            source[: min(count, 15)] = cases.as_type(lines[: min(count, 15)], element_type)
            room = FlatCode(count, bits, headers=False)
            at = (address(source), element_type, room.fields, address(lines))
            assert native_calls.encode_derivative(*at, KEY, 1)
            same_bytes(room.planes, reference.encode_derivative(source, bits, KEY, lines))
            back = poisoned(count, source.dtype)
            at = (room.fields, address(levels), address(back))
            native_calls.decode_derivative(*at, element_type, 1)
            expected = reference.decode_derivative(room.planes, count, levels, element_type)
            same_bytes(opened(back, count, source.dtype), expected)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_derivative_codes_refuse_what_is_not_finite(cases, instruction_set, value) -> None:
    lines = cases.lines(1, 1)
    for place in (0, 700, 999):
        source = cases.smooth(1000)
        source[place] = value
        room = FlatCode(1000, 1, headers=False)
        at = (address(source), ElementType.FLOAT32, room.fields, address(lines))
        assert native_calls.encode_derivative(*at, KEY, 1) is False
        assert reference.encode_derivative(source, 1, KEY, lines) is None


@pytest.mark.parametrize("item_bytes", [1, 2, 4, 8])
def test_integers_come_back_exactly(cases, instruction_set, item_bytes) -> None:
    dtype = np.dtype(f"i{item_bytes}")
    rng = np.random.default_rng(item_bytes)
    for bits in {1, 3, 7, 8, 15, 16, 31, 32, 33, 63, 64}:
        if bits > 8 * item_bytes:
            continue
        base = int(np.iinfo(dtype).min) if bits == 8 * item_bytes else -(2 ** (bits - 1))
        for count in (1, 256, 777):
            source = rng.integers(base, base + 2**bits - 1, count, dtype, endpoint=True)
            room, back = FlatCode(count, bits, headers=False), poisoned(count, dtype)
            native_calls.encode_integers(address(source), item_bytes, room.fields, base, 1)
            same_bytes(room.planes, reference.encode_integers(source, bits, base))
            native_calls.decode_integers(room.fields, base, address(back), item_bytes, 1)
            same_bytes(opened(back, count, dtype), source)
            same_bytes(reference.decode_integers(room.planes, count, base, item_bytes), source)


def test_integers_that_do_not_fit_are_refused(instruction_set) -> None:
    source = np.array([0, 3, 8], np.int64)
    for base, bits in ((0, 3), (1, 4)):
        room = FlatCode(3, bits, headers=False)
        with pytest.raises(KernelError, match="more bits"):
            native_calls.encode_integers(address(source), 8, room.fields, base, 1)
        with pytest.raises(KernelError, match="more bits"):
            reference.encode_integers(source, bits, base)


@pytest.mark.thorough
def test_32_million_elements(cases, instruction_set, golden) -> None:
    source, native = cases.smooth(2**25, 11), Native(threads=2)
    target, key = reference.Target(2**25), 0x0123456789ABCDEF
    code = native.encode_rotated(source, ElementType.FLOAT32, 4, key)
    assert cases.digest(*code) == golden["large"]["rotated-4"]
    back = native.decode_rotated(code, target, np.float32, 4, key)
    assert cases.digest(back) == golden["large"]["rotated-4-back"]
    code = native.encode_rotated(cases.peaked(2**25, 11), ElementType.FLOAT32, 2, key)
    assert cases.digest(*code) == golden["large"]["rotated-2-peaked"]
    code = native.encode_minmax(source, ElementType.FLOAT32, 8, key)
    assert cases.digest(*code) == golden["large"]["minmax-8"]
    back = native.decode_minmax(code, target, np.float32, 8)
    assert cases.digest(back) == golden["large"]["minmax-8-back"]
