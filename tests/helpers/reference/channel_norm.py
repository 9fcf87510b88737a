"""The oracle of a normalisation's forward and backward: section 10 of ``docs/format.md``."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from daf.core.code_format import Predicate
from reference.blocks import Affine, from_planes
from reference.codecs import encode_mask
from reference.elements import Floats, Planes, canonical
from reference.reductions import Sums, channel_of, measure_products


class Moments(NamedTuple):
    """Each channel's moments, (channels,) float32; running ones are None where nothing follows."""

    mean: Floats
    inverse_deviation: Floats
    running_mean: Floats | None = None
    running_variance: Floats | None = None


class Factors(NamedTuple):
    """Each channel's factors for ``input_gradient``, and gradients; (channels,) float32."""

    value_scale: Floats
    value_shift: Floats
    gradient_scale: Floats
    of_gamma: Floats
    of_beta: Floats


class Emitted(NamedTuple):
    """The result, (count,) float32, and the mask, (1, words), or None."""

    result: Floats
    mask: Planes | None


@np.errstate(all="ignore")
def statistics_of_sums(
    sums: Sums,
    count: int,
    epsilon: float,
    running: tuple[Floats, Floats] | None = None,
    momentum: float = 0.0,
) -> Moments:
    """Return moments of channels of ``count`` elements; ``running``: mean and variance before."""
    mean = sums.sums / count
    variance = np.maximum(sums.squares / count - mean * mean, 0)  # NaN stays
    found = Moments(canonical(mean), canonical(1 / np.sqrt(variance + epsilon)))
    if running is None:
        return found
    kept = np.float32(1 - momentum)
    unbiased = variance * (count / (count - 1))
    followed = (
        canonical(before * kept + canonical(momentum * now))
        for before, now in zip(running, (mean, unbiased), strict=True)
    )
    return Moments(*found[:2], *followed)


@np.errstate(all="ignore")
def factors_of_sums(
    sums: Sums, count: int, inverse_deviation: Floats, gamma: Floats | None
) -> Factors:
    """Return the factors of backward's second pass from the sums of its first."""
    factor = inverse_deviation.astype(np.float64)
    if gamma is not None:
        factor = factor * gamma.astype(np.float64)
    scale, shift = (-factor * total / count for total in (sums.squares, sums.sums))
    return Factors(*map(canonical, (scale, shift, factor, sums.squares, sums.sums)))


@np.errstate(all="ignore")
def emit(
    values: Floats,
    affine: Affine | None,
    addend: Floats | None,
    rectify: bool,
    most: float = float("inf"),
) -> Emitted:
    """Run forward from normalised values (count,): affine, addend, ReLU bounded by ``most``."""
    result = values if affine is None else affine.apply(values, 0)
    if addend is not None:
        result = result + addend
    if not rectify:
        return Emitted(canonical(result), None)
    high = np.float32(float("nan") if most == float("inf") else most)
    mask = encode_mask(result, Predicate.INSIDE, 0.0, float(high))
    bounded = np.where(result >= high, high, result)
    return Emitted(canonical(np.where(result <= 0, np.float32(0), bounded)), mask)


@np.errstate(all="ignore")
def derive(
    values: Floats, affine: Affine | None, before: Floats | None, mask: Planes | None
) -> Floats:
    """Return ``emit``'s result from normalised values (count,), its mask and the addend."""
    result = values if affine is None else affine.apply(values, 0)
    if before is not None:
        result = before + result
    if affine is not None or before is not None:
        result = canonical(result)
    return masked(result, mask)


def masked(gradient: Floats, mask: Planes | None) -> Floats:
    """Return the gradient, +0 where the mask is clear."""
    if mask is None:
        return gradient
    chosen = from_planes(mask).reshape(-1)[: len(gradient)] == 1
    return np.where(chosen, gradient, np.float32(0))


def gradient_sums(
    values: Floats, gradient: Floats, mask: Planes | None, channels: int, inner: int
) -> Sums:
    """Run the first pass of backward."""
    return measure_products(masked(gradient, mask), values, channels, inner)


@np.errstate(all="ignore")
def input_gradient(
    values: Floats, gradient: Floats, mask: Planes | None, of_value: Affine, of_gradient: Affine
) -> Floats:
    """Run the second pass of backward."""
    channel = channel_of(len(values), len(of_gradient.scale), of_gradient.inner)
    product = masked(gradient, mask) * of_gradient.scale[channel]
    return canonical(product + of_value.apply(values, 0))
