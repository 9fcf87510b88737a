"""Native kernels against the oracle, byte for byte, on every instruction set this machine has."""

from __future__ import annotations

import numpy as np
import pytest

from daf.kernels import (
    ChannelAffine,
    ElementType,
    block_count,
    cpu,
    reference,
    words_per_plane,
)

KEY = 0xFEDCBA9876543210
INPUTS = ("smooth", "wild", "mixed", "broken")
TYPES = tuple(ElementType)
POISON = 0xA5
MANY_COUNTS = (*range(1, 521), 4095, 4096, 4097, 70_001)
FEW_COUNTS = (1, 17, 255, 256, 257, 511, 2049, 5000)
AFFINES = ((96, 1), (512, 1), (64, 1), (3, 1), (7, 256), (5, 49), (2, 100), (1, 1), (300, 1))


@pytest.fixture(params=cpu.instruction_sets())
def instruction_set(request):
    with cpu.use_instruction_set(request.param):
        yield request.param


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


def channel_affine(affine: reference.Affine | None) -> ChannelAffine | None:
    if affine is None:
        return None
    scale, shift = affine.scale, affine.shift
    return ChannelAffine(len(scale), affine.inner, address(scale), address(shift))


def make_affine(cases, channels: int, inner: int) -> reference.Affine:
    return reference.Affine(cases.gaussian(channels, 5), cases.gaussian(channels, 6), inner)


class Native:
    """The cpu module behind the oracle's signatures."""

    def __init__(self, threads: int = 1) -> None:
        self.threads = threads

    def _encode(self, source, element_type, bits, call) -> reference.Code:
        count = len(source)
        words, blocks = bits * words_per_plane(count), block_count(count)
        planes, headers = poisoned(words, np.uint32), poisoned(2 * blocks, np.uint16)
        call(address(source), element_type, count, address(planes), address(headers))
        return reference.Code(
            opened(planes, words, np.uint32).reshape(bits, -1),
            opened(headers, 2 * blocks, np.uint16).reshape(-1, 2),
        )

    def encode_rotated(self, source, element_type, bits, rounds, key, affine=None):
        return self._encode(
            source,
            element_type,
            bits,
            lambda at, kind, count, planes, headers: cpu.encode_rotated(
                *(at, kind, count, bits, rounds, key, planes, headers, self.threads),
                channel_affine(affine),
            ),
        )

    def encode_minmax(self, source, element_type, bits, key, affine=None):
        return self._encode(
            source,
            element_type,
            bits,
            lambda at, kind, count, planes, headers: cpu.encode_minmax(
                *(at, kind, count, bits, key, planes, headers, self.threads),
                channel_affine(affine),
            ),
        )

    def _decode(self, target: reference.Target, dtype, call) -> np.ndarray:
        memory = poisoned(target.count, dtype)
        if target.accumulate_onto is not None:
            memory[: target.count * np.dtype(dtype).itemsize] = target.accumulate_onto.view(
                np.uint8
            )
        mask = 0 if target.mask is None else address(target.mask)
        call(address(memory), mask, target.accumulate_onto is not None)
        return opened(memory, target.count, dtype)

    def decode_rotated(self, code, target, dtype, bits, rounds, key, affine=None):
        planes, headers = np.ascontiguousarray(code.planes), np.ascontiguousarray(code.headers)
        return self._decode(
            target,
            dtype,
            lambda at, mask, accumulate: cpu.decode_rotated(
                *(address(planes), address(headers), target.count, bits, len(planes), rounds, key),
                *(at, target.element_type, self.threads, channel_affine(affine), mask, accumulate),
            ),
        )

    def decode_minmax(self, code, target, dtype, bits, affine=None):
        return self._decode(
            target,
            dtype,
            lambda at, mask, accumulate: cpu.decode_minmax(
                *(address(code.planes), address(code.headers), target.count, bits),
                *(at, target.element_type, self.threads, channel_affine(affine), mask, accumulate),
            ),
        )


def same_bytes(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(
        np.ascontiguousarray(found).view(np.uint8), np.ascontiguousarray(expected).view(np.uint8)
    )


def same_code(found: reference.Code, expected: reference.Code) -> None:
    same_bytes(found.headers, expected.headers)
    same_bytes(found.planes, expected.planes)


def check_rotated(cases, source, element_type, bits, rounds) -> None:
    native, dtype = Native(), cases.dtype(element_type)
    code = reference.encode_rotated(source, bits, rounds, KEY)
    same_code(native.encode_rotated(source, element_type, bits, rounds, KEY), code)
    target = reference.Target(len(source), element_type)
    for kept in range(1, bits + 1):
        part = reference.Code(code.planes[:kept], code.headers)
        same_bytes(
            native.decode_rotated(part, target, dtype, bits, rounds, KEY),
            reference.decode_rotated(part, target, bits, rounds, KEY),
        )


def check_minmax(cases, source, element_type, bits) -> None:
    native, dtype = Native(), cases.dtype(element_type)
    code = reference.encode_minmax(source, bits, KEY)
    same_code(native.encode_minmax(source, element_type, bits, KEY), code)
    target = reference.Target(len(source), element_type)
    same_bytes(
        native.decode_minmax(code, target, dtype, bits),
        reference.decode_minmax(code, target, bits),
    )


@pytest.mark.parametrize("element_type", TYPES)
@pytest.mark.parametrize("kind", INPUTS)
def test_rotated_equals_the_oracle(cases, instruction_set, kind, element_type) -> None:
    for count in FEW_COUNTS:
        source = cases.as_type(getattr(cases, kind)(count, count), element_type)
        for bits in (1, 2, 3, 4):
            for rounds in (1, 2):
                check_rotated(cases, source, element_type, bits, rounds)


@pytest.mark.parametrize("element_type", TYPES)
@pytest.mark.parametrize("kind", INPUTS)
def test_minmax_equals_the_oracle(cases, instruction_set, kind, element_type) -> None:
    for count in FEW_COUNTS:
        source = cases.as_type(getattr(cases, kind)(count, count), element_type)
        for bits in range(1, 9):
            check_minmax(cases, source, element_type, bits)


def test_every_ragged_size(cases, instruction_set) -> None:
    for count in MANY_COUNTS:
        source = cases.smooth(count, count)
        check_rotated(cases, source, ElementType.FLOAT32, 1 + count % 4, 1 + count % 2)
        check_minmax(cases, source, ElementType.FLOAT32, 1 + count % 8)


def test_nothing_happens_to_an_empty_tensor(instruction_set) -> None:
    cpu.encode_rotated(0, ElementType.FLOAT32, 0, 2, 1, KEY, 0, 0, 1)
    cpu.decode_rotated(0, 0, 0, 2, 2, 1, KEY, 0, ElementType.FLOAT32, 4)
    assert cpu.encode_derivative(
        0, ElementType.FLOAT32, 0, 1, address(np.zeros(1, np.float32)), 0, 1
    )
