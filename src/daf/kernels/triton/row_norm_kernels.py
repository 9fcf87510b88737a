"""Normalisations of rows on a GPU: section 11 of ``docs/format.md``, in its order of additions."""

from __future__ import annotations

import triton
import triton.language as tl

from daf.kernels.triton.blocks import load_elements
from daf.kernels.triton.reduction_kernels import as_double, canonical, sum_lanes


@triton.jit(do_not_specialize=["epsilon"])
def row_affines(
    source,
    scale,
    shift,
    rows,
    length,
    epsilon,
    TYPE: tl.constexpr,
    CENTRED: tl.constexpr,
    ROWS: tl.constexpr,
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
        value = load_elements(source, place, valid, TYPE).to(tl.float64)
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
    TYPE: tl.constexpr,
    VALUE_TYPE: tl.constexpr,
    CENTRED: tl.constexpr,
    ROWS: tl.constexpr,
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
        found = load_elements(gradient, place, valid, TYPE)
        if gamma is not None:
            found = found * tl.load(gamma + column, mask=column < length, other=0.0)
        value = load_elements(values, place - first_value, valid, VALUE_TYPE)
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
    TYPE: tl.constexpr,
    VALUE_TYPE: tl.constexpr,
    SPAN_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
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
        found = load_elements(gradient, place, valid, TYPE)
        value = load_elements(values, place - first_value, valid, VALUE_TYPE)
        if affine is not None:
            value = value * tl.load(affine.scale + row, mask=row < rows, other=0.0)
            value += tl.load(affine.shift + row, mask=row < rows, other=0.0)
        total += found
        product += tl.where(valid, found * value, 0.0)
    own = span * length + column
    tl.store(sums + own, total, mask=column < length)
    tl.store(products + own, product, mask=column < length)


@triton.jit
def add_spans(span_sums, out, spans, length, COLUMNS: tl.constexpr):
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
