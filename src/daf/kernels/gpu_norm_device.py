"""Normalisations on a GPU: sections 10 and 11 of ``docs/format.md``, in their order of additions.

Normalised values lie in float32 from element ``first_value`` on (decoded, a part at a time), or
are computed from the input by the affine that made them (AFFINE). Masks are read bit by bit
where elements are not met in blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from daf.kernels.gpu_blocks import (
    channel_affine,
    load_elements,
    masked,
    store_elements,
    store_plane,
    tile_blocks,
    tile_elements,
    word_place,
)
from daf.kernels.gpu_reduce_device import first_of_channels, sum_lanes


@triton.jit
def emit(
    source,
    destination,
    addend,
    region,
    table,
    scale,
    shift,
    gamma,
    beta,
    most,
    count,
    channels,
    inner,
    result_channels,
    result_inner,
    runs,
    page_words,
    TYPE: tl.constexpr,
    RESULT: tl.constexpr,
    ADDED: tl.constexpr,
    RECTIFIED: tl.constexpr,
    PAGED: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Normalise; then gamma and beta, the addend, ReLU up to ``most`` (NaN: no bound), its mask.

    ``destination`` may be ``source``.
    """
    blocks = tile_blocks(BLOCKS)
    place = tile_elements(blocks)
    valid = place < count
    values = load_elements(source, place, valid, TYPE)
    values = channel_affine(values, place, scale, shift, channels, inner)
    if RESULT:
        values = channel_affine(values, place, gamma, beta, result_channels, result_inner)
    if ADDED:
        values += load_elements(addend, place, valid, TYPE)
    if RECTIFIED:
        low, high = values <= 0.0, values >= most
        bits = (((low | high) == 0) & valid).to(tl.int32)
        there = blocks * 256 < count
        store_plane(region, table, runs, page_words, 0, blocks, there, bits, BLOCKS, PAGED)
        values = tl.where(low, 0.0, tl.where(high, most, values))
    store_elements(destination, place, valid, values, TYPE)


@triton.jit(do_not_specialize=["first_block"])
def derive(
    source,
    destination,
    region,
    table,
    scale,
    shift,
    gamma,
    beta,
    count,
    first_block,
    channels,
    inner,
    result_channels,
    result_inner,
    runs,
    page_words,
    TYPE: tl.constexpr,
    RESULT: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """``emit``'s result again, in blocks from ``first_block``: affines, accumulate, mask."""
    blocks = first_block.to(tl.int64) + tile_blocks(BLOCKS)
    place = tile_elements(blocks)
    written = place - first_block.to(tl.int64) * 256
    valid = place < count
    there = blocks * 256 < count
    values = load_elements(source, place, valid, TYPE)
    values = channel_affine(values, place, scale, shift, channels, inner)
    if RESULT:
        values = channel_affine(values, place, gamma, beta, result_channels, result_inner)
    if ACCUMULATE:
        values = load_elements(destination, written, valid, TYPE) + values
    if MASKED:
        values = masked(values, region, table, runs, page_words, blocks, there, BLOCKS, MASKED)
    store_elements(destination, written, valid, values, TYPE)


@triton.jit
def _values_at(
    values,
    place,
    valid,
    first_value,
    scale,
    shift,
    channels,
    inner,
    TYPE: tl.constexpr,
    AFFINE: tl.constexpr,
):
    found = load_elements(values, place - first_value, valid, TYPE)
    if AFFINE:
        found = channel_affine(found, place, scale, shift, channels, inner)
    return found


@triton.jit
def _bit_at(region, table, runs, page_words, place, valid, PAGED: tl.constexpr):
    """The mask's bit of single elements."""
    word = tl.where(valid, place // 32, 0)
    there = word_place(word, 0, table, runs, page_words, PAGED)
    return (tl.load(region + there, mask=valid, other=0) >> (place % 32).to(tl.int32)) & 1


@triton.jit(do_not_specialize=["first_span", "first_value"])
def channel_span_products(
    gradient,
    values,
    sums,
    products,
    mask_region,
    mask_table,
    scale,
    shift,
    count,
    first_span,
    first_value,
    channels,
    inner,
    period,
    span,
    periods,
    groups,
    tiles,
    tile_elements,
    mask_runs,
    mask_page_words,
    TYPE: tl.constexpr,
    VALUE_TYPE: tl.constexpr,
    AFFINE: tl.constexpr,
    MASKED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """``gpu_reduce_device.channel_span_sums`` of the masked gradient and its product with values.

    Spans from ``first_span`` on; ``sums`` and ``products`` are of all spans.
    """
    row = first_span.to(tl.int64) + tl.program_id(0).to(tl.int64) // tiles
    column = tl.program_id(0).to(tl.int64) % tiles
    channel = column * COLUMNS + tl.arange(0, COLUMNS).to(tl.int64)
    first = row * span
    last = tl.minimum(first + span, count)
    lane = tl.arange(0, 16)[None, :]
    total = tl.zeros((COLUMNS, 16), tl.float64)
    product = tl.zeros((COLUMNS, 16), tl.float64)
    for turn in range(periods):
        start = (first // period + turn) * period
        tile = start + column * tile_elements
        if (tile < last) & (tile + tile_elements > first):
            low = tl.maximum(start + channel * inner, first)[:, None]
            high = tl.minimum(start + (channel + 1) * inner, last)[:, None]
            for group in range(groups):
                place = (low // 16 + group) * 16 + lane
                valid = (place >= low) & (place < high) & (channel < channels)[:, None]
                found = load_elements(gradient, place, valid, TYPE)
                if MASKED:
                    bit = _bit_at(
                        mask_region,
                        mask_table,
                        mask_runs,
                        mask_page_words,
                        place,
                        valid,
                        PAGED=MASKED == 2,
                    )
                    found = tl.where(bit != 0, found, 0.0)
                value = _values_at(
                    values,
                    place,
                    valid,
                    first_value,
                    scale,
                    shift,
                    channels,
                    inner,
                    VALUE_TYPE,
                    AFFINE,
                )
                wide = found.to(tl.float64)
                total += wide
                product += tl.where(valid, wide * value.to(tl.float64), 0.0)
    own = row * channels + channel
    tl.store(sums + own, sum_lanes(total, COLUMNS), mask=channel < channels)
    tl.store(products + own, sum_lanes(product, COLUMNS), mask=channel < channels)


@triton.jit(do_not_specialize=["first_span", "first_value"])
def side_by_side_products(
    gradient,
    values,
    sums,
    products,
    mask_region,
    mask_table,
    scale,
    shift,
    count,
    first_span,
    first_value,
    channels,
    span_elements,
    spans,
    periods,
    mask_runs,
    mask_page_words,
    TYPE: tl.constexpr,
    VALUE_TYPE: tl.constexpr,
    AFFINE: tl.constexpr,
    MASKED: tl.constexpr,
    SPANS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """``channel_span_products`` as ``gpu_reduce_device.side_by_side_sums`` has it, of ``spans``."""
    turn = tl.program_id(0).to(tl.int64) * SPANS + tl.arange(0, SPANS)
    span = first_span.to(tl.int64) + turn
    channel = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS).to(tl.int64)
    start, end = first_of_channels(span, channel, span_elements, count, channels)
    there = (turn < spans)[:, None] & (channel < channels)[None, :]
    total = tl.zeros((SPANS, COLUMNS), tl.float64)
    product = tl.zeros((SPANS, COLUMNS), tl.float64)
    for period in range(periods):
        place = start + period * channels
        valid = (place < end) & there
        found = load_elements(gradient, place, valid, TYPE)
        if MASKED:
            bit = _bit_at(
                mask_region,
                mask_table,
                mask_runs,
                mask_page_words,
                place,
                valid,
                PAGED=MASKED == 2,
            )
            found = tl.where(bit != 0, found, 0.0)
        value = _values_at(
            values, place, valid, first_value, scale, shift, channels, 1, VALUE_TYPE, AFFINE
        )
        wide = found.to(tl.float64)
        total += wide
        product += tl.where(valid, wide * value.to(tl.float64), 0.0)
    own = span[:, None] * channels + channel[None, :]
    tl.store(sums + own, total, mask=there)
    tl.store(products + own, product, mask=there)


@triton.jit(do_not_specialize=["first_block", "first_value"])
def write_gradient(
    gradient,
    values,
    destination,
    mask_region,
    mask_table,
    scale,
    shift,
    gamma,
    of_gradient,
    of_value,
    offset,
    count,
    first_block,
    first_value,
    channels,
    inner,
    gamma_channels,
    mask_runs,
    mask_page_words,
    TYPE: tl.constexpr,
    VALUE_TYPE: tl.constexpr,
    AFFINE: tl.constexpr,
    GAMMA: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """``g * of_gradient[c] + (v * of_value[c] + offset[c])`` of blocks from ``first_block`` on.

    g: the masked gradient, times ``gamma`` of its place in the row (GAMMA). ``destination`` may
    be ``gradient``.
    """
    blocks = first_block.to(tl.int64) + tile_blocks(BLOCKS)
    place = tile_elements(blocks)
    valid = place < count
    there = blocks * 256 < count
    found = load_elements(gradient, place, valid, TYPE)
    if MASKED:
        found = masked(
            found,
            mask_region,
            mask_table,
            mask_runs,
            mask_page_words,
            blocks,
            there,
            BLOCKS,
            MASKED,
        )
    if GAMMA:
        found = found * tl.load(gamma + place % gamma_channels)
    value = _values_at(
        values, place, valid, first_value, scale, shift, channels, inner, VALUE_TYPE, AFFINE
    )
    channel = (place // inner) % channels
    product = found * tl.load(of_gradient + channel)
    beside = channel_affine(value, place, of_value, offset, channels, inner)
    store_elements(destination, place, valid, product + beside, TYPE)


# --- rows -----------------------------------------------------------------------------------


@triton.jit
def row_sums(source, sums, squares, rows, length, TYPE: tl.constexpr, ROWS: tl.constexpr):
    """(rows,) float64 each: sums and sums of squares of rows of ``length``, by sixteen lanes."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, 16)[None, :]
    total = tl.zeros((ROWS, 16), tl.float64)
    energy = tl.zeros((ROWS, 16), tl.float64)
    for start in range(0, length, 16):
        column = start + lane
        valid = (row < rows)[:, None] & (column < length)
        place = row[:, None] * length + column
        value = load_elements(source, place, valid, TYPE).to(tl.float64)
        total += value
        energy += value * value
    tl.store(sums + row, sum_lanes(total, ROWS), mask=row < rows)
    tl.store(squares + row, sum_lanes(energy, ROWS), mask=row < rows)


@triton.jit(do_not_specialize=["first_row", "first_value"])
def row_products(
    gradient,
    values,
    sums,
    products,
    scale,
    shift,
    gamma,
    rows,
    first_row,
    first_value,
    length,
    TYPE: tl.constexpr,
    VALUE_TYPE: tl.constexpr,
    AFFINE: tl.constexpr,
    GAMMA: tl.constexpr,
    ROWS: tl.constexpr,
):
    """(rows,) float32 each: of rows from ``first_row`` on, sums of g and of g times the values."""
    row = first_row.to(tl.int64) + tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, 16)[None, :]
    total = tl.zeros((ROWS, 16), tl.float32)
    product = tl.zeros((ROWS, 16), tl.float32)
    for start in range(0, length, 16):
        column = start + lane
        valid = (row < rows)[:, None] & (column < length)
        place = row[:, None] * length + column
        found = load_elements(gradient, place, valid, TYPE)
        if GAMMA:
            found = found * tl.load(gamma + column, mask=column < length, other=0.0)
        value = load_elements(values, place - first_value, valid, VALUE_TYPE)
        if AFFINE:
            value = value * tl.load(scale + row, mask=row < rows, other=0.0)[:, None]
            value += tl.load(shift + row, mask=row < rows, other=0.0)[:, None]
        total += found
        product += tl.where(valid, found * value, 0.0)
    tl.store(sums + row, sum_lanes(total, ROWS), mask=row < rows)
    tl.store(products + row, sum_lanes(product, ROWS), mask=row < rows)


@triton.jit(do_not_specialize=["first_span", "first_value"])
def column_span_sums(
    gradient,
    values,
    sums,
    products,
    scale,
    shift,
    rows,
    first_span,
    first_value,
    length,
    TYPE: tl.constexpr,
    VALUE_TYPE: tl.constexpr,
    AFFINE: tl.constexpr,
    SPAN_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """(spans, length) float32 each: sums over SPAN_ROWS rows, one after the other, of the gradient
    and of its product with the values.
    """
    span = first_span.to(tl.int64) + tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    product = tl.zeros((COLUMNS,), tl.float32)
    for turn in range(SPAN_ROWS):
        row = span * SPAN_ROWS + turn
        valid = (column < length) & (row < rows)
        place = row * length + column
        found = load_elements(gradient, place, valid, TYPE)
        value = load_elements(values, place - first_value, valid, VALUE_TYPE)
        if AFFINE:
            value = value * tl.load(scale + row, mask=row < rows, other=0.0)
            value += tl.load(shift + row, mask=row < rows, other=0.0)
        total += found
        product += tl.where(valid, found * value, 0.0)
    own = span * length + column
    tl.store(sums + own, total, mask=column < length)
    tl.store(products + own, product, mask=column < length)


@triton.jit
def add_spans(span_sums, out, spans, length, COLUMNS: tl.constexpr):
    """(spans, length) float32 to (length,) float64, one span after the other."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float64)
    for first in range(0, spans, 8):
        for behind in tl.static_range(8):  # loads that wait for no sum
            span = first + behind
            mask = (column < length) & (span < spans)
            found = tl.load(span_sums + span * length + column, mask=mask, other=0.0)
            total = tl.where(span < spans, total + found.to(tl.float64), total)
    tl.store(out + column, total, mask=column < length)
