"""Ranges and sums on a GPU: keys that compare like the floats, and additions in a fixed order.

Section 8 of ``docs/format.md``; keys here have the top bit inverted, to compare as signed integers.
A tile is ROWS elements of each of COLUMNS channels. Element j of channel c is number
``(j // inner) * channels * inner + c * inner + j % inner``.
"""

import triton
import triton.language as tl
from triton.language import constexpr

from daf.kernels.triton.blocks import NAN_BITS, halve, load_elements, masked_at, values_at

TREE = tl.constexpr(0)
ATOMICS = tl.constexpr(1)
ALONE = tl.constexpr(3)
GREATEST_KEY = tl.constexpr(0x7FFFFFFF)
LEAST_KEY = tl.constexpr(-0x80000000)
_INFINITE_KEY = tl.constexpr(0x7F800000)
_NEGATIVE_INFINITE_KEY = tl.constexpr(-0x7F800001)


@triton.jit
def _turn(bits):
    """Convert float32 patterns to keys, and keys to patterns."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def reduce_ranges(
    source,
    least,
    greatest,
    count,
    rows,
    channels,
    inner,
    TYPE: constexpr,
    STRATEGY: constexpr,
    STEPS: constexpr,
    ROWS: constexpr,
    COLUMNS: constexpr,
):
    """Reduce STEPS tiles to their least and greatest key.

    By TREE, program r writes row r of (programs, channels) partial keys. By ATOMICS every element,
    by the hybrid one value per program and channel, is atomically compared with (channels,) cells.
    Greatest keys are written as complements, least ones again: one fill prepares all cells. A
    program that is ALONE with its channels writes their ends.
    """
    channel = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :].to(tl.int64)
    low = tl.full((ROWS, COLUMNS), GREATEST_KEY, tl.int32)
    high = tl.full((ROWS, COLUMNS), LEAST_KEY, tl.int32)
    first = tl.program_id(0).to(tl.int64) * (STEPS * ROWS)
    for step in range(STEPS):
        row = first + step * ROWS + tl.arange(0, ROWS)[:, None]
        place = (row // inner) * channels * inner + channel * inner + row % inner
        valid = (row < rows) & (channel < channels) & (place < count)
        key = _turn(load_elements(source, place, valid, TYPE).to(tl.int32, bitcast=True))
        if STRATEGY == ATOMICS:
            cell = tl.broadcast_to(channel, (ROWS, COLUMNS))
            tl.atomic_min(least + cell, key, mask=valid)
            tl.atomic_min(greatest + cell, ~key, mask=valid)
        else:
            low = tl.minimum(low, tl.where(valid, key, GREATEST_KEY))
            high = tl.maximum(high, tl.where(valid, key, LEAST_KEY))
    if STRATEGY != ATOMICS:
        own = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        ours_low, ours_high = tl.min(low, axis=0), tl.max(high, axis=0)
        if STRATEGY == ALONE:
            _write_ends(least, greatest, own, ours_low, ours_high, channels)
        elif STRATEGY == TREE:
            place = tl.program_id(0) * channels + own
            tl.store(least + place, ours_low, mask=own < channels)
            tl.store(greatest + place, ~ours_high, mask=own < channels)
        else:
            tl.atomic_min(least + own, ours_low, mask=own < channels)
            tl.atomic_min(greatest + own, ~ours_high, mask=own < channels)


@triton.jit
def _write_ends(low_out, high_out, channel, low, high, channels):
    """Write the patterns of the channels' ends: NaN for both if one was met."""
    empty = low > high
    broken = ((low < _NEGATIVE_INFINITE_KEY) | (high > _INFINITE_KEY)) & (empty == 0)
    low_bits = tl.where(empty, 0x7F800000, tl.where(broken, NAN_BITS, _turn(low)))
    high_bits = tl.where(empty, -0x800000, tl.where(broken, NAN_BITS, _turn(high)))
    tl.store(low_out + channel, low_bits, mask=channel < channels)
    tl.store(high_out + channel, high_bits, mask=channel < channels)


@triton.jit
def finish_ranges(
    least, greatest, low_out, high_out, partials, channels, ROWS: constexpr, COLUMNS: constexpr
):
    """Fold (partials, channels) least keys and complements of greatest ones, and write patterns."""
    channel = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    valid = (row[:, None] < partials) & (channel[None, :] < channels)
    place = row[:, None] * channels + channel[None, :]
    low = tl.min(tl.load(least + place, mask=valid, other=GREATEST_KEY), axis=0)
    high = ~tl.min(tl.load(greatest + place, mask=valid, other=GREATEST_KEY), axis=0)
    _write_ends(low_out, high_out, channel, low, high, channels)


@triton.jit
def _products(
    source, values, mask, affine, place, valid, first, TYPE: constexpr, VALUE_TYPE: constexpr
):
    """Return masked elements in float64, and their products with values, or their squares."""
    found = load_elements(source, place, valid, TYPE)
    found = masked_at(found, mask, place, valid)
    if values is None:
        other = found
    else:
        other = values_at(values, place, valid, first, affine, VALUE_TYPE)
    wide = found.to(tl.float64)
    return wide, tl.where(valid, wide * other.to(tl.float64), 0.0)


@triton.jit(do_not_specialize=["first_span", "first_value"])
def channel_span_sums(
    source,
    values,
    sums,
    products,
    mask,
    affine,
    runs,
    count,
    first_span,
    first_value,
    TYPE: constexpr,
    VALUE_TYPE: constexpr,
    COLUMNS: constexpr,
):
    """Sum COLUMNS channels in one span, and their products, into rows of (spans, channels).

    A channel's elements come in runs of ``inner``, one in every ``period`` of ``channels * inner``;
    at most ``periods`` of these touch a span. A run is read in ``groups`` of sixteen elements at
    places that sixteen divides, so that lanes are lanes. Programs are (spans, ``tiles``) in order;
    a tile is COLUMNS channels, ``tile_elements`` of a period. The mask is read bit by bit.
    """
    row = first_span.to(tl.int64) + tl.program_id(0).to(tl.int64) // runs.tiles
    column = tl.program_id(0).to(tl.int64) % runs.tiles
    channel = column * COLUMNS + tl.arange(0, COLUMNS).to(tl.int64)
    first = row * runs.span
    last = tl.minimum(first + runs.span, count)
    lane = tl.arange(0, 16)[None, :]
    there = channel < runs.channels
    total = tl.zeros((COLUMNS, 16), tl.float64)
    product = tl.zeros((COLUMNS, 16), tl.float64)
    for turn in range(runs.periods):
        start = (first // runs.period + turn) * runs.period
        tile = start + column * runs.tile_elements
        if (tile < last) & (tile + runs.tile_elements > first):
            low = tl.maximum(start + channel * runs.inner, first)[:, None]
            high = tl.minimum(start + (channel + 1) * runs.inner, last)[:, None]
            for group in range(runs.groups):
                place = (low // 16 + group) * 16 + lane
                valid = (place >= low) & (place < high) & there[:, None]
                wide, with_values = _products(
                    source, values, mask, affine, place, valid, first_value, TYPE, VALUE_TYPE
                )
                total += wide
                product += with_values
    own = row * runs.channels + channel
    tl.store(sums + own, sum_lanes(total, COLUMNS), mask=there)
    tl.store(products + own, sum_lanes(product, COLUMNS), mask=there)


@triton.jit(do_not_specialize=["first_span", "first_value"])
def side_by_side_sums(
    source,
    values,
    sums,
    products,
    mask,
    affine,
    sides,
    count,
    first_span,
    first_value,
    TYPE: constexpr,
    VALUE_TYPE: constexpr,
    SPANS: constexpr,
    COLUMNS: constexpr,
):
    """Do ``channel_span_sums`` where ``inner`` is 1 and each channel has one of sixteen lanes."""
    channels = sides.channels
    turn = tl.program_id(0).to(tl.int64) * SPANS + tl.arange(0, SPANS)
    span = first_span.to(tl.int64) + turn
    channel = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS).to(tl.int64)
    first = (span * sides.span)[:, None]
    start = first + (channel[None, :] + channels - first % channels) % channels
    end = tl.minimum(first + sides.span, count)
    there = (turn < sides.spans)[:, None] & (channel < channels)[None, :]
    total = tl.zeros((SPANS, COLUMNS), tl.float64)
    product = tl.zeros((SPANS, COLUMNS), tl.float64)
    for period in range(sides.periods):
        place = start + period * channels
        valid = (place < end) & there
        wide, with_values = _products(
            source, values, mask, affine, place, valid, first_value, TYPE, VALUE_TYPE
        )
        total += wide
        product += with_values
    own = span[:, None] * channels + channel[None, :]
    tl.store(sums + own, total, mask=there)
    tl.store(products + own, product, mask=there)


@triton.jit
def fold_halves(rows, out, channels, WIDTH: constexpr, LEVELS: constexpr, COLUMNS: constexpr):
    """Fold (2, WIDTH, channels) float64 to (2, channels), adding the latter half LEVELS times."""
    channel = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    kind = tl.program_id(1).to(tl.int64)
    place = (kind * WIDTH + tl.arange(0, WIDTH)[None, :]) * channels + channel[:, None]
    totals = tl.load(rows + place, mask=(channel < channels)[:, None], other=0.0)
    for level in tl.static_range(LEVELS):
        totals = _halves(totals, COLUMNS, WIDTH >> level)
    total = canonical(tl.reshape(totals, (COLUMNS,)))
    tl.store(out + kind * channels + channel, total, mask=channel < channels)


@triton.jit
def canonical(values):
    """Replace every NaN by the canonical one."""
    return tl.where(values != values, float("nan"), values)


@triton.jit
def as_double(bits):
    """Return the float64 that has these bits."""
    return bits.to(tl.int64).to(tl.float64, bitcast=True)


@triton.jit
def _halves(values, SPANS: constexpr, WIDTH: constexpr):
    low, high = halve(values, SPANS, WIDTH)
    return low + high


@triton.jit
def sum_lanes(lanes, SPANS: constexpr):
    """Sum (SPANS, 16) to (SPANS,): strides 8, 4, 2, 1."""
    sums = _halves(_halves(_halves(lanes, SPANS, 16), SPANS, 8), SPANS, 4)
    return tl.reshape(_halves(sums, SPANS, 2), (SPANS,))
