"""What the oracle's codecs share: tensors to blocks and back, planes, headers, prescaling."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daf.core.code_format import BLOCK_ELEMENTS, ElementType, block_count
from daf.core.errors import KernelError
from reference.elements import Elements, Floats, Headers, Planes, narrow, widen, widen_bfloat16

NON_FINITE_HEADER = 0x7FC0
_CHUNK_BLOCKS = 4096


class Affine(NamedTuple):
    """``value * scale[c] + shift[c]`` with ``c = (i // inner) % len(scale)``; see Channels."""

    scale: Floats
    shift: Floats
    inner: int

    @np.errstate(all="ignore")
    def apply(self, values: Floats, first: int) -> Floats:
        """Apply to ``values`` (blocks, 256), of which the first is element number ``first``."""
        place = first + np.arange(values.size, dtype=np.int64).reshape(values.shape)
        channel = (place // self.inner) % len(self.scale)
        product: Floats = values * self.scale[channel]
        return product + self.shift[channel]


class Code(NamedTuple):
    """What an encoder returns."""

    planes: Planes
    headers: Headers


@dataclass(frozen=True)
class Target:
    """What a decoder writes: element count and type, what it adds to, and where."""

    count: int
    element_type: ElementType = ElementType.FLOAT32
    accumulate_onto: Elements | None = None
    mask: Planes | None = None


@dataclass(frozen=True)
class Chunk:
    """Consecutive blocks of a tensor, widened: (n, 256) values and which of them are real."""

    first_block: int
    values: Floats
    valid: NDArray[np.bool_]

    @property
    def blocks(self) -> NDArray[np.uint64]:
        """(n,) block numbers, the counters of the random numbers."""
        return self.first_block + np.arange(len(self.values), dtype=np.uint64)


def chunks(source: Elements, affine: Affine | None) -> Iterator[Chunk]:
    """Yield the tensor's blocks, a few thousand at a time; padding is 0, after the affine too."""
    step = _CHUNK_BLOCKS * BLOCK_ELEMENTS
    for start in range(0, len(source), step):
        values = widen(source[start : start + step])
        count = len(values)
        padded = np.zeros(block_count(count) * BLOCK_ELEMENTS, np.float32)
        padded[:count] = values
        valid = (np.arange(len(padded)) < count).reshape(-1, BLOCK_ELEMENTS)
        blocks = padded.reshape(-1, BLOCK_ELEMENTS)
        if affine is not None:
            blocks = np.where(valid, affine.apply(blocks, start), np.float32(0))
        yield Chunk(start // BLOCK_ELEMENTS, blocks, valid)


def tree_sum(values: Floats, down_to: int = 1) -> Floats:
    """Sum (n, powers of two) to (n, ``down_to``) by halving strides."""
    width = values.shape[1]
    while width > down_to:
        width //= 2
        values = values[:, :width] + values[:, width : 2 * width]
    return values


def to_planes(codes: NDArray[np.uint64], bits: int) -> Planes:
    """Convert (n, 256) codes to (bits, 8 n) words, the most significant plane first."""
    shifts = np.arange(bits - 1, -1, -1, dtype=np.uint64)
    bit = ((codes.reshape(1, -1, 32) >> shifts[:, None, None]) & np.uint64(1)).astype(np.uint32)
    planes: Planes = np.bitwise_or.reduce(bit << np.arange(32, dtype=np.uint32), axis=2)
    return planes


def from_planes(planes: Planes) -> NDArray[np.uint64]:
    """Convert (k, 8 n) words to (n, 256) codes of k bits."""
    codes = np.zeros((planes.shape[1], 32), np.uint64)
    for plane in planes:
        bit = (plane[:, None] >> np.arange(32, dtype=np.uint32)) & np.uint32(1)
        codes = (codes << np.uint64(1)) | bit
    return codes.reshape(-1, BLOCK_ELEMENTS)


def prescale_of(chunk: Chunk) -> tuple[Floats, Floats, NDArray[np.bool_]]:
    """Return (n, 1) each: a power of two that brings the block near 1, its inverse, all finite?"""
    patterns = np.where(chunk.valid, chunk.values, np.float32(0)).view(np.uint32)
    greatest = (patterns & np.uint32(0x7FFFFFFF)).max(axis=1, keepdims=True)
    exponent = np.clip(greatest >> np.uint32(23), 1, 253).astype(np.uint32)
    prescale = ((np.uint32(254) - exponent) << np.uint32(23)).view(np.float32)
    return prescale, (exponent << np.uint32(23)).view(np.float32), greatest < 0x7F800000


def finish(
    codes: NDArray[np.uint64], headers: Headers, finite: NDArray[np.bool_], bits: int
) -> Code:
    """Apply the rule for non-finite blocks and cut the codes into planes."""
    good = finite & np.isfinite(widen_bfloat16(headers)).all(axis=1, keepdims=True)
    headers = np.where(good, headers, np.uint16(NON_FINITE_HEADER))
    return Code(to_planes(np.where(good, codes, np.uint64(0)), bits), headers)


def spoil(values: Floats, headers: Headers) -> Floats:
    """Write NaN wherever a header number is not finite."""
    good = np.isfinite(widen_bfloat16(headers)).all(axis=1, keepdims=True)
    return np.where(good, values, np.float32(np.nan))


def join(codes: list[Code], bits: int) -> Code:
    """Join the codes of consecutive chunks."""
    if not codes:
        return Code(np.zeros((bits, 0), np.uint32), np.zeros((0, 2), np.uint16))
    return Code(
        np.concatenate([code.planes for code in codes], axis=1),
        np.concatenate([code.headers for code in codes]),
    )


def block_runs(code: Code) -> Iterator[tuple[int, Planes, Headers]]:
    """Yield (first block, planes, headers) of a few thousand blocks at a time."""
    for first in range(0, len(code.headers), _CHUNK_BLOCKS):
        last = first + _CHUNK_BLOCKS
        yield first, code.planes[:, 8 * first : 8 * last], code.headers[first:last]


def stack(pieces: list[Any], dtype: Any = np.float32) -> NDArray[Any]:
    """Stack all chunks' blocks, perhaps none."""
    return np.concatenate(pieces) if pieces else np.zeros((0, BLOCK_ELEMENTS), dtype)


@np.errstate(all="ignore")
def store(values: Floats, target: Target, affine: Affine | None) -> Elements:
    """Write values by section 7 of the format."""
    if affine is not None:
        values = affine.apply(values, 0)
    flat = values.reshape(-1)[: target.count]
    if target.accumulate_onto is not None:
        flat = widen(target.accumulate_onto) + flat
    if target.mask is not None:
        chosen = from_planes(target.mask).reshape(-1)[: target.count] == 1
        flat = np.where(chosen, flat, np.float32(0))
    return narrow(flat, target.element_type)


def require(holds: bool, asked: str) -> None:
    """Raise KernelError, which names what was ``asked``, unless it ``holds``."""
    if not holds:
        raise KernelError(f"asked for {asked}; see docs/format.md for what exists")
