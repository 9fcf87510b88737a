"""The oracle of codecs: every operation of ``docs/format.md`` in NumPy, readable before fast.

Elements are float32, float16, or uint16 (bf16 patterns), in memory order; planes (bits, words)
uint32; headers (blocks, 2) uint16. The order of additions is part of the format, so no library
sums.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daf.core.code_format import BLOCK_ELEMENTS, ElementType, Predicate, block_count
from daf.core.code_tables import (
    BETWEEN_ROUNDS_SHIFT,
    COEFFICIENT_MULTIPLIER,
    INTEGER_LENGTH,
    PEAKED_FACTOR,
    SCALE_UNIT,
    rotated_level_factor,
    rotated_levels,
    rotated_thresholds,
)
from daf.core.errors import KernelError
from reference.blocks import Affine as Affine
from reference.blocks import (
    Chunk,
    block_runs,
    chunks,
    finish,
    join,
    prescale_of,
    require,
    spoil,
    stack,
    store,
    tree_sum,
)
from reference.blocks import Code as Code
from reference.blocks import Target as Target
from reference.blocks import from_planes as from_planes
from reference.blocks import to_planes as to_planes
from reference.elements import (
    Elements,
    Floats,
    Headers,
    Planes,
    bfloat16_ceiling,
    bfloat16_floor,
    bfloat16_nearest,
    narrow,
    widen_bfloat16,
)
from reference.philox import dither, sign_bits

_ORDINARY_ENERGY = (np.float32(2.0**-60), np.float32(2.0**60))
_SIGN = np.uint16(0x8000)
_ORDINARY_MAGNITUDE = (np.float32(2.0**-30), np.float32(2.0**30))

Integers = NDArray[np.int64]


def hadamard(values: Integers) -> Integers:
    """Transform every row of (n, 256): unnormalised Walsh–Hadamard, natural order."""
    stride = 1
    while stride < BLOCK_ELEMENTS:
        pairs = values.reshape(len(values), -1, 2, stride)
        low, high = pairs[:, :, 0], pairs[:, :, 1]
        values = np.stack([low + high, low - high], axis=2).reshape(values.shape)
        stride *= 2
    return values


def encode_rotated(source: Elements, bits: int, key: int, affine: Affine | None = None) -> Code:
    """Encode by section 4 of the format."""
    require(bits in (1, 2, 3, 4), f"{bits} bits")
    return join([_encode_rotated(chunk, bits, key) for chunk in chunks(source, affine)], bits)


class _Centred(NamedTuple):
    """Blocks around their rounded mean: (n, 256), zero in the padding, and (n, 1) each."""

    values: Floats
    mean: Headers
    energy: Floats
    peaked: NDArray[np.bool_]  # few elements hold the energy
    unscale: Floats


@np.errstate(all="ignore")
def _encode_rotated(chunk: Chunk, bits: int, key: int) -> Code:
    centred, finite = _centre(chunk)
    norm: Floats = np.sqrt(centred.energy)
    factor: Floats = np.float32(INTEGER_LENGTH) / norm
    rounded = _to_integers(np.rint(centred.values * factor))
    rotated = _rotate(rounded, centred.peaked, key, chunk.blocks)
    cells = _find_cells(rotated, bits)
    product = (rotated * rotated_levels(bits, bits)[cells]).sum(axis=1, keepdims=True)
    gain: Floats = norm * np.float32(INTEGER_LENGTH * SCALE_UNIT) / product.astype(np.float32)
    scale = bfloat16_nearest(gain * centred.unscale)
    scale = np.where(centred.peaked, scale | _SIGN, scale)
    flat = norm == 0
    return finish(
        np.where(flat, np.uint64(0), (cells >> (4 - bits)).astype(np.uint64)),
        np.concatenate([centred.mean, np.where(flat, np.uint16(0), scale)], axis=1),
        finite,
        bits,
    )


def _centre(chunk: Chunk) -> tuple[_Centred, NDArray[np.bool_]]:
    """Centre blocks, prescaled only if the energy asks for it; also return which are finite."""
    one = np.ones((len(chunk.values), 1), np.float32)
    plain = _centre_scaled(chunk, one, one)
    prescale, unscale, finite = prescale_of(chunk)
    least, greatest = _ORDINARY_ENERGY
    ordinary = (plain.energy >= least) & (plain.energy <= greatest)
    scaled = _centre_scaled(chunk, prescale, unscale)
    pairs: Any = zip(plain, scaled, strict=True)
    return _Centred(*(np.where(ordinary, one, other) for one, other in pairs)), finite


def _centre_scaled(chunk: Chunk, prescale: Floats, unscale: Floats) -> _Centred:
    scaled = chunk.values * prescale
    real_count: Floats = chunk.valid.sum(axis=1, keepdims=True).astype(np.float32)
    average: Floats = tree_sum(scaled) / real_count
    mean = bfloat16_nearest(average * unscale)
    centred = scaled - widen_bfloat16(mean) * prescale
    centred = np.where(chunk.valid, centred, np.float32(0))
    squares = centred * centred
    fours = tree_sum(squares, down_to=64)
    energy = tree_sum(fours)
    peaked = tree_sum(fours * fours) * np.float32(PEAKED_FACTOR) > energy * energy
    return _Centred(centred, mean, energy, peaked, unscale)


def _to_integers(values: Floats) -> Integers:
    """Convert integral floats to integers; those not finite (to be discarded) to 0."""
    return np.where(np.isfinite(values), values, np.float32(0)).astype(np.int64)


def _find_cells(rotated: Integers, bits: int) -> Integers:
    """Return each number's code, its most significant bit at weight 8."""
    coefficients = np.clip(rotated * COEFFICIENT_MULTIPLIER >> 16, -128, 127)
    cells = np.zeros(rotated.shape, np.int64)
    for step, thresholds in enumerate(rotated_thresholds(bits)):
        cells += np.where(coefficients > thresholds[cells], 8 >> step, 0)
    return cells


def _rotate(
    values: Integers, peaked: NDArray[np.bool_], key: int, blocks: NDArray[np.uint64]
) -> Integers:
    return _transform(_flip(values, sign_bits(key, blocks, 0)), peaked, key, blocks)


def _rotate_back(
    values: Integers, peaked: NDArray[np.bool_], key: int, blocks: NDArray[np.uint64]
) -> Integers:
    return _flip(_transform(values, peaked, key, blocks), sign_bits(key, blocks, 0))


def _transform(
    values: Integers, peaked: NDArray[np.bool_], key: int, blocks: NDArray[np.uint64]
) -> Integers:
    """Transform every block, those that are peaked (n, 1) a second time."""
    once = hadamard(values)
    again = hadamard(_flip(_between_rounds(once), sign_bits(key, blocks, 1)))
    return np.where(peaked, again, once)


def _between_rounds(values: Integers) -> Integers:
    """Divide by 16, to nearest, halves upward."""
    return (values + (1 << (BETWEEN_ROUNDS_SHIFT - 1))) >> BETWEEN_ROUNDS_SHIFT


def _flip(values: Integers, signs: NDArray[np.bool_]) -> Integers:
    return np.where(signs, -values, values)


@np.errstate(all="ignore")
def decode_rotated(
    code: Code, target: Target, bits: int, key: int, affine: Affine | None = None
) -> Elements:
    """Decode by section 4 of the format; ``code.planes`` holds the first k of ``bits`` planes."""
    kept_bits = len(code.planes)
    require(1 <= kept_bits <= bits <= 4, f"{kept_bits} of {bits} bits")
    levels = rotated_levels(bits, kept_bits).astype(np.int64)
    factor = np.float32(rotated_level_factor(bits, kept_bits))
    pieces = []
    for first, planes, headers in block_runs(code):
        mean, scale = widen_bfloat16(headers[:, :1]), np.abs(widen_bfloat16(headers[:, 1:]))
        blocks = first + np.arange(len(headers), dtype=np.uint64)
        cells = from_planes(planes) << np.uint64(4 - kept_bits)
        peaked = headers[:, 1:] >= _SIGN
        rotated = _rotate_back(levels[cells], peaked, key, blocks).astype(np.float32)
        values = mean + (scale * factor) * rotated
        pieces.append(spoil(values, headers))
    return store(stack(pieces), target, affine)


def encode_minmax(source: Elements, bits: int, key: int, affine: Affine | None = None) -> Code:
    """Encode by section 5 of the format."""
    require(1 <= bits <= 8, f"{bits} bits")
    return join([_encode_minmax(chunk, bits, key) for chunk in chunks(source, affine)], bits)


@np.errstate(all="ignore")
def _encode_minmax(chunk: Chunk, bits: int, key: int) -> Code:
    last = np.float32(2**bits - 1)
    lowest = np.where(chunk.valid, chunk.values, np.float32(np.inf)).min(axis=1, keepdims=True)
    highest = np.where(chunk.valid, chunk.values, np.float32(-np.inf)).max(axis=1, keepdims=True)
    prescale, unscale, finite = prescale_of(chunk)
    magnitude = np.maximum(np.abs(lowest), np.abs(highest))
    ordinary = (magnitude >= _ORDINARY_MAGNITUDE[0]) & (magnitude <= _ORDINARY_MAGNITUDE[1])
    prescale = np.where(ordinary, np.float32(1), prescale)
    unscale = np.where(ordinary, np.float32(1), unscale)
    least = bfloat16_floor(lowest + np.float32(0))
    origin = widen_bfloat16(least) * prescale
    ideal = ((highest + np.float32(0)) * prescale - origin) / last
    step = bfloat16_ceiling(ideal * unscale)
    step = np.where((step == 0) & (ideal > 0), np.uint16(1), step)
    reciprocal = np.where(
        step == 0, np.float32(0), np.float32(1) / (widen_bfloat16(step) * prescale)
    )
    position = (chunk.values * prescale - origin) * reciprocal + dither(key, chunk.blocks)
    position = np.where(chunk.valid & finite, position, np.float32(1))
    codes = np.minimum(position.astype(np.int64) - 1, 2**bits - 1).astype(np.uint64)
    return finish(codes, np.concatenate([least, step], axis=1), finite, bits)


@np.errstate(all="ignore")
def decode_minmax(code: Code, target: Target, bits: int, affine: Affine | None = None) -> Elements:
    """Decode by section 5 of the format."""
    require(1 <= bits <= 8 and len(code.planes) == bits, f"{len(code.planes)} of {bits} bits")
    pieces = []
    for _, planes, headers in block_runs(code):
        least, step = widen_bfloat16(headers[:, :1]), widen_bfloat16(headers[:, 1:])
        values = least + from_planes(planes).astype(np.float32) * step
        pieces.append(spoil(values, headers))
    return store(stack(pieces), target, affine)


def encode_steps(source: Elements, bits: int, key: int, affine: Affine | None = None) -> Planes:
    """Return (bits, words) of the numbers of steps by ``affine``: section 5 of the format."""
    require(1 <= bits <= 8, f"{bits} bits")
    codes = [_encode_steps(chunk, bits, key) for chunk in chunks(source, affine)]
    return to_planes(stack(codes, np.uint64), bits)


@np.errstate(all="ignore")
def _encode_steps(chunk: Chunk, bits: int, key: int) -> NDArray[np.uint64]:
    last = np.float32(2**bits - 1)
    position = np.where(chunk.values > 0, chunk.values, np.float32(0))
    position = np.where(position < last, position, last) + dither(key, chunk.blocks)
    position = np.where(chunk.valid, position, np.float32(1))
    codes: NDArray[np.uint64] = np.minimum(position.astype(np.int64) - 1, 2**bits - 1).astype(
        np.uint64
    )
    return codes


@np.errstate(all="ignore")
def decode_steps(planes: Planes, target: Target, affine: Affine | None = None) -> Elements:
    """Decode every code, then apply ``affine``."""
    require(1 <= len(planes) <= 8, f"{len(planes)} bits")
    return store(from_planes(planes).astype(np.float32), target, affine)


def _count_below(values: Floats, borders: Floats) -> NDArray[np.int64]:
    count = np.zeros(values.shape, np.int64)
    for border in borders:
        count += values > border
    return count


def encode_mask(source: Elements, predicate: Predicate, low: float, high: float) -> Planes:
    """Return (1, words): section 6 of the format."""
    below, above = np.float32(low), np.float32(high)
    codes = []
    for chunk in chunks(source, None):
        if predicate is Predicate.INSIDE:
            chosen = ~((chunk.values <= below) | (chunk.values >= above))
        else:
            chosen = chunk.values > below
        codes.append((chosen & chunk.valid).astype(np.uint64))
    return to_planes(stack(codes, np.uint64), 1)


def decode_mask(
    words: Planes, count: int, off_value: float, on_value: float, element_type: ElementType
) -> Elements:
    """Write one of two values for each bit."""
    chosen = from_planes(words).reshape(-1)[:count] == 1
    return narrow(np.where(chosen, np.float32(on_value), np.float32(off_value)), element_type)


@np.errstate(all="ignore")
def encode_derivative(source: Elements, bits: int, key: int, lines: Floats) -> Planes | None:
    """Return (bits, words), or None if an element is not finite."""
    require(1 <= bits <= 8 and len(lines) == 47, f"{bits} bits, {len(lines)} numbers of lines")
    borders, scale, shift = np.split(lines, [15, 31])
    codes = []
    for chunk in chunks(source, None):
        if not np.isfinite(chunk.values).all():
            return None
        piece = _count_below(chunk.values, borders)
        steps = chunk.values * scale[piece] + shift[piece]
        codes.append(_encode_steps(replace(chunk, values=steps), bits, key))
    return to_planes(stack(codes, np.uint64), bits)


def decode_derivative(
    planes: Planes, count: int, levels: Floats, element_type: ElementType
) -> Elements:
    """Return the level of every code."""
    return narrow(levels[from_planes(planes).reshape(-1)[:count]], element_type)


def encode_integers(source: NDArray[np.integer], bits: int, base: int) -> Planes:
    """Return (bits, words) of ``source - base``, signed or boolean; KernelError if one is wider."""
    require(1 <= bits <= 64, f"{bits} bits")
    difference = source.astype(np.int64).view(np.uint64) - np.uint64(base & (2**64 - 1))
    if bits < 64 and (difference >> np.uint64(bits)).any():
        raise KernelError(f"asked for {bits}-bit codes from {base} up; some item needs more bits")
    codes = np.zeros(block_count(len(source)) * BLOCK_ELEMENTS, np.uint64)
    codes[: len(source)] = difference
    return to_planes(codes, bits)


def decode_integers(planes: Planes, count: int, base: int, item_bytes: int) -> NDArray[np.integer]:
    """Return signed items of ``item_bytes`` bytes."""
    codes = from_planes(planes).reshape(-1)[:count] + np.uint64(base & (2**64 - 1))
    return codes.astype(f"u{item_bytes}").view(f"i{item_bytes}")
