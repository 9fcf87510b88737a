"""What the codes are for: the design's error table, and no bias.

The oracle is measured; the native kernels equal it byte for byte. Errors are
relative to the energy left after the block mean.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from reference import codecs as reference
from reference.codecs import Code, Target
from reference.lloyd_max import lloyd_max

from daf.core import code_tables
from daf.core.code_format import ElementType, block_count

ROTATED_ERROR = {1: 0.567, 2: 0.131, 3: 0.035, 4: 0.0094}
MINMAX_ERROR = {1: 7.0, 2: 0.60, 3: 0.11, 4: 0.024}
COUNT = 256 * 1200


def gaussian(count: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(count, dtype=np.float32)


def relu(count: int) -> np.ndarray:
    return np.maximum(gaussian(count), 0)


def laplace(count: int) -> np.ndarray:
    return np.random.default_rng(2).laplace(size=count).astype(np.float32)


def outliers(count: int, sigmas: float) -> np.ndarray:
    """One huge value in every block."""
    values = gaussian(count)
    values[np.arange(block_count(count)) * 256 + 77] = sigmas
    return values


def energy(values: np.ndarray) -> float:
    blocks = values.reshape(-1, 256).astype(np.float64)
    return float(((blocks - blocks.mean(axis=1, keepdims=True)) ** 2).mean())


def relative_error(found: np.ndarray, values: np.ndarray) -> float:
    return float(((found.astype(np.float64) - values) ** 2).mean() / energy(values))


def rotated_back(values, bits, kept=None, key=5) -> np.ndarray:
    code = reference.encode_rotated(values, bits, key)
    part = Code(code.planes[: kept or bits], code.headers)
    return reference.decode_rotated(part, Target(len(values)), bits, key)


def minmax_back(values, bits, key=5) -> np.ndarray:
    code = reference.encode_minmax(values, bits, key)
    return reference.decode_minmax(code, Target(len(values)), bits)


@pytest.mark.parametrize("make", [gaussian, relu, laplace])
@pytest.mark.parametrize("bits", ROTATED_ERROR)
def test_rotated_error_is_the_design_s(make, bits) -> None:
    values = make(COUNT)
    assert relative_error(rotated_back(values, bits), values) == pytest.approx(
        ROTATED_ERROR[bits], rel=0.02
    )


@pytest.mark.parametrize("sigmas", [30.0, 100.0])
@pytest.mark.parametrize("bits", ROTATED_ERROR)
def test_outliers_have_the_table_s_error(bits, sigmas) -> None:
    values = outliers(COUNT, sigmas)
    found = relative_error(rotated_back(values, bits), values)
    assert found == pytest.approx(ROTATED_ERROR[bits], rel=0.02)


def squared_bias(values: np.ndarray, bits: int, seeds: int = 64) -> float:
    """What seeds do not average out, as a share of the energy, estimated without a bias."""
    found = (rotated_back(values, bits, key=key) for key in range(seeds))
    errors = [each.astype(np.float64) - values for each in found]
    noise = np.mean([(error**2).mean() for error in errors])
    return float((np.mean(errors, 0) ** 2).mean() - noise / seeds) / energy(values)


def sparse(count: int, of_each: int) -> np.ndarray:
    """So many positive elements in every block, zero elsewhere."""
    places = np.random.default_rng(3).random((count // 256, 256)).argsort(1).argsort(1) < of_each
    return np.where(places.ravel(), np.abs(gaussian(count)), 0).astype(np.float32)


@pytest.mark.parametrize("bits", [1, 2])
@pytest.mark.parametrize(
    "values",
    [
        outliers(256 * 64, 30.0),
        outliers(256 * 64, 1000.0),
        np.eye(256, dtype=np.float32)[:64].ravel(),
        sparse(256 * 64, 4),
        sparse(256 * 64, 16),
        relu(256 * 64),
    ],
    ids=["outlier", "massive", "one-hot", "sparse-4", "sparse-16", "relu"],
)
def test_sparse_and_peaked_blocks_have_no_bias(values, bits) -> None:
    """One round alone leaves 0.08 of the square of an outlier of 30 sigma at one bit."""
    assert abs(squared_bias(values, bits)) < 0.001


def test_dense_blocks_have_one_round() -> None:
    """The sign of the scale says which have two."""
    for make, share in ((gaussian, 0.0), (relu, 0.002), (laplace, 0.04)):
        headers = reference.encode_rotated(make(COUNT), 2, 5).headers
        assert (headers[:, 1] >= 0x8000).mean() <= share
    headers = reference.encode_rotated(sparse(COUNT, 4), 2, 5).headers
    assert (headers[:, 1] >= 0x8000).all()


@pytest.mark.parametrize("bits", MINMAX_ERROR)
def test_minmax_error_is_the_design_s(bits) -> None:
    values = gaussian(COUNT)
    assert relative_error(minmax_back(values, bits), values) == pytest.approx(
        MINMAX_ERROR[bits], rel=0.05
    )


@pytest.mark.parametrize(("bits", "kept"), [(b, k) for b in (1, 2, 3, 4) for k in range(1, b + 1)])
def test_rotated_is_unbiased_from_any_number_of_planes(bits, kept) -> None:
    """Averaging 32 seeds divides the error by 32; a shrunken result would not let it."""
    values = gaussian(256 * 200)
    seeds = [rotated_back(values, bits, kept, key=key) for key in range(32)]
    single = np.mean([relative_error(found, values) for found in seeds])
    assert single == pytest.approx(code_tables.rotated_error(bits, kept), rel=0.03)
    averaged = relative_error(np.mean(seeds, axis=0, dtype=np.float64), values)
    assert averaged * 32 == pytest.approx(single, rel=0.05)


def test_what_no_number_of_seeds_averages_out_is_the_rounding_to_integers() -> None:
    """The product of two independent means' errors has no noise of its own on average."""
    values = gaussian(256 * 16)
    halves = [
        np.mean([rotated_back(values, 4, key=first + key) for key in range(600)], 0, np.float64)
        for first in (0, 10_000)
    ]
    left = np.prod([half - values for half in halves], axis=0).mean() / energy(values)
    blocks = values.reshape(-1, 256).astype(np.float64)
    centred = blocks - blocks.mean(axis=1, keepdims=True)
    grid = 2000 / np.linalg.norm(centred, axis=1, keepdims=True)
    rounded = ((np.rint(centred * grid) / grid - centred) ** 2).mean() / energy(values)
    assert rounded == pytest.approx(5e-6, rel=0.1)  # as the format says
    assert left == pytest.approx(rounded, rel=0.3)


@pytest.mark.parametrize(("bits", "kept"), [(b, k) for b in (1, 2, 3, 4) for k in range(1, b + 1)])
def test_the_gain_is_one(bits, kept) -> None:
    values = gaussian(COUNT)
    gain = np.dot(rotated_back(values, bits, kept), values) / np.dot(values, values)
    assert gain == pytest.approx(1.0, abs=0.005)


@pytest.mark.parametrize("bits", range(1, 9))
def test_minmax_is_unbiased(bits) -> None:
    values = gaussian(256 * 200) * 3 + 1
    seeds = [minmax_back(values, bits, key) for key in range(32)]
    single = np.mean([relative_error(found, values) for found in seeds])
    averaged = relative_error(np.mean(seeds, axis=0, dtype=np.float64), values)
    assert averaged * 32 == pytest.approx(single, rel=0.05)


def test_minmax_errors_of_neighbours_are_uncorrelated() -> None:
    """Four elements share a random word; their rounding must not show it."""
    values = gaussian(256 * 2000)
    error = (minmax_back(values, 2) - values).reshape(-1, 16, 16)
    for distance in (1, 2, 3, 4):
        pairs = (error[:, distance:] * error[:, :-distance]).mean() / (error**2).mean()
        assert abs(pairs) < 0.01, distance


@pytest.mark.parametrize("bits", range(1, 9))
def test_zeros_of_minmax_stay_zero(bits) -> None:
    values = relu(256 * 50)
    assert (minmax_back(values, bits)[values == 0] == 0).all()


def test_denormal_blocks_are_rounded_without_bias() -> None:
    values = (np.arange(512) % 256 * 2.0**-140).astype(np.float32)
    seeds = [minmax_back(values, 3, key) for key in range(400)]
    averaged = np.mean(seeds, axis=0, dtype=np.float64) * 2.0**140
    assert np.abs(averaged - np.arange(512) % 256).mean() < 4


def test_lloyd_max_levels_are_the_published_ones() -> None:
    """J. Max, "Quantizing for minimum distortion", IRE Trans. IT, 1960, table I."""
    assert lloyd_max(1)[1] == pytest.approx((0.7979,), abs=1e-4)
    assert lloyd_max(2)[0] == pytest.approx((0.9816,), abs=1e-4)
    assert lloyd_max(2)[1] == pytest.approx((0.4528, 1.510), abs=5e-4)
    assert lloyd_max(3)[1] == pytest.approx((0.2451, 0.7560, 1.344, 2.152), abs=5e-4)
    expected = (0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733)
    assert lloyd_max(4)[1] == pytest.approx(expected, abs=5e-4)


def slope_of_gelu(x: np.ndarray) -> np.ndarray:
    below = 0.5 * (1 + np.array([math.erf(value / math.sqrt(2)) for value in x]))
    return below + x * np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def slope_of_hardswish(x: np.ndarray) -> np.ndarray:
    return np.where(x <= -3, 0.0, np.where(x <= 3, x / 3 + 0.5, 1.0))


PLACES = np.sinh(np.linspace(-8, 8, 16_001)) / np.sinh(8) * 100


@pytest.mark.parametrize(
    ("slope", "worst"), [(slope_of_gelu, 1e-5), (slope_of_hardswish, 1e-9)], ids=["gelu", "hard"]
)
def test_lines_follow_a_derivative_and_end_constant(slope, worst) -> None:
    table = code_tables.derivative_lines(PLACES, slope(PLACES))
    borders, scale, shift = np.split(table, [15, 31])
    assert (np.diff(borders) > 0).all()
    assert np.isin(borders, PLACES).all()
    assert scale[0] == scale[-1] == 0.0
    assert shift[[0, -1]] == pytest.approx([0.0, 1.0], abs=0.01)
    x = gaussian(20_000).astype(np.float64)
    piece = np.searchsorted(borders, x)
    error = scale[piece] * x + shift[piece] - slope(x)
    inside = np.abs(np.abs(x) - 3) > 0.02  # a jump lies at a place
    assert (error**2)[inside].mean() < worst * (slope(x) ** 2).mean()


@pytest.mark.parametrize("bits", [1, 2, 3])
def test_derivative_codes_are_unbiased(bits) -> None:
    """Averaged over seeds they tend to the line, and one errs by its two levels alone."""
    x = gaussian(256 * 40)
    table = code_tables.derivative_lines(PLACES, slope_of_gelu(PLACES)).astype(np.float32)
    table[15:] *= (2**bits - 1) / 1.3
    table[31:] += 0.15 / 1.3 * (2**bits - 1)
    borders, scale, shift = np.split(table, [15, 31])
    piece = np.searchsorted(borders, x)
    steps = np.clip(scale[piece] * x + shift[piece], 0, 2**bits - 1).astype(np.float64)
    levels = np.arange(2**bits, dtype=np.float32)
    found = []
    for key in range(64):
        planes = reference.encode_derivative(x, bits, key, table)
        found.append(reference.decode_derivative(planes, len(x), levels, ElementType.FLOAT32))
    assert max(np.abs(each - steps).max() for each in found) < 1.001
    single = ((found[0] - steps) ** 2).mean()
    assert single == pytest.approx((steps % 1 * (1 - steps % 1)).mean(), rel=0.05)
    assert ((np.mean(found, 0) - steps) ** 2).mean() * 64 == pytest.approx(single, rel=0.1)
