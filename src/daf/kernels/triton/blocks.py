"""Device functions that every Triton kernel is made of: ``reference.blocks`` on a GPU.

A tile is ``BLOCKS`` blocks of 256 elements. Elements travel as bit patterns of their own width, so
that the compiler neither widens nor rounds. No library chooses the order of a floating-point sum.
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


@triton.jit
def tile_blocks(BLOCKS: tl.constexpr):
    """Return (BLOCKS,) int64: this program's block numbers."""
    return tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)


@triton.jit
def tile_elements(blocks):
    """Return (BLOCKS, 256) int64: element numbers."""
    return blocks[:, None] * BLOCK_ELEMENTS + tl.arange(0, BLOCK_ELEMENTS)[None, :]


@triton.jit
def tile(count, BLOCKS: tl.constexpr):
    """Return blocks (BLOCKS,), elements (BLOCKS, 256), which elements exist, which blocks do."""
    blocks = tile_blocks(BLOCKS)
    place = tile_elements(blocks)
    return blocks, place, place < count, blocks * BLOCK_ELEMENTS < count


@triton.jit
def load_elements(source, place, valid, TYPE: tl.constexpr):
    """Load exact float32 of int32 (float32) or int16 patterns; +0 where not ``valid``."""
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
    """Round a float32's pattern to that of the nearest bf16, in the lower half of an int32."""
    pattern = bits.to(tl.uint32, bitcast=True)
    return ((pattern + 0x7FFF + ((pattern >> 16) & 1)) >> 16).to(tl.int32)


@triton.jit
def nearest_bfloat16(values):
    """Round to nearest even by integers; -0 becomes +0."""
    return round_bits((values + 0.0).to(tl.int32, bitcast=True))


@triton.jit
def widen_bfloat16(patterns):
    """Convert bf16 patterns in int32 to the float32 numbers they stand for."""
    return (patterns << 16).to(tl.float32, bitcast=True)


@triton.jit
def channel_affine(values, place, affine):
    """Return ``values * scale[c] + shift[c]``, rounded twice; ``c = place // inner % channels``."""
    channel = (place // affine.inner) % affine.channels
    return values * tl.load(affine.scale + channel) + tl.load(affine.shift + channel)


@triton.jit
def load_values(source, place, valid, affine, TYPE: tl.constexpr):
    """Load elements and apply an affine, if there is one; +0 where not ``valid``."""
    values = load_elements(source, place, valid, TYPE)
    if affine is not None:
        values = tl.where(valid, channel_affine(values, place, affine), 0.0)
    return values


@triton.jit
def halve(values, BLOCKS: tl.constexpr, WIDTH: tl.constexpr):
    """Split (BLOCKS, WIDTH) into its two halves, (BLOCKS, WIDTH / 2) each."""
    return tl.split(tl.permute(tl.reshape(values, (BLOCKS, 2, WIDTH // 2)), (0, 2, 1)))


@triton.jit
def tree_sum(values, BLOCKS: tl.constexpr):
    """Sum (BLOCKS, 256) to (BLOCKS,): strides 128, 64, … 1."""
    for level in tl.static_range(8):
        low, high = halve(values, BLOCKS, 256 >> level)
        values = low + high
    return tl.reshape(values, (BLOCKS,))


@triton.jit
def hadamard(values, BLOCKS: tl.constexpr):
    """Transform every row of (BLOCKS, 256) integers: unnormalised Hadamard, natural order.

    Each of eight equal stages combines the halves by the highest bit of the place and makes that
    bit the lowest. Integers fit, so the order of stages does not matter.
    """
    for _ in tl.static_range(8):
        low, high = halve(values, BLOCKS, 256)
        values = tl.reshape(tl.join(low + high, low - high), (BLOCKS, 256))
    return values


@triton.jit
def prescale_of(values, BLOCKS: tl.constexpr):
    """Return (BLOCKS,) each: a power of two to bring the block near 1, its inverse, all finite?"""
    patterns = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    greatest = tl.max(patterns, axis=1)
    exponent = tl.minimum(tl.maximum(greatest >> 23, 1), 253)
    prescale = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return prescale, (exponent << 23).to(tl.float32, bitcast=True), greatest < INFINITE_BITS


@triton.jit
def word_place(planes, word, plane):
    """Return where word ``word`` of a plane lies, in words from the region's start.

    The table gives each page's start in words, which may be negative. Planes without a table are
    one run of ``page_words`` words each.
    """
    if planes.table is None:
        place = plane * planes.page_words + word
    else:
        page = tl.load(planes.table + plane * planes.runs + word // planes.page_words)
        place = page + word % planes.page_words
    return place


@triton.jit
def header_place(planes, block, BITS: tl.constexpr):
    """Return where the header of a block lies, in words from the headers' start."""
    return block if planes.table is None else word_place(planes, block, BITS)


@triton.jit
def bit_words(bits, BLOCKS: tl.constexpr):
    """Pack (BLOCKS, 256) bits into (BLOCKS, 8) words: bit k of word w is element 32 w + k.

    The sum is a union: no two lanes share a bit. Triton's interpreter is slow at other reductions.
    """
    lanes = tl.reshape(bits.to(tl.int32), (BLOCKS, BLOCK_WORDS, 32))
    return tl.sum(lanes << tl.arange(0, 32)[None, None, :], axis=2)


@triton.jit
def word_bits(words, BLOCKS: tl.constexpr):
    """Unpack (BLOCKS, 8) words into (BLOCKS, 256) integers 0 or 1."""
    bits = (words[:, :, None] >> tl.arange(0, 32)[None, None, :]) & 1
    return tl.reshape(bits, (BLOCKS, BLOCK_ELEMENTS))


@triton.jit
def tile_words(blocks):
    """Return (BLOCKS, 8) int64: this tile's words of a plane."""
    return blocks[:, None] * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)[None, :]


@triton.jit
def store_plane(planes, plane, blocks, there, bits, BLOCKS: tl.constexpr):
    """Write one plane of a tile where ``there`` (BLOCKS,)."""
    word = tile_words(blocks)
    exists = tl.broadcast_to(there[:, None], (BLOCKS, BLOCK_WORDS))
    place = word_place(planes, tl.where(exists, word, 0), plane)
    tl.store(planes.region + place, bit_words(bits, BLOCKS), mask=exists)


@triton.jit
def load_plane(planes, plane, blocks, there, BLOCKS: tl.constexpr):
    """Load (BLOCKS, 256) bits of one plane of a tile; 0 where not ``there`` (BLOCKS,)."""
    word = tile_words(blocks)
    exists = tl.broadcast_to(there[:, None], (BLOCKS, BLOCK_WORDS))
    place = word_place(planes, tl.where(exists, word, 0), plane)
    return word_bits(tl.load(planes.region + place, mask=exists, other=0), BLOCKS)


@triton.jit
def store_codes(planes, codes, blocks, there, BITS: tl.constexpr, BLOCKS: tl.constexpr):
    """Write all planes of (BLOCKS, 256) codes."""
    for plane in tl.static_range(BITS):
        bits = ((codes >> (BITS - 1 - plane)) & 1).to(tl.int32)
        store_plane(planes, plane, blocks, there, bits, BLOCKS)


@triton.jit
def load_codes(planes, blocks, there, ITEM: tl.constexpr, BITS: tl.constexpr, BLOCKS: tl.constexpr):
    """Load (BLOCKS, 256) codes, integers of type ITEM, from all planes."""
    codes = tl.zeros((BLOCKS, 256), ITEM)
    for plane in tl.static_range(BITS):
        codes = (codes << 1) | load_plane(planes, plane, blocks, there, BLOCKS).to(ITEM)
    return codes


@triton.jit
def masked(values, mask, blocks, there, BLOCKS: tl.constexpr):
    """Return values whose bit is set, +0 elsewhere; all values without a mask."""
    if mask is not None:
        chosen = load_plane(mask, 0, blocks, there, BLOCKS)
        values = tl.where(chosen != 0, values, 0.0)
    return values


@triton.jit
def masked_at(values, mask, place, valid):
    """Return single values whose bit of the mask is set, +0 elsewhere."""
    if mask is not None:
        there = word_place(mask, tl.where(valid, place // 32, 0), 0)
        word = tl.load(mask.region + there, mask=valid, other=0)
        values = tl.where((word >> (place % 32).to(tl.int32)) & 1 != 0, values, 0.0)
    return values


@triton.jit
def values_at(values, place, valid, first_value, affine, TYPE: tl.constexpr):
    """Load values that begin with element ``first_value`` of the tensor, and apply an affine."""
    found = load_elements(values, place - first_value, valid, TYPE)
    if affine is not None:
        found = channel_affine(found, place, affine)
    return found


@triton.jit
def write_values(
    destination,
    values,
    blocks,
    first_block,
    affine,
    mask,
    count,
    TYPE: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Apply affine, accumulate, mask, round. ``destination`` begins with block ``first_block``."""
    place = tile_elements(blocks)
    written = place - first_block.to(tl.int64) * 256
    valid = place < count
    if affine is not None:
        values = channel_affine(values, place, affine)
    if ACCUMULATE:
        values = load_elements(destination, written, valid, TYPE) + values
    values = masked(values, mask, blocks, blocks * 256 < count, BLOCKS)
    store_elements(destination, written, valid, values, TYPE)


@triton.jit
def store_headers(planes, blocks, there, pair, BITS: tl.constexpr):
    """Write (BLOCKS,) pairs of bf16 patterns, the first in the lower half."""
    place = header_place(planes, tl.where(there, blocks, 0), BITS)
    tl.store(planes.headers + place, pair, mask=there)


@triton.jit
def load_headers(planes, blocks, there, BITS: tl.constexpr):
    """Load both numbers, (BLOCKS,) float32 each, and whether both are finite."""
    place = header_place(planes, tl.where(there, blocks, 0), BITS)
    pair = tl.load(planes.headers + place, mask=there, other=0)
    first, second = widen_bfloat16(pair), (pair & -65536).to(tl.float32, bitcast=True)
    finite = ((pair & 0x7F80) != 0x7F80) & (((pair >> 16) & 0x7F80) != 0x7F80)
    return first, second, finite


@triton.jit
def joined_headers(first, second, good):
    """Join two bf16 patterns into one word; those of a bad block if not ``good``."""
    return tl.where(good, (first & 0xFFFF) | (second << 16), NON_FINITE_HEADERS)


@triton.jit
def is_finite_bfloat16(pattern):
    """True where bf16 patterns in int32 are finite."""
    return (pattern & 0x7F80) != 0x7F80
