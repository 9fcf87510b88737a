"""Normalisations of channels on a GPU: section 10 of ``docs/format.md``, in its order of additions.

Normalised values lie in float32 from element ``first_value`` on, or are ``affine`` of the input.
"""

from __future__ import annotations

import triton
import triton.language as tl

from daf.kernels.triton.blocks import (
    channel_affine,
    channels_of,
    load_elements,
    load_values,
    masked,
    store_elements,
    store_plane,
    tile,
    tile_blocks,
    tile_elements,
    which_exist,
    write_values,
)
from daf.kernels.triton.reduction_kernels import as_double, canonical


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
    TYPE: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Normalise; gamma and beta, addend, ReLU up to ``most`` (NaN: none), its mask."""
    blocks, place, valid, there = tile(count, BLOCKS)
    values = load_elements(source, place, valid, TYPE)
    channel = channels_of(blocks, affine.channels, affine.inner)
    values = channel_affine(values, channel, affine)
    if result is not None:
        channel = channels_of(blocks, result.channels, result.inner)
        values = channel_affine(values, channel, result)
    if addend is not None:
        values += load_elements(addend, place, valid, TYPE)
    if mask.region is not None:
        low, high = values <= 0.0, values >= most
        store_plane(mask, 0, blocks, there, ((low | high) == 0) & valid, BLOCKS)
        values = tl.where(low, 0.0, tl.where(high, most, values))
    store_elements(destination, place, valid, values, TYPE)


@triton.jit(do_not_specialize=["first_block"])
def derive(
    source,
    destination,
    mask,
    affine,
    result,
    count,
    first_block,
    TYPE: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Write ``emit``'s result again, in blocks from ``first_block``: affines, accumulate, mask."""
    blocks = first_block.to(tl.int64) + tile_blocks(BLOCKS)
    values = load_values(source, blocks, which_exist(blocks, count)[0], affine, TYPE)
    write_values(
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
    TYPE: tl.constexpr,
    VALUE_TYPE: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Do ``channel_norm.write_gradient`` in blocks from ``first_block``, perhaps in place."""
    blocks = first_block.to(tl.int64) + tile_blocks(BLOCKS)
    place = tile_elements(blocks)
    valid, there = which_exist(blocks, count)
    found = load_elements(gradient, place, valid, TYPE)
    found = masked(found, mask, blocks, there, BLOCKS)
    if gamma is not None:
        found = found * tl.load(gamma + channels_of(blocks, gamma_channels, 1))
    value = load_elements(values, place - first_value, valid, VALUE_TYPE)
    if affine is not None:
        value = channel_affine(value, channels_of(blocks, affine.channels, affine.inner), affine)
    channel = channels_of(blocks, of_value.channels, of_value.inner)
    product = found * tl.load(of_gradient + channel)
    beside = channel_affine(value, channel, of_value)
    store_elements(destination, place, valid, product + beside, TYPE)


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
    COLUMNS: tl.constexpr,
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
    COLUMNS: tl.constexpr,
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
