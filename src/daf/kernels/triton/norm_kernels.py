"""Normalisations on a GPU: sections 10 and 11 of ``docs/format.md``, in their order of additions.

Normalised values lie in float32 from element ``first_value`` on, or are ``affine`` of the input.
"""

import triton
import triton.language as tl
from triton.language import constexpr

from daf.kernels.triton import blocks as device
from daf.kernels.triton.reduction_kernels import as_double, canonical, sum_lanes


@triton.jit
def emit(
    source,
    destination,
    addend,
    mask,
    affine,
    result,
    most,
    count,
    TYPE: constexpr,
    BLOCKS: constexpr,
):
    """Normalise; gamma and beta, addend, ReLU up to ``most`` (NaN: none), its mask."""
    blocks, place, valid, there = device.tile(count, BLOCKS)
    values = device.load_elements(source, place, valid, TYPE)
    channel = device.channels_of(blocks, affine.channels, affine.inner)
    values = device.channel_affine(values, channel, affine)
    if result is not None:
        channel = device.channels_of(blocks, result.channels, result.inner)
        values = device.channel_affine(values, channel, result)
    if addend is not None:
        values += device.load_elements(addend, place, valid, TYPE)
    if mask.region is not None:
        low, high = values <= 0.0, values >= most
        device.store_plane(mask, 0, blocks, there, ((low | high) == 0) & valid, BLOCKS)
        values = tl.where(low, 0.0, tl.where(high, most, values))
    device.store_elements(destination, place, valid, values, TYPE)


@triton.jit(do_not_specialize=["first_block"])
def derive(
    source,
    destination,
    mask,
    affine,
    result,
    count,
    first_block,
    TYPE: constexpr,
    ACCUMULATE: constexpr,
    BLOCKS: constexpr,
):
    """Write ``emit``'s result again, in blocks from ``first_block``: affines, accumulate, mask."""
    blocks = first_block.to(tl.int64) + device.tile_blocks(BLOCKS)
    values = device.load_values(source, blocks, device.which_exist(blocks, count)[0], affine, TYPE)
    device.write_values(
        destination, values, blocks, first_block, result, mask, count, TYPE, ACCUMULATE, BLOCKS
    )


@triton.jit(do_not_specialize=["first_block", "first_value"])
def write_gradient(
    gradient,
    values,
    destination,
    mask,
    affine,
    gamma,
    of_gradient,
    of_value,
    count,
    first_block,
    first_value,
    gamma_channels,
    TYPE: constexpr,
    VALUE_TYPE: constexpr,
    BLOCKS: constexpr,
):
    """Do ``norms.write_gradient`` in blocks from ``first_block``, perhaps in place."""
    blocks = first_block.to(tl.int64) + device.tile_blocks(BLOCKS)
    place = device.tile_elements(blocks)
    valid, there = device.which_exist(blocks, count)
    found = device.load_elements(gradient, place, valid, TYPE)
    found = device.masked(found, mask, blocks, there, BLOCKS)
    if gamma is not None:
        found = found * tl.load(gamma + device.channels_of(blocks, gamma_channels, 1))
    value = device.load_elements(values, place - first_value, valid, VALUE_TYPE)
    if affine is not None:
        own = device.channels_of(blocks, affine.channels, affine.inner)
        value = device.channel_affine(value, own, affine)
    channel = device.channels_of(blocks, of_value.channels, of_value.inner)
    product = found * tl.load(of_gradient + channel)
    beside = device.channel_affine(value, channel, of_value)
    device.store_elements(destination, place, valid, product + beside, TYPE)


@triton.jit(do_not_specialize=["count", "epsilon", "momentum", "bessel"])
def channel_statistics(
    sums,
    squares,
    mean,
    inverse_deviation,
    running_mean,
    running_variance,
    count,
    epsilon,
    momentum,
    bessel,
    kept,
    channels,
    COLUMNS: constexpr,
):
    """Write (channels,) float32 each, from float64 sums of ``count``; running ones keep ``kept``.

    ``epsilon``, ``momentum`` and ``bessel`` (count over count - 1) are the bits of float64s.
    """
    channel = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    there = channel < channels
    elements = count.to(tl.float64)
    average = tl.load(sums + channel, mask=there, other=0.0) / elements
    variance = tl.load(squares + channel, mask=there, other=0.0) / elements - average * average
    variance = tl.where(variance < 0, 0.0, variance)  # NaN stays
    inverse = 1.0 / tl.sqrt(variance + as_double(epsilon))
    tl.store(mean + channel, canonical(average.to(tl.float32)), mask=there)
    tl.store(inverse_deviation + channel, canonical(inverse.to(tl.float32)), mask=there)
    if running_mean is not None:
        rate = as_double(momentum)
        moved = (rate * average).to(tl.float32)
        before = tl.load(running_mean + channel, mask=there, other=0.0)
        tl.store(running_mean + channel, canonical(before * kept + moved), mask=there)
        moved = (rate * (variance * as_double(bessel))).to(tl.float32)
        before = tl.load(running_variance + channel, mask=there, other=0.0)
        tl.store(running_variance + channel, canonical(before * kept + moved), mask=there)


@triton.jit(do_not_specialize=["count"])
def channel_factors(
    sums,
    products,
    inverse_deviation,
    gamma,
    of_value,
    offset,
    of_gradient,
    weight,
    bias,
    count,
    channels,
    COLUMNS: constexpr,
):
    """Write backward's second factors and gradients of gamma and beta, (channels,) float32 each."""
    channel = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    there = channel < channels
    elements = count.to(tl.float64)
    factor = tl.load(inverse_deviation + channel, mask=there, other=0.0).to(tl.float64)
    if gamma is not None:
        factor *= tl.load(gamma + channel, mask=there, other=0.0).to(tl.float64)
    product = tl.load(products + channel, mask=there, other=0.0)
    total = tl.load(sums + channel, mask=there, other=0.0)
    tl.store(
        of_value + channel, canonical((-factor * product / elements).to(tl.float32)), mask=there
    )
    tl.store(offset + channel, canonical((-factor * total / elements).to(tl.float32)), mask=there)
    tl.store(of_gradient + channel, canonical(factor.to(tl.float32)), mask=there)
    if weight is not None:
        tl.store(weight + channel, canonical(product.to(tl.float32)), mask=there)
    if bias is not None:
        tl.store(bias + channel, canonical(total.to(tl.float32)), mask=there)


@triton.jit(do_not_specialize=["epsilon"])
def row_affines(
    source,
    scale,
    shift,
    rows,
    length,
    epsilon,
    TYPE: constexpr,
    CENTRED: constexpr,
    ROWS: constexpr,
):
    """Write the rows' affines, (rows,) float32, by sixteen lanes; ``epsilon``: a float64's bits."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, 16)[None, :]
    total = tl.zeros((ROWS, 16), tl.float64)
    energy = tl.zeros((ROWS, 16), tl.float64)
    for start in range(0, length, 16):
        column = start + lane
        valid = (row < rows)[:, None] & (column < length)
        place = row[:, None] * length + column
        value = device.load_elements(source, place, valid, TYPE).to(tl.float64)
        total += value
        energy += value * value
    count = tl.zeros((ROWS,), tl.float64) + length
    square = sum_lanes(energy, ROWS) / count
    if CENTRED:
        mean = sum_lanes(total, ROWS) / count
        variance = square - mean * mean
        square = tl.where(variance < 0, 0.0, variance)  # NaN stays
    inverse = 1.0 / tl.sqrt(square + as_double(epsilon))
    tl.store(scale + row, canonical(inverse.to(tl.float32)), mask=row < rows)
    offset = tl.zeros((ROWS,), tl.float32)
    if CENTRED:
        offset = canonical((-(mean * inverse)).to(tl.float32))
    tl.store(shift + row, offset, mask=row < rows)


@triton.jit(do_not_specialize=["first_row", "first_value"])
def row_factors(
    gradient,
    values,
    of_value,
    own_scale,
    affine,
    gamma,
    rows,
    first_row,
    first_value,
    length,
    TYPE: constexpr,
    VALUE_TYPE: constexpr,
    CENTRED: constexpr,
    ROWS: constexpr,
):
    """Write backward's factors, (rows,) float32, from sums of g and of g * values of rows."""
    row = first_row.to(tl.int64) + tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, 16)[None, :]
    total = tl.zeros((ROWS, 16), tl.float32)
    product = tl.zeros((ROWS, 16), tl.float32)
    for start in range(0, length, 16):
        column = start + lane
        valid = (row < rows)[:, None] & (column < length)
        place = row[:, None] * length + column
        found = device.load_elements(gradient, place, valid, TYPE)
        if gamma is not None:
            found = found * tl.load(gamma + column, mask=column < length, other=0.0)
        value = device.load_elements(values, place - first_value, valid, VALUE_TYPE)
        if affine is not None:
            value = value * tl.load(affine.scale + row, mask=row < rows, other=0.0)[:, None]
            value += tl.load(affine.shift + row, mask=row < rows, other=0.0)[:, None]
        total += found
        product += tl.where(valid, found * value, 0.0)
    count = tl.zeros((ROWS,), tl.float64) + length
    wide = tl.load(own_scale + row, mask=row < rows, other=0.0).to(tl.float64)
    factor = -(wide * (sum_lanes(product, ROWS).to(tl.float64) / count))
    tl.store(of_value.scale + row, factor.to(tl.float32), mask=row < rows)
    behind = tl.zeros((ROWS,), tl.float32)
    if CENTRED:
        behind = (-(wide * (sum_lanes(total, ROWS).to(tl.float64) / count))).to(tl.float32)
    tl.store(of_value.shift + row, behind, mask=row < rows)


@triton.jit(do_not_specialize=["first_span", "first_value"])
def column_span_sums(
    gradient,
    values,
    sums,
    products,
    affine,
    rows,
    first_span,
    first_value,
    length,
    TYPE: constexpr,
    VALUE_TYPE: constexpr,
    SPAN_ROWS: constexpr,
    COLUMNS: constexpr,
):
    """Sum gradient, and its product with values, over SPAN_ROWS rows in order: (spans, length)."""
    span = first_span.to(tl.int64) + tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    product = tl.zeros((COLUMNS,), tl.float32)
    for turn in range(SPAN_ROWS):
        row = span * SPAN_ROWS + turn
        valid = (column < length) & (row < rows)
        place = row * length + column
        found = device.load_elements(gradient, place, valid, TYPE)
        value = device.load_elements(values, place - first_value, valid, VALUE_TYPE)
        if affine is not None:
            value = value * tl.load(affine.scale + row, mask=row < rows, other=0.0)
            value += tl.load(affine.shift + row, mask=row < rows, other=0.0)
        total += found
        product += tl.where(valid, found * value, 0.0)
    own = span * length + column
    tl.store(sums + own, total, mask=column < length)
    tl.store(products + own, product, mask=column < length)


@triton.jit
def add_spans(span_sums, out, spans, length, COLUMNS: constexpr):
    """Sum (spans, length) float32 to (length,) float64, one span after the other."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float64)
    for first in range(0, spans, 8):
        for behind in tl.static_range(8):  # loads that wait for no sum
            span = first + behind
            mask = (column < length) & (span < spans)
            found = tl.load(span_sums + span * length + column, mask=mask, other=0.0)
            total = tl.where(span < spans, total + found.to(tl.float64), total)
    tl.store(out + column, total, mask=column < length)
