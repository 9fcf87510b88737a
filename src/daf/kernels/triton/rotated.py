"""The ``rotated`` codec on a GPU: section 4 of ``docs/format.md``."""

from __future__ import annotations

import triton
import triton.language as tl

from daf.kernels.triton.blocks import (
    hadamard,
    is_finite_bfloat16,
    joined_headers,
    load_headers,
    load_plane,
    load_values,
    nearest_bfloat16,
    prescale_of,
    store_headers,
    store_plane,
    tile,
    tile_blocks,
    tree_sum,
    widen_bfloat16,
    write_values,
)
from daf.kernels.triton.philox import flip_signs, sign_bits

_LEAST_ENERGY = tl.constexpr(2.0**-60)
_GREATEST_ENERGY = tl.constexpr(2.0**60)
_LENGTH = tl.constexpr(2000.0)
_LENGTH_TIMES_UNIT = tl.constexpr(2000.0 * 2048.0)
_COEFFICIENT_MULTIPLIER = tl.constexpr(1704)
_ROUND_TO_INTEGER = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding it drops the fraction
_ROUND_PATTERN = tl.constexpr(0x4B400000)


@triton.jit
def _centre(values, valid, real_count, prescale, unscale, BLOCKS: tl.constexpr):
    """Return blocks around their rounded mean; the mean's bf16 pattern; the energy."""
    scaled = values * prescale[:, None]
    average = tl.math.div_rn(tree_sum(scaled, BLOCKS), real_count)
    mean = nearest_bfloat16(average * unscale)
    origin = widen_bfloat16(mean) * prescale
    centred = tl.where(valid, scaled - origin[:, None], 0.0)
    return centred, mean, tree_sum(centred * centred, BLOCKS)


@triton.jit
def _centre_ordinary(values, valid, real_count, BLOCKS: tl.constexpr):
    """Do the same, prescaled if the energy asks for it; also return the prescale's inverse."""
    one = real_count * 0.0 + 1.0
    centred, mean, energy = _centre(values, valid, real_count, one, one, BLOCKS)
    ordinary = (energy >= _LEAST_ENERGY) & (energy <= _GREATEST_ENERGY)
    prescale, unscale, finite = prescale_of(values, BLOCKS)
    prescale, unscale = tl.where(ordinary, one, prescale), tl.where(ordinary, one, unscale)
    if tl.min(ordinary.to(tl.int32), axis=0) == 0:
        centred, mean, energy = _centre(values, valid, real_count, prescale, unscale, BLOCKS)
    return centred, mean, energy, unscale, finite


@triton.jit
def _to_integers(values, finite):
    """Round to nearest even, numbers below 2**22; 0 in blocks that are not finite."""
    pattern = (values + _ROUND_TO_INTEGER).to(tl.int32, bitcast=True)
    return tl.where(finite[:, None], pattern - _ROUND_PATTERN, 0)


@triton.jit
def _rotate(values, key_low, key_high, blocks, ROUNDS: tl.constexpr, BLOCKS: tl.constexpr):
    values = flip_signs(values, sign_bits(key_low, key_high, blocks, 0, BLOCKS))
    values = hadamard(values, BLOCKS)
    if ROUNDS == 2:
        values = flip_signs((values + 8) >> 4, sign_bits(key_low, key_high, blocks, 1, BLOCKS))
        values = hadamard(values, BLOCKS)
    return values


@triton.jit
def _rotate_back(values, key_low, key_high, blocks, ROUNDS: tl.constexpr, BLOCKS: tl.constexpr):
    values = hadamard(values, BLOCKS)
    if ROUNDS == 2:
        values = flip_signs((values + 8) >> 4, sign_bits(key_low, key_high, blocks, 1, BLOCKS))
        values = hadamard(values, BLOCKS)
    return flip_signs(values, sign_bits(key_low, key_high, blocks, 0, BLOCKS))


@triton.jit
def _find_cells(rotated, thresholds, BITS: tl.constexpr):
    """Return each number's code, its most significant bit at weight 8."""
    coefficients = tl.minimum(tl.maximum((rotated * _COEFFICIENT_MULTIPLIER) >> 16, -128), 127)
    cells = coefficients * 0
    for step in tl.static_range(BITS):
        threshold = tl.load(thresholds + step * 16 + cells).to(tl.int32)
        cells += tl.where(coefficients > threshold, 8 >> step, 0)
    return cells


@triton.jit(do_not_specialize=["key_low", "key_high"])
def encode_rotated(
    source,
    planes,
    affine,
    thresholds,
    levels,
    count,
    key_low,
    key_high,
    full_runs,
    TYPE: tl.constexpr,
    BITS: tl.constexpr,
    KEPT: tl.constexpr,
    ROUNDS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Write the headers and the planes that each run has."""
    blocks, place, valid, there = tile(count, BLOCKS)
    values = load_values(source, place, valid, affine, TYPE)
    real_count = tl.minimum(tl.maximum(count - blocks * 256, 1), 256).to(tl.float32)
    centred, mean, energy, unscale, finite = _centre_ordinary(values, valid, real_count, BLOCKS)
    norm = tl.math.sqrt_rn(energy)
    flat = norm == 0.0
    length = tl.where(flat, 1.0, norm)
    integers = _to_integers(
        centred * tl.math.div_rn(length * 0.0 + _LENGTH, length)[:, None], finite
    )
    rotated = _rotate(integers, key_low, key_high, blocks, ROUNDS, BLOCKS)
    cells = _find_cells(rotated, thresholds, BITS)
    product = tl.sum(rotated * tl.load(levels + cells).to(tl.int32), axis=1)
    gain = tl.math.div_rn(norm * _LENGTH_TIMES_UNIT, tl.where(flat, 1, product).to(tl.float32))
    step = tl.where(flat, 0, nearest_bfloat16(gain * unscale))
    good = finite & is_finite_bfloat16(mean) & is_finite_bfloat16(step)
    pair = joined_headers(mean, step, good)
    store_headers(planes, blocks, there, pair, BITS)
    written = (good & (norm != 0.0))[:, None]
    full = blocks * 8 < full_runs * planes.page_words.to(tl.int64)
    for plane in tl.static_range(KEPT):
        bits = tl.where(written, (cells >> (3 - plane)) & 1, 0)
        exists = there & (full | (plane < KEPT - 1))
        store_plane(planes, plane, blocks, exists, bits, BLOCKS)


@triton.jit(do_not_specialize=["key_low", "key_high", "first_block"])
def decode_rotated(
    destination,
    planes,
    affine,
    mask,
    levels,
    factors,
    count,
    first_block,
    key_low,
    key_high,
    full_runs,
    TYPE: tl.constexpr,
    BITS: tl.constexpr,
    KEPT: tl.constexpr,
    ROUNDS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Decode every run from the planes it has: the first KEPT, or one less after ``full_runs``.

    ``levels`` holds the table of KEPT planes, then that of one less; ``factors`` likewise.
    """
    blocks = first_block.to(tl.int64) + tile_blocks(BLOCKS)
    there = blocks * 256 < count
    mean, step, good = load_headers(planes, blocks, there, BITS)
    full = blocks * 8 < full_runs * planes.page_words.to(tl.int64)
    cells = tl.zeros((BLOCKS, 256), tl.int32)
    for plane in tl.static_range(KEPT):
        exists = there & (full | (plane < KEPT - 1))
        bits = load_plane(planes, plane, blocks, exists, BLOCKS)
        cells += bits << (3 - plane)
    width = tl.where(full, 0, 1)
    level = tl.load(levels + width[:, None] * 16 + cells).to(tl.int32)
    rotated = _rotate_back(level, key_low, key_high, blocks, ROUNDS, BLOCKS).to(tl.float32)
    factor = step * tl.load(factors + width)
    values = mean[:, None] + factor[:, None] * rotated
    values = tl.where(good[:, None], values, float("nan"))
    write_values(
        destination, values, blocks, first_block, affine, mask, count, TYPE, ACCUMULATE, BLOCKS
    )
