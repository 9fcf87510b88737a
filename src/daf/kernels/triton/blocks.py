"""Device functions that every Triton kernel is made of: ``reference_blocks`` on a GPU.

A tile is ``BLOCKS`` blocks of 256 elements. Elements travel as bit patterns of
their own width, so that no widening or rounding is left to a compiler. Nothing
here lets a library choose the order of a floating-point sum.
"""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK_ELEMENTS = tl.constexpr(256)
BLOCK_WORDS = tl.constexpr(8)
FLOAT32 = tl.constexpr(0)
BFLOAT16 = tl.constexpr(1)
FLOAT16 = tl.constexpr(2)
INFINITE_BITS = tl.constexpr(0x7F800000)
NAN_BITS = tl.constexpr(0x7FC00000)
NON_FINITE_HEADERS = tl.constexpr(0x7FC07FC0)


# --- elements -------------------------------------------------------------------------------


@triton.jit
def tile_blocks(BLOCKS: tl.constexpr):
    """(BLOCKS,) int64: this program's block numbers."""
    return tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)


@triton.jit
def tile_elements(blocks):
    """(BLOCKS, 256) int64: element numbers."""
    return blocks[:, None] * BLOCK_ELEMENTS + tl.arange(0, BLOCK_ELEMENTS)[None, :]


@triton.jit
def load_elements(source, place, valid, TYPE: tl.constexpr):
    """Exact float32 of elements whose bit patterns are int32 (float32) or int16; +0 elsewhere."""
    bits = tl.load(source + place, mask=valid, other=0)
    if TYPE == FLOAT32:
        values = bits.to(tl.float32, bitcast=True)
    elif TYPE == BFLOAT16:
        values = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        values = bits.to(tl.float16, bitcast=True).to(tl.float32)
    return values


@triton.jit
def store_elements(destination, place, valid, values, TYPE: tl.constexpr):
    """Round to nearest even into the element type; NaN becomes the canonical one."""
    broken = values != values
    bits = values.to(tl.int32, bitcast=True)
    if TYPE == FLOAT32:
        tl.store(destination + place, tl.where(broken, NAN_BITS, bits), mask=valid)
    elif TYPE == BFLOAT16:
        rounded = tl.where(broken, NAN_BITS >> 16, round_bits(bits))
        tl.store(destination + place, rounded.to(tl.int16), mask=valid)
    else:
        half = values.to(tl.float16).to(tl.int16, bitcast=True)
        tl.store(destination + place, tl.where(broken, 0x7E00, half).to(tl.int16), mask=valid)


@triton.jit
def round_bits(bits):
    """A float32's pattern to that of the nearest bf16, in the lower half of an int32."""
    pattern = bits.to(tl.uint32, bitcast=True)
    return ((pattern + 0x7FFF + ((pattern >> 16) & 1)) >> 16).to(tl.int32)


@triton.jit
def nearest_bfloat16(values):
    """Nearest even by integers; -0 becomes +0."""
    return round_bits((values + 0.0).to(tl.int32, bitcast=True))


@triton.jit
def widen_bfloat16(patterns):
    """bf16 patterns in int32 to the float32 numbers they stand for."""
    return (patterns << 16).to(tl.float32, bitcast=True)


@triton.jit
def channel_affine(values, place, scale, shift, channels, inner):
    """``values * scale[c] + shift[c]``, two roundings, ``c = (place // inner) % channels``."""
    channel = (place // inner) % channels
    return values * tl.load(scale + channel) + tl.load(shift + channel)


# --- sums and transforms --------------------------------------------------------------------


@triton.jit
def halve(values, BLOCKS: tl.constexpr, WIDTH: tl.constexpr):
    """(BLOCKS, WIDTH) to its two halves, (BLOCKS, WIDTH / 2) each."""
    return tl.split(tl.permute(tl.reshape(values, (BLOCKS, 2, WIDTH // 2)), (0, 2, 1)))


@triton.jit
def tree_sum(values, BLOCKS: tl.constexpr):
    """(BLOCKS, 256) to (BLOCKS,): strides 128, 64, … 1."""
    low, high = halve(values, BLOCKS, 256)
    low, high = halve(low + high, BLOCKS, 128)
    low, high = halve(low + high, BLOCKS, 64)
    low, high = halve(low + high, BLOCKS, 32)
    low, high = halve(low + high, BLOCKS, 16)
    low, high = halve(low + high, BLOCKS, 8)
    low, high = halve(low + high, BLOCKS, 4)
    low, high = halve(low + high, BLOCKS, 2)
    return tl.reshape(low + high, (BLOCKS,))


@triton.jit
def hadamard(values, BLOCKS: tl.constexpr):
    """Unnormalised transform of every row of (BLOCKS, 256) integers, natural order.

    Eight equal stages: each combines the halves by the highest bit of the place
    and moves that bit to the lowest, so that eight of them bring it back.
    Integers fit, so the order of stages does not matter.
    """
    for _ in tl.static_range(8):
        low, high = halve(values, BLOCKS, 256)
        values = tl.reshape(tl.join(low + high, low - high), (BLOCKS, 256))
    return values


@triton.jit
def prescale_of(values, BLOCKS: tl.constexpr):
    """(BLOCKS,) each: a power of two that brings the block near 1, its inverse, all finite?"""
    patterns = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    greatest = tl.max(patterns, axis=1)
    exponent = tl.minimum(tl.maximum(greatest >> 23, 1), 253)
    prescale = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return prescale, (exponent << 23).to(tl.float32, bitcast=True), greatest < INFINITE_BITS


# --- planes and headers ---------------------------------------------------------------------


@triton.jit
def word_place(word, plane, table, runs, page_words, PAGED: tl.constexpr):
    """Where word ``word`` of a plane lies, in words from the region's start.

    The table tells where each page begins, in words too, before the start or behind it. Flat
    planes are one run in which a plane has ``page_words`` words; ``runs`` is 1 then.
    """
    if PAGED:
        return tl.load(table + plane * runs + word // page_words) + word % page_words
    return plane * page_words + word


@triton.jit
def bit_words(bits, BLOCKS: tl.constexpr):
    """(BLOCKS, 256) integers 0 or 1 to (BLOCKS, 8) words, bit k of word w element 32 w + k.

    No two lanes share a bit, so that their sum is their union; Triton's interpreter adds in NumPy
    and would take every other reduction lane by lane.
    """
    lanes = tl.reshape(bits.to(tl.int32), (BLOCKS, BLOCK_WORDS, 32))
    return tl.sum(lanes << tl.arange(0, 32)[None, None, :], axis=2)


@triton.jit
def word_bits(words, BLOCKS: tl.constexpr):
    """(BLOCKS, 8) words to (BLOCKS, 256) integers 0 or 1."""
    bits = (words[:, :, None] >> tl.arange(0, 32)[None, None, :]) & 1
    return tl.reshape(bits, (BLOCKS, BLOCK_ELEMENTS))


@triton.jit
def tile_words(blocks):
    """(BLOCKS, 8) int64: this tile's words of a plane."""
    return blocks[:, None] * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)[None, :]


@triton.jit
def store_plane(region, table, runs, page_words, plane, blocks, there, bits, BLOCKS, PAGED):
    """Write one plane of a tile where ``there`` (BLOCKS,)."""
    word = tile_words(blocks)
    exists = tl.broadcast_to(there[:, None], (BLOCKS, BLOCK_WORDS))
    place = masked_place(word, exists, plane, table, runs, page_words, PAGED)
    tl.store(region + place, bit_words(bits, BLOCKS), mask=exists)


@triton.jit
def load_plane(region, table, runs, page_words, plane, blocks, there, BLOCKS, PAGED):
    """(BLOCKS, 256) bits of one plane of a tile; 0 where not ``there`` (BLOCKS,)."""
    word = tile_words(blocks)
    exists = tl.broadcast_to(there[:, None], (BLOCKS, BLOCK_WORDS))
    place = masked_place(word, exists, plane, table, runs, page_words, PAGED)
    return word_bits(tl.load(region + place, mask=exists, other=0), BLOCKS)


@triton.jit
def masked(values, region, table, runs, page_words, blocks, there, BLOCKS, MASKED: tl.constexpr):
    """Values whose bit is set, +0 elsewhere; ``MASKED``: 1 for a flat mask, 2 for one in pages."""
    chosen = load_plane(
        region, table, runs, page_words, 0, blocks, there, BLOCKS, PAGED=MASKED == 2
    )
    return tl.where(chosen != 0, values, 0.0)


@triton.jit
def masked_place(word, exists, plane, table, runs, page_words, PAGED: tl.constexpr):
    """``word_place`` that reads no table entry of words that do not exist."""
    return word_place(tl.where(exists, word, 0), plane, table, runs, page_words, PAGED)


@triton.jit
def store_headers(headers, table, entry, page_words, blocks, there, pair, PAGED: tl.constexpr):
    """Write (BLOCKS,) pairs of bf16 patterns, the first in the lower half."""
    place = masked_place(blocks, there, 0, table + entry, 1, page_words, PAGED)
    tl.store(headers + place, pair, mask=there)


@triton.jit
def load_headers(headers, table, entry, page_words, blocks, there, PAGED: tl.constexpr):
    """(BLOCKS,) float32 each: both numbers, and whether both are finite."""
    place = masked_place(blocks, there, 0, table + entry, 1, page_words, PAGED)
    pair = tl.load(headers + place, mask=there, other=0)
    first, second = widen_bfloat16(pair), (pair & -65536).to(tl.float32, bitcast=True)
    finite = ((pair & 0x7F80) != 0x7F80) & (((pair >> 16) & 0x7F80) != 0x7F80)
    return first, second, finite


@triton.jit
def joined_headers(first, second, good):
    """Two bf16 patterns as one word, or those of a block that is not finite."""
    return tl.where(good, (first & 0xFFFF) | (second << 16), NON_FINITE_HEADERS)


@triton.jit
def is_finite_bfloat16(pattern):
    """Of bf16 patterns in int32."""
    return (pattern & 0x7F80) != 0x7F80
