"""The ``minmax`` codec and its steps on a GPU: section 5 of ``docs/format.md``."""

import triton
import triton.language as tl
from triton.language import constexpr

from daf.kernels.triton import blocks as device
from daf.kernels.triton.philox import dither

_LEAST_MAGNITUDE = tl.constexpr(2.0**-30)
_GREATEST_MAGNITUDE = tl.constexpr(2.0**30)


@triton.jit
def _floor_bfloat16(values):
    """Return the greatest bf16 not above; never given -0."""
    pattern = values.to(tl.uint32, bitcast=True)
    return ((pattern + tl.where(values < 0.0, 0xFFFF, 0).to(tl.uint32)) >> 16).to(tl.int32)


@triton.jit
def _ceiling_bfloat16(values):
    """Return the least bf16 not below, of numbers from +0 upward."""
    return ((values.to(tl.uint32, bitcast=True) + 0xFFFF) >> 16).to(tl.int32)


@triton.jit(do_not_specialize=["key_low", "key_high"])
def encode_minmax(
    source,
    planes,
    affine,
    count,
    key_low,
    key_high,
    TYPE: constexpr,
    BITS: constexpr,
    HAS_GRID: constexpr,
    BLOCKS: constexpr,
):
    """Write every plane and the headers, rounding stochastically.

    Without a grid, values are the numbers of steps, and there are no headers.
    """
    blocks, _, valid, there = device.tile(count, BLOCKS)
    values = device.load_values(source, blocks, valid, affine, TYPE)
    if HAS_GRID:
        last: constexpr = (1 << BITS) - 1
        lowest = tl.min(tl.where(valid, values, float("inf")), axis=1)
        highest = tl.max(tl.where(valid, values, float("-inf")), axis=1)
        magnitude = tl.maximum(tl.abs(lowest), tl.abs(highest))
        ordinary = (magnitude >= _LEAST_MAGNITUDE) & (magnitude <= _GREATEST_MAGNITUDE)
        prescale, unscale, finite = device.prescale_of(values, BLOCKS)
        prescale, unscale = tl.where(ordinary, 1.0, prescale), tl.where(ordinary, 1.0, unscale)
        least = _floor_bfloat16(lowest + 0.0)
        origin = device.widen_bfloat16(least) * prescale
        spread = (highest + 0.0) * prescale - origin
        ideal = tl.math.div_rn(spread, spread * 0.0 + last * 1.0)
        step = _ceiling_bfloat16(ideal * unscale)
        step = tl.where((step == 0) & (ideal > 0.0), 1, step)
        width = device.widen_bfloat16(step) * prescale
        some = tl.where(step == 0, 1.0, width)
        reciprocal = tl.where(step == 0, 0.0, tl.math.div_rn(some * 0.0 + 1.0, some))
        good = there & finite & device.is_finite_bfloat16(least) & device.is_finite_bfloat16(step)
        pair = device.joined_headers(least, step, good)
        device.store_headers(planes, blocks, there, pair, BITS)
        position = (values * prescale[:, None] - origin[:, None]) * reciprocal[:, None]
        position += dither(key_low, key_high, blocks, BLOCKS)
        position = tl.where(valid & good[:, None], position, 1.0)
        codes = tl.minimum(position.to(tl.int32) - 1, last)
    else:
        codes = rounded_steps(values, valid, blocks, key_low, key_high, BITS, BLOCKS)
    device.store_codes(planes, codes, blocks, there, BITS, BLOCKS)


@triton.jit(do_not_specialize=["first_block"])
def decode_minmax(
    destination,
    planes,
    affine,
    mask,
    count,
    first_block,
    TYPE: constexpr,
    BITS: constexpr,
    ACCUMULATE: constexpr,
    HAS_GRID: constexpr,
    BLOCKS: constexpr,
):
    """Decode from ``first_block`` on (no grid: step numbers); affine, accumulate, mask, round."""
    blocks = first_block.to(tl.int64) + device.tile_blocks(BLOCKS)
    there = blocks * 256 < count
    values = device.load_codes(planes, blocks, there, tl.int32, BITS, BLOCKS).to(tl.float32)
    if HAS_GRID:
        least, step, good = device.load_headers(planes, blocks, there, BITS)
        values = least[:, None] + values * step[:, None]
        values = tl.where(good[:, None], values, float("nan"))
    device.write_values(
        destination, values, blocks, first_block, affine, mask, count, TYPE, ACCUMULATE, BLOCKS
    )


@triton.jit
def rounded_steps(position, valid, blocks, key_low, key_high, BITS: constexpr, BLOCKS: constexpr):
    """Return the codes of numbers of steps, rounding stochastically; 0 where not ``valid``."""
    last: constexpr = (1 << BITS) - 1
    position = tl.where(position > 0.0, position, 0.0)
    position = tl.where(position < last * 1.0, position, last * 1.0)
    position += dither(key_low, key_high, blocks, BLOCKS)
    position = tl.where(valid, position, 1.0)
    return tl.minimum(position.to(tl.int32) - 1, last)
