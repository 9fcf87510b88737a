"""The code format: element types, block and plane sizes, and the bytes that codes take.

Every codec's *unified layout* (contract: ``docs/format.md``): ``count`` elements in memory order,
padded to blocks of 256, are ``b`` planes, most significant first, one after the other. A plane is
``words_per_plane(count)`` little-endian 32-bit words; bit ``k`` of word ``w`` belongs to element
``32 * w + k``. Headers are a separate array of two bf16 numbers per block.
"""

from enum import IntEnum

FORMAT_VERSION = 4
BLOCK_ELEMENTS = 256
HEADER_BYTES_PER_BLOCK = 4
WORD_BYTES = 4  # of planes, and a block's header
ROTATED_BITS = (1, 2, 3, 4)
MINMAX_BITS = (1, 2, 3, 4, 5, 6, 7, 8)


class ElementType(IntEnum):
    """The type of an uncoded element; the numbers are part of the native interface."""

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2


class Predicate(IntEnum):
    """Which elements set their bit in a mask."""

    INSIDE = 0  # ``not (x <= low or x >= high)``: NaN sets the bit, a NaN bound is no bound
    ABOVE = 1  # ``x > low``: NaN clears the bit


def block_count(count: int) -> int:
    """Return the number of blocks that hold ``count`` elements."""
    return -(-count // BLOCK_ELEMENTS)


def words_per_plane(count: int) -> int:
    """Return the 32-bit words in one plane of ``count`` elements."""
    return block_count(count) * (BLOCK_ELEMENTS // 32)


def plane_bytes(count: int, bits: int) -> int:
    """Return the bytes of ``bits`` planes of ``count`` elements."""
    return WORD_BYTES * bits * words_per_plane(count)


def header_bytes(count: int) -> int:
    """Return the bytes of the header array of ``count`` elements."""
    return HEADER_BYTES_PER_BLOCK * block_count(count)


def code_bytes(count: int, bits: int, *, headers: bool = True) -> int:
    """Return the bytes of a tensor's planes and headers."""
    return plane_bytes(count, bits) + (header_bytes(count) if headers else 0)
