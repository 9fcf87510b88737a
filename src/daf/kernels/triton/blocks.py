"""Device functions that every Triton kernel is made of: ``reference.blocks`` on a GPU.

A tile is ``BLOCKS`` blocks of 256 elements. Elements travel as bit patterns of their own width, so
that the compiler neither widens nor rounds. No library chooses the order of a floating-point sum.
"""

import triton
import triton.language as tl
from triton.language import constexpr

BLOCK_ELEMENTS = tl.constexpr(256)
BLOCK_WORDS = tl.constexpr(8)
FLOAT32 = tl.constexpr(0)
BFLOAT16 = tl.constexpr(1)
FLOAT16 = tl.constexpr(2)
INFINITE_BITS = tl.constexpr(0x7F800000)
NAN_BITS = tl.constexpr(0x7FC00000)
NON_FINITE_HEADERS = tl.constexpr(0x7FC07FC0)


@triton.jit
def tile_blocks(BLOCKS: constexpr):
    """Return (BLOCKS,) int64: this program's block numbers."""
    return tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)


@triton.jit
def tile_elements(blocks):
    """Return (BLOCKS, 256) int64: element numbers."""
    return blocks[:, None] * BLOCK_ELEMENTS + tl.arange(0, BLOCK_ELEMENTS)[None, :]


@triton.jit
def tile(count, BLOCKS: constexpr):
    """Return blocks (BLOCKS,), elements (BLOCKS, 256), which elements exist, which blocks do."""
    blocks = tile_blocks(BLOCKS)
    valid, there = which_exist(blocks, count)
    return blocks, tile_elements(blocks), valid, there


@triton.jit
def which_exist(blocks, count):
    """Return which elements (BLOCKS, 256) exist, and which blocks: compared in 32 bits."""
    rest = tl.minimum(count - blocks * BLOCK_ELEMENTS, BLOCK_ELEMENTS).to(tl.int32)
    return tl.arange(0, BLOCK_ELEMENTS)[None, :] < rest[:, None], rest > 0


@triton.jit
def load_elements(source, place, valid, TYPE: constexpr):
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
def store_elements(destination, place, valid, values, TYPE: constexpr):
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
def _divide_small(values, divisor):
    """Return ``values // divisor`` of int32 below 512 by one below 256.

    A multiple of the inverse, rounded up to 20 bits, is too large by less than 512 * 255 / 2**20 of
    a divisor's part, so the floor is exact.
    """
    inverse = (2**20 + divisor - 1) // divisor
    return (values * inverse) >> 20


@triton.jit
def channels_of(blocks, channels, inner):
    """Return (BLOCKS, 256) int32: each element's channel, its number // inner % channels.

    Numbers are divided once a block. A block that spans runs or channels spans 256 at most, so that
    a comparison or a product finds an element's.
    """
    first = blocks * BLOCK_ELEMENTS
    run = first // inner
    place = (first - run * inner).to(tl.int32)[:, None] + tl.arange(0, BLOCK_ELEMENTS)[None, :]
    channel = tl.broadcast_to((run % channels).to(tl.int32)[:, None], place.shape)
    if inner >= BLOCK_ELEMENTS:
        channel += tl.where(place >= inner, 1, 0)
    else:
        channel += _divide_small(place, inner)
    if channels >= BLOCK_ELEMENTS:
        channel = tl.where(channel >= channels, channel - channels, channel)
    else:
        channel -= _divide_small(channel, channels) * channels
    return channel


@triton.jit
def channel_affine(values, channel, affine):
    """Return ``values * scale[channel] + shift[channel]``, rounded twice."""
    return values * tl.load(affine.scale + channel) + tl.load(affine.shift + channel)


@triton.jit
def load_values(source, blocks, valid, affine, TYPE: constexpr):
    """Load blocks and apply an affine, if there is one; +0 where not ``valid``."""
    values = load_elements(source, tile_elements(blocks), valid, TYPE)
    if affine is not None:
        channel = channels_of(blocks, affine.channels, affine.inner)
        values = tl.where(valid, channel_affine(values, channel, affine), 0.0)
    return values


@triton.jit
def halve(values, BLOCKS: constexpr, WIDTH: constexpr):
    """Split (BLOCKS, WIDTH) into its two halves, (BLOCKS, WIDTH / 2) each."""
    return tl.split(tl.permute(tl.reshape(values, (BLOCKS, 2, WIDTH // 2)), (0, 2, 1)))


@triton.jit
def add_halves(values, ROWS: constexpr, WIDTH: constexpr):
    """Add the two halves of each row of (ROWS, WIDTH): (ROWS, WIDTH / 2).

    A sum of two has one order. So the compiler may take the one from another lane's register, where
    a split would send both through shared memory.
    """
    return tl.sum(tl.reshape(values, (ROWS, 2, WIDTH // 2)), axis=1)


@triton.jit
def tree_sum(values, BLOCKS: constexpr, FIRST: constexpr = 0):
    """Sum (BLOCKS, 256 >> FIRST) to (BLOCKS,): strides 128 >> FIRST, … 1."""
    for level in tl.static_range(FIRST, 8):
        values = add_halves(values, BLOCKS, 256 >> level)
    return tl.reshape(values, (BLOCKS,))


@triton.jit
def hadamard_matrix():
    """Return (16, 16) fp16: 1 or -1 by the parity of the bits that row and column share."""
    shared = tl.arange(0, 16)[:, None] & tl.arange(0, 16)[None, :]
    shared ^= shared >> 2
    shared ^= shared >> 1
    return (1 - 2 * (shared & 1)).to(tl.float16)


@triton.jit
def hadamard(values, matrix, BLOCKS: constexpr, NARROW: constexpr):
    """Transform rows of (BLOCKS, 256) float32 integers: unnormalised Hadamard, natural order.

    ``matrix`` is ``hadamard_matrix``, the transform of 16. With a row as a square of 16, the
    transform is H X H, and matrix units do both products. They add integers below 2**24 exactly.
    Their operands are fp16, which holds integers up to 2048: the values must be such, and so must
    those of H X if ``NARROW``. Otherwise H X, of at most 2**22, is the sum of what fp16 keeps of it
    and of the rest. Any four bits of the place may span a side of the square: the upper three come
    lowest, as lanes that load a row side by side hold these in registers of their own.
    """
    square = tl.permute(tl.reshape(values.to(tl.float16), (BLOCKS, 8, 2, 16)), (0, 3, 2, 1))
    columns = tl.permute(tl.reshape(square, (BLOCKS * 16, 16)), (1, 0))
    half = tl.permute(tl.reshape(tl.dot(matrix, columns), (16, BLOCKS, 16)), (1, 0, 2))
    half = tl.reshape(half, (BLOCKS * 16, 16))
    most = half.to(tl.float16)
    full = tl.dot(most, matrix)
    if not NARROW:
        full = tl.dot((half - most.to(tl.float32)).to(tl.float16), matrix, acc=full)
    return tl.reshape(tl.permute(tl.reshape(full, (BLOCKS, 2, 8, 16)), (0, 2, 1, 3)), (BLOCKS, 256))


@triton.jit
def prescale_of(values, BLOCKS: constexpr):
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
def header_place(planes, block, BITS: constexpr):
    """Return where the header of a block lies, in words from the headers' start."""
    return block if planes.table is None else word_place(planes, block, BITS)


@triton.jit
def bit_words(bits, BLOCKS: constexpr):
    """Pack (BLOCKS, 256) booleans into (BLOCKS, 8) words: bit k of word w is element 32 w + k.

    The sum is a union: no two lanes share a bit. Triton's interpreter is slow at other reductions.
    """
    lanes = tl.reshape(bits, (BLOCKS, BLOCK_WORDS, 32))
    return tl.sum(tl.where(lanes, 1 << tl.arange(0, 32)[None, None, :], 0), axis=2)


@triton.jit
def word_bits(words, BLOCKS: constexpr):
    """Unpack (BLOCKS, 8) words into (BLOCKS, 256) integers 0 or 1."""
    bits = (words[:, :, None] >> tl.arange(0, 32)[None, None, :]) & 1
    return tl.reshape(bits, (BLOCKS, BLOCK_ELEMENTS))


@triton.jit
def tile_words(blocks):
    """Return (BLOCKS, 8) int64: this tile's words of a plane."""
    return blocks[:, None] * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)[None, :]


@triton.jit
def store_words(planes, plane, blocks, there, words, BLOCKS: constexpr):
    """Write (BLOCKS, 8) words of one plane of a tile where ``there`` (BLOCKS,)."""
    word = tile_words(blocks)
    exists = tl.broadcast_to(there[:, None], (BLOCKS, BLOCK_WORDS))
    place = word_place(planes, tl.where(exists, word, 0), plane)
    tl.store(planes.region + place, words, mask=exists)


@triton.jit
def store_plane(planes, plane, blocks, there, bits, BLOCKS: constexpr):
    """Write one plane of a tile, (BLOCKS, 256) booleans, where ``there`` (BLOCKS,)."""
    store_words(planes, plane, blocks, there, bit_words(bits, BLOCKS), BLOCKS)


@triton.jit
def load_plane(planes, plane, blocks, there, BLOCKS: constexpr):
    """Load (BLOCKS, 256) bits of one plane of a tile; 0 where not ``there`` (BLOCKS,)."""
    word = tile_words(blocks)
    exists = tl.broadcast_to(there[:, None], (BLOCKS, BLOCK_WORDS))
    place = word_place(planes, tl.where(exists, word, 0), plane)
    return word_bits(tl.load(planes.region + place, mask=exists, other=0), BLOCKS)


@triton.jit
def store_codes(planes, codes, blocks, there, BITS: constexpr, BLOCKS: constexpr):
    """Write all planes of (BLOCKS, 256) codes."""
    for plane in tl.static_range(BITS):
        bits = (codes >> (BITS - 1 - plane)) & 1 != 0
        store_plane(planes, plane, blocks, there, bits, BLOCKS)


@triton.jit
def load_codes(planes, blocks, there, ITEM: constexpr, BITS: constexpr, BLOCKS: constexpr):
    """Load (BLOCKS, 256) codes, integers of type ITEM, from all planes."""
    codes = tl.zeros((BLOCKS, 256), ITEM)
    for plane in tl.static_range(BITS):
        codes = (codes << 1) | load_plane(planes, plane, blocks, there, BLOCKS).to(ITEM)
    return codes


@triton.jit
def masked(values, mask, blocks, there, BLOCKS: constexpr):
    """Return values whose bit is set, +0 elsewhere; all values without a mask."""
    if mask.region is not None:
        chosen = load_plane(mask, 0, blocks, there, BLOCKS)
        values = tl.where(chosen != 0, values, 0.0)
    return values


@triton.jit
def masked_at(values, mask, place, valid):
    """Return single values whose bit of the mask is set, +0 elsewhere."""
    if mask.region is not None:
        there = word_place(mask, tl.where(valid, place // 32, 0), 0)
        word = tl.load(mask.region + there, mask=valid, other=0)
        values = tl.where((word >> (place % 32).to(tl.int32)) & 1 != 0, values, 0.0)
    return values


@triton.jit
def values_at(values, place, valid, first_value, affine, TYPE: constexpr):
    """Load values that begin with element ``first_value`` of the tensor, and apply an affine."""
    found = load_elements(values, place - first_value, valid, TYPE)
    if affine is not None:
        found = channel_affine(found, (place // affine.inner) % affine.channels, affine)
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
    TYPE: constexpr,
    ACCUMULATE: constexpr,
    BLOCKS: constexpr,
):
    """Apply affine, accumulate, mask, round. ``destination`` begins with block ``first_block``."""
    written = tile_elements(blocks - first_block)
    valid, there = which_exist(blocks, count)
    if affine is not None:
        values = channel_affine(values, channels_of(blocks, affine.channels, affine.inner), affine)
    if ACCUMULATE:
        values = load_elements(destination, written, valid, TYPE) + values
    values = masked(values, mask, blocks, there, BLOCKS)
    store_elements(destination, written, valid, values, TYPE)


@triton.jit
def store_headers(planes, blocks, there, pair, BITS: constexpr):
    """Write (BLOCKS,) pairs of bf16 patterns, the first in the lower half."""
    place = header_place(planes, tl.where(there, blocks, 0), BITS)
    tl.store(planes.headers + place, pair, mask=there)


@triton.jit
def load_headers(planes, blocks, there, BITS: constexpr):
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
