"""The calls that every way of running the kernels must answer as the oracle does."""

from __future__ import annotations

import numpy as np
import pytest
from recorder import CODECS, Norm
from reference import codecs as reference

from daf.core.code_format import ElementType, Predicate
from daf.core.errors import KernelError

KEY = 0xFEDCBA9876543210
KINDS = ("smooth", "wild", "mixed", "broken")
AFFINES = ((96, 1), (512, 1), (64, 1), (3, 1), (7, 256), (5, 49), (2, 100), (1, 1), (300, 1))
BOUNDS = ((0.0, np.inf), (0.0, 6.0), (np.nan, 0.5), (-np.inf, np.nan), (0.1, -0.1), (1e-45, 1e38))
LARGE_COUNT = 200_003  # enough for three threads


def record_all(oracle, cases) -> None:
    """Everything but the golden vectors."""
    for record in (
        ragged_sizes,
        options,
        patterns,
        ties,
        foreign,
        masks,
        derivatives,
        integers,
        norms,
        rows,
        large,
    ):
        record(oracle, cases)


def code_and_decode(oracle, source, element_type, bits) -> None:
    """Both codecs; ``bits`` from 1 to 8."""
    target, narrow_bits = reference.Target(len(source), element_type), 1 + bits % 4
    code = oracle.encode_rotated(source, narrow_bits, KEY)
    oracle.decode_rotated(code, target, narrow_bits, KEY)
    oracle.decode_minmax(oracle.encode_minmax(source, bits, KEY), target, bits)
    oracle.decode_steps(oracle.encode_steps(source, bits, KEY), target)


def ragged_sizes(oracle, cases) -> None:
    for count in (*range(1, 40), *range(40, 521, 5), 4095, 4097):
        element_type, kind = ElementType(count % 3), KINDS[count % 4]
        source = cases.as_type(getattr(cases, kind)(count, count), element_type)
        code_and_decode(oracle, source, element_type, 1 + count % 8)


def options(oracle, cases) -> None:
    """Affine, accumulate and mask, each on its own and all together."""
    for channels, inner in AFFINES:
        affine = reference.Affine(cases.gaussian(channels, 5), cases.gaussian(channels, 6), inner)
        for element_type in ElementType:
            for kind, count in (("smooth", 1100), ("mixed", 700), ("broken", 1024)):
                source = cases.as_type(getattr(cases, kind)(count, 8), element_type)
                options_of(oracle, source, element_type, affine)


def options_of(oracle, source, element_type, affine) -> None:
    words = oracle.encode_mask(source, Predicate.ABOVE, 0.1, 0.0)
    rotated = oracle.encode_rotated(source, 3, KEY, affine)
    minmax = oracle.encode_minmax(source, 4, KEY, affine)
    steps = oracle.encode_steps(source, 3, KEY, affine)
    oracle.decode_steps(steps, reference.Target(len(source), element_type), affine)
    for onto in (None, source[::-1].copy()):
        for mask in (None, words):
            for after in (None, affine):
                target = reference.Target(len(source), element_type, onto, mask)
                oracle.decode_rotated(rotated, target, 3, KEY, after)
                oracle.decode_minmax(minmax, target, 4, after)


def patterns(oracle, cases) -> None:
    """Every fp16 and bf16 bit pattern and many of fp32, read and written, every kind of NaN too."""
    halves = np.arange(2**16, dtype=np.uint16)
    for elements in (halves, halves.view(np.float16), cases.words(2**14, 3).view(np.float32)):
        element_type = next(t for t in ElementType if cases.dtype(t) == elements.dtype)
        code_and_decode(oracle, elements, element_type, 8)
        zero = oracle.encode_minmax(np.zeros(len(elements), np.float32), 1, KEY)
        target = reference.Target(len(elements), element_type, accumulate_onto=elements)
        oracle.decode_minmax(zero, target, 1)
        for predicate in Predicate:
            oracle.encode_mask(elements, predicate, -0.5, 1e-40)
        write_patterns(oracle, cases, element_type)


def write_patterns(oracle, cases, element_type) -> None:
    """Numbers on and beside every border between two fp16 or bf16 numbers, in all 256 levels."""
    codes = np.arange(256, dtype=np.uint64).reshape(1, 256)
    planes = reference.to_planes(codes, 8)
    near = cases.words(4096, 9) & np.uint32(0xFFFFE000)
    for offset in (0, 1, 0xFFF, 0x1000, 0x1001, 0x1FFF):
        for levels in (near + np.uint32(offset)).view(np.float32).reshape(-1, 256):
            oracle.decode_derivative(planes, 256, levels, element_type)


def ties(oracle, cases) -> None:
    """A block of mean 0 and length 2000 exactly, so that every element is rounded from a half."""
    odd = np.repeat(np.array([247, 251, 253], np.float32), [58, 19, 51])
    source = np.concatenate([odd, -odd]) / np.float32(2)
    assert (source**2).sum(dtype=np.float64) == 2000**2
    for bits in range(1, 5):
        for key in range(8):
            oracle.encode_rotated(source, bits, key)


def foreign(oracle, cases) -> None:
    """Codes that no encoder writes: random planes, and headers of every kind."""
    count, blocks = 10_000, 40
    kinds = np.array([0, 1, 0x8000, 0x3F80, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7FC0], np.uint16)
    for bits in range(1, 9):
        words = cases.words(8 * blocks * (bits + 1), bits)
        planes = words[8 * blocks :].reshape(bits, -1)
        headers = kinds[words[: 2 * blocks].reshape(-1, 2) % len(kinds)]
        target = reference.Target(count, ElementType(bits % 3))
        oracle.decode_minmax(reference.Code(planes, headers), target, bits)
        kept = reference.Code(planes[: 1 + bits % 4], headers)
        oracle.decode_rotated(kept, target, 4, KEY)


def masks(oracle, cases) -> None:
    for element_type in ElementType:
        for kind in KINDS:
            for count in (1, 31, 255, 257, 1000):
                source = cases.as_type(getattr(cases, kind)(count, count), element_type)
                for low, high in BOUNDS:
                    words = oracle.encode_mask(source, Predicate.INSIDE, low, high)
                    oracle.encode_mask(source, Predicate.ABOVE, low, high)
                    oracle.decode_mask(words, count, low, high, element_type)


def derivatives(oracle, cases) -> None:
    for bits in range(1, 9):
        lines = cases.lines(bits, bits)
        levels = cases.gaussian(2**bits, bits + 20)
        for element_type in ElementType:
            for count in (1, 255, 256, 1000):
                source = cases.as_type(cases.gaussian(count, count), element_type)
                source[: min(count, 15)] = cases.as_type(lines[: min(count, 15)], element_type)
                planes = oracle.encode_derivative(source, bits, KEY, lines)
                oracle.decode_derivative(planes, count, levels, element_type)
        oracle.encode_derivative(cases.broken(1000), bits, KEY, lines)


def integers(oracle, cases) -> None:
    for item_bytes in (1, 2, 4, 8):
        words = cases.words(2 * 777, item_bytes).view(np.uint64)
        for bits in {1, 3, 7, 8, 15, 16, 31, 32, 33, 63, 64} & set(range(8 * item_bytes + 1)):
            base = -(2 ** (bits - 1))
            for count in (1, 256, 777):
                codes = words[:count] >> np.uint64(64 - bits)
                source = (codes + np.uint64(base % 2**64)).astype(f"u{item_bytes}")
                planes = oracle.encode_integers(source.view(f"i{item_bytes}"), bits, base)
                oracle.decode_integers(planes, count, base, item_bytes)
    with pytest.raises(KernelError):
        oracle.encode_integers(np.array([0, 3, 8], np.int64), 3, 0)


def norms(oracle, cases) -> None:
    """Forward in passing and both passes of backward, from codes and from the input itself."""
    for channels, inner in ((16, 1), (300, 1), (7, 1), (3, 256), (5, 49), (1, 1)):
        for kind, count in (("smooth", 1100), ("mixed", 777), ("broken", 1024)):
            norm = norm_of(cases, kind, count, channels, inner)
            mask = reference.encode_mask(norm.gradient[::-1], Predicate.ABOVE, 0.0, 0.0)
            for place, codec in enumerate(CODECS):
                bits = 1 + (channels + place) % 4
                oracle.emit(norm, codec, bits, norm.gradient, rectify=True)
                oracle.emit(norm, codec, bits, None, rectify=False)
                oracle.gradients(norm, codec, bits, mask)
                oracle.gradients(norm, codec, bits, None)


def norm_of(cases, kind: str, count: int, channels: int, inner: int) -> Norm:
    scales = [cases.gaussian(channels, seed) for seed in range(6)]
    before, result, of_value = (
        reference.Affine(scales[2 * i], scales[2 * i + 1], inner) for i in range(3)
    )
    x = getattr(cases, kind)(count, channels)
    return Norm(x, before, result, cases.gaussian(count, 9), KEY, of_value)


def rows(oracle, cases) -> None:
    """Rows shorter and longer than a block, on block borders and not, several spans of them."""
    for row_count, length in ((1, 1), (3, 5), (7, 64), (2, 1000), (5, 256), (6, 384), (600, 17)):
        for centred in (True, False):
            for kind in ("smooth", "mixed", "broken"):
                norm = rows_of(cases, kind, row_count, length, centred=centred)
                for place, codec in enumerate(CODECS):
                    bits = 1 + (length + place) % 4
                    oracle.emit_rows(norm, codec, bits)
                    oracle.row_gradients(norm, codec, bits, norm.result.scale)
                    oracle.row_gradients(norm, codec, bits, None)


def rows_of(cases, kind: str, row_count: int, length: int, *, centred: bool) -> Norm:
    count = row_count * length
    result = reference.Affine(cases.gaussian(length, 3), cases.gaussian(length, 4), 1)
    x = getattr(cases, kind)(max(count, 16), length)[:count]
    gradient = cases.gaussian(count, 9)
    return Norm(x, None, result, gradient, KEY, length=length, centred=centred)


def large(oracle, cases) -> None:
    """Every operation on several threads, refusals by one of them included."""
    source, target = cases.smooth(LARGE_COUNT, 4), reference.Target(LARGE_COUNT)
    oracle.decode_rotated(oracle.encode_rotated(source, 2, KEY), target, 2, KEY)
    oracle.decode_minmax(oracle.encode_minmax(source, 5, KEY), target, 5)
    words = oracle.encode_mask(source, Predicate.ABOVE, 0.0, 0.0)
    oracle.decode_mask(words, LARGE_COUNT, -1.0, 2.0, ElementType.BFLOAT16)
    lines, levels = cases.lines(5, 2), np.arange(4, dtype=np.float32)
    planes = oracle.encode_derivative(source, 2, KEY, lines)
    oracle.decode_derivative(planes, LARGE_COUNT, levels, ElementType.FLOAT16)
    items = cases.words(LARGE_COUNT, 5).view(np.int32)
    oracle.decode_integers(oracle.encode_integers(items, 32, -(2**31)), LARGE_COUNT, -(2**31), 4)
    source[-1] = np.nan
    oracle.encode_derivative(source, 2, KEY, lines)
    norm = norm_of(cases, "smooth", LARGE_COUNT, 64, 1)
    oracle.emit(norm, "rotated", 2, norm.gradient, rectify=True)
    oracle.gradients(norm, "rotated", 2, words)
    norm = rows_of(cases, "smooth", 1500, 100, centred=True)
    oracle.emit_rows(norm, "rotated", 2)
    oracle.row_gradients(norm, "minmax", 2, norm.result.scale)
