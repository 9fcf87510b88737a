"""Masks, derivative codes and packed integers on a GPU: section 6 of ``docs/format.md``."""

import triton
import triton.language as tl
from triton.language import constexpr

from daf.kernels.triton import blocks as device
from daf.kernels.triton.minmax import rounded_steps


@triton.jit
def encode_mask(
    source, planes, low, high, count, TYPE: constexpr, ABOVE: constexpr, BLOCKS: constexpr
):
    """Write one plane of ``x > low`` (ABOVE) or ``not (x <= low or x >= high)``."""
    blocks, place, valid, there = device.tile(count, BLOCKS)
    values = device.load_elements(source, place, valid, TYPE)
    if ABOVE:
        chosen = values > low
    else:
        chosen = ((values <= low) | (values >= high)) == 0
    device.store_plane(planes, 0, blocks, there, chosen & valid, BLOCKS)


@triton.jit(do_not_specialize=["off_bits", "on_bits"])
def decode_mask(destination, planes, off_bits, on_bits, count, TYPE: constexpr, BLOCKS: constexpr):
    """Write one of two values for each bit, given by their patterns: -0 stays -0."""
    blocks, place, valid, there = device.tile(count, BLOCKS)
    bits = device.load_plane(planes, 0, blocks, there, BLOCKS)
    values = tl.where(bits != 0, on_bits, off_bits).to(tl.float32, bitcast=True)
    device.store_elements(destination, place, valid, values, TYPE)


@triton.jit
def apply_mask(gradient, destination, planes, count, TYPE: constexpr, BLOCKS: constexpr):
    """Write the gradient where the bit is set, +0 elsewhere; no decoded tensor is written."""
    blocks, place, valid, there = device.tile(count, BLOCKS)
    values = device.load_elements(gradient, place, valid, TYPE)
    values = device.masked(values, planes, blocks, there, BLOCKS)
    device.store_elements(destination, place, valid, values, TYPE)


@triton.jit(do_not_specialize=["key_low", "key_high"])
def encode_derivative(
    source,
    planes,
    lines,
    worthless,
    count,
    key_low,
    key_high,
    TYPE: constexpr,
    BITS: constexpr,
    BLOCKS: constexpr,
):
    """Round the steps of each element's line; ``worthless``: one is not finite.

    ``lines`` (47,) float32: 15 ascending borders, the first number of a piece's line, the second.
    """
    blocks, place, valid, there = device.tile(count, BLOCKS)
    values = device.load_elements(source, place, valid, TYPE)
    magnitude = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    some_broken = tl.max(tl.max((magnitude >= device.INFINITE_BITS).to(tl.int32), axis=1), axis=0)
    tl.atomic_max(worthless, 1, mask=some_broken != 0)
    piece = tl.zeros((BLOCKS, 256), tl.int32)
    for level in tl.static_range(4):
        border = tl.load(lines + piece + ((8 >> level) - 1))
        piece += tl.where(values > border, 8 >> level, 0)
    steps = values * tl.load(lines + 15 + piece) + tl.load(lines + 31 + piece)
    codes = rounded_steps(steps, valid, blocks, key_low, key_high, BITS, BLOCKS)
    device.store_codes(planes, codes, blocks, there, BITS, BLOCKS)


@triton.jit
def decode_derivative(
    destination, planes, levels, count, TYPE: constexpr, BITS: constexpr, BLOCKS: constexpr
):
    """Write the level of every code."""
    blocks, place, valid, there = device.tile(count, BLOCKS)
    codes = device.load_codes(planes, blocks, there, tl.int32, BITS, BLOCKS)
    device.store_elements(destination, place, valid, tl.load(levels + codes), TYPE)


@triton.jit(do_not_specialize=["base_low", "base_high"])
def encode_integers(
    source, planes, worthless, base_low, base_high, count, BITS: constexpr, BLOCKS: constexpr
):
    """Write planes of ``value - base`` modulo 2**64; ``worthless``: one needs more bits."""
    blocks, place, valid, there = device.tile(count, BLOCKS)
    base = (base_high.to(tl.int64) << 32) | (base_low.to(tl.int64) & 0xFFFFFFFF)
    values = tl.load(source + place, mask=valid, other=0).to(tl.int64) - base
    codes = tl.where(valid, values, 0).to(tl.uint64, bitcast=True)
    if BITS < 64:
        beyond = ((codes >> BITS) != 0).to(tl.int32)
        tl.atomic_max(worthless, 1, mask=tl.max(tl.max(beyond, axis=1), axis=0) != 0)
    device.store_codes(planes, codes, blocks, there, BITS, BLOCKS)


@triton.jit(do_not_specialize=["base_low", "base_high"])
def decode_integers(
    destination, planes, base_low, base_high, count, BITS: constexpr, BLOCKS: constexpr
):
    """Write ``code + base`` in the destination's own integers."""
    blocks, place, valid, there = device.tile(count, BLOCKS)
    codes = device.load_codes(planes, blocks, there, tl.int64, BITS, BLOCKS)
    base = (base_high.to(tl.int64) << 32) | (base_low.to(tl.int64) & 0xFFFFFFFF)
    values = (codes + base).to(destination.dtype.element_ty)
    tl.store(destination + place, values, mask=valid)
