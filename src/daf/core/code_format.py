"""The code format: element types, block and plane sizes, and the bytes that codes take.

Layout, shared by every codec (*unified layout*): a tensor of ``count`` elements in memory order is
padded to whole blocks of 256. A ``b``-bit code is ``b`` planes, most significant first. A plane is
``words_per_plane(count)`` little-endian 32-bit words; bit ``k`` of word ``w`` of a plane is that
plane's bit of element ``32 * w + k``. The planes of one tensor follow each other in memory. Headers
are an array of their own: two bf16 numbers for each block. ``docs/format.md`` is the contract.
"""

from __future__ import annotations

from enum import IntEnum

FORMAT_VERSION = 3


BLOCK_ELEMENTS = 256


HEADER_BYTES_PER_BLOCK = 4


WORD_BYTES = 4  # of planes, and a block's header


ROTATED_BITS = (1, 2, 3, 4)


MINMAX_BITS = (1, 2, 3, 4, 5, 6, 7, 8)


class ElementType(IntEnum):
    """What one element of an uncoded tensor is; the numbers are part of the native interface."""

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2


class Predicate(IntEnum):
    """Which elements set their bit in a mask.

    ``INSIDE``: ``not (x <= low or x >= high)``; NaN sets the bit; a NaN bound is no bound.
    ``ABOVE``: ``x > low``; NaN leaves the bit clear.
    """

    INSIDE = 0
    ABOVE = 1


def block_count(count: int) -> int:
    """Blocks of 256 elements that hold ``count`` elements."""
    return -(-count // BLOCK_ELEMENTS)


def words_per_plane(count: int) -> int:
    """32-bit words in one plane of a tensor of ``count`` elements."""
    return block_count(count) * (BLOCK_ELEMENTS // 32)


def plane_bytes(count: int, bits: int) -> int:
    """Bytes of all ``bits`` planes of a tensor of ``count`` elements."""
    return WORD_BYTES * bits * words_per_plane(count)


def header_bytes(count: int) -> int:
    """Bytes of the header array of a tensor of ``count`` elements."""
    return HEADER_BYTES_PER_BLOCK * block_count(count)


def code_bytes(count: int, bits: int, *, headers: bool = True) -> int:
    """Bytes of a tensor's planes and, where it has them, of the headers behind them."""
    return plane_bytes(count, bits) + (header_bytes(count) if headers else 0)
