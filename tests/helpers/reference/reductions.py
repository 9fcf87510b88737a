"""The oracle of ranges and sums: section 8 of ``docs/format.md`` in NumPy."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daf.core.code_format import BLOCK_ELEMENTS, block_count
from reference.elements import Elements, Floats, widen

Doubles = NDArray[np.float64]

LANES = 16
LEAST_SPAN_BLOCKS = 16
_TOP_BIT = np.uint32(0x80000000)
_ALL_BITS = np.uint32(0xFFFFFFFF)


class Ranges(NamedTuple):
    """Least and greatest element of each channel, (channels,) float32."""

    least: Floats
    greatest: Floats


class Sums(NamedTuple):
    """Sum and sum of squares of each channel, (channels,) float64."""

    sums: Doubles
    squares: Doubles


def channel_of(count: int, channels: int, inner: int) -> NDArray[np.int64]:
    """Return (count,): the channel of each element."""
    return (np.arange(count, dtype=np.int64) // inner) % channels


def measure_ranges(source: Elements, channels: int = 1, inner: int = 1) -> Ranges:
    """Return the least and the greatest key of each channel, as floats again."""
    key = _key(widen(source))
    channel = channel_of(len(source), channels, inner)
    least = np.full(channels, _ALL_BITS, np.uint32)
    greatest = np.zeros(channels, np.uint32)
    np.minimum.at(least, channel, key)
    np.maximum.at(greatest, channel, key)
    infinity = np.float32(np.inf)
    ends = _key(np.array([-infinity, infinity]))
    broken = (least < ends[0]) | (greatest > ends[1])
    empty = least > greatest
    choices = [empty, broken]
    return Ranges(
        np.select(choices, [infinity, np.float32(np.nan)], _value(least)),
        np.select(choices, [-infinity, np.float32(np.nan)], _value(greatest)),
    )


def _key(values: Floats) -> NDArray[np.uint32]:
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return bits ^ np.where(bits & _TOP_BIT, _ALL_BITS, _TOP_BIT)


def _value(keys: NDArray[np.uint32]) -> Floats:
    return (keys ^ np.where(keys & _TOP_BIT, _TOP_BIT, _ALL_BITS)).view(np.float32)


@np.errstate(all="ignore")
def measure_sums(source: Elements, channels: int = 1, inner: int = 1) -> Sums:
    """Return sums and sums of squares: lanes, then spans, each by halving strides."""
    values = widen(source).astype(np.float64)
    return Sums(_sums(values, channels, inner), _sums(values * values, channels, inner))


@np.errstate(all="ignore")
def measure_products(first: Floats, second: Floats, channels: int = 1, inner: int = 1) -> Sums:
    """Return sums of ``first`` and, as squares, of ``first * second``, exact in float64."""
    one, other = first.astype(np.float64), second.astype(np.float64)
    return Sums(_sums(one, channels, inner), _sums(one * other, channels, inner))


def span_blocks(channels: int) -> int:
    """Return the blocks in a span: the least power of two not below 16 or the channels."""
    blocks = LEAST_SPAN_BLOCKS
    while blocks < channels:
        blocks *= 2
    return blocks


def _sums(values: Doubles, channels: int, inner: int) -> Doubles:
    span = span_blocks(channels)
    place = np.arange(len(values), dtype=np.int64)
    spans = -(-block_count(len(values)) // span)
    lanes = np.zeros((max(spans, 1), channels, LANES))
    cell = (
        place // (span * BLOCK_ELEMENTS),
        channel_of(len(values), channels, inner),
        place % LANES,
    )
    np.add.at(lanes, cell, values)  # one after the other, in the order of the elements
    rows = halve(np.moveaxis(lanes, 2, 0))
    total = halve(rows)
    return np.where(np.isnan(total), np.nan, total)


def halve(rows: NDArray[Any]) -> NDArray[Any]:
    """Sum (n, …) to (…): pad with rows of +0 to a power of two, then halve strides."""
    width = 1
    while width < len(rows):
        width *= 2
    padded = np.concatenate([rows, np.zeros((width - len(rows), *rows.shape[1:]), rows.dtype)])
    while width > 1:
        width //= 2
        padded = padded[:width] + padded[width:]
    result: NDArray[Any] = padded[0]
    return result
