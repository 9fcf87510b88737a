"""Tables have one home: C++ is compiled with the same numbers, and they are derived right."""

from __future__ import annotations

import itertools
import math

import daf._native as _native
import numpy as np
import pytest
from reference.lloyd_max import lloyd_max
from scipy import integrate, stats

from daf.core import code_tables
from daf.core.code_format import FORMAT_VERSION

PAIRS = [(bits, kept) for bits in range(1, 5) for kept in range(1, bits + 1)]


def test_native_constants_are_those_of_the_tables() -> None:
    assert _native.FORMAT_VERSION == FORMAT_VERSION
    assert _native.ROTATED_CONSTANTS == (
        code_tables.INTEGER_LENGTH,
        code_tables.SCALE_UNIT,
        code_tables.COEFFICIENT_MULTIPLIER,
        code_tables.BETWEEN_ROUNDS_SHIFT,
        code_tables.PEAKED_FACTOR,
    )


def code_of(coefficient: int, bits: int) -> int:
    """A code found by walking the threshold tables, as kernels do."""
    cell = 0
    for step, row in enumerate(code_tables.rotated_thresholds(bits)):
        cell += (8 >> step) * int(coefficient > row[cell])
    return cell >> (4 - bits)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_walking_the_thresholds_counts_those_not_above(bits: int) -> None:
    unit = code_tables.INTEGER_LENGTH * code_tables.COEFFICIENT_MULTIPLIER / 2**16
    positive = [round(unit * threshold) for threshold in lloyd_max(bits)[0]]
    ascending = sorted([0, *positive, *(-value for value in positive)])
    for coefficient in range(-128, 128):
        assert code_of(coefficient, bits) == sum(value <= coefficient for value in ascending)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_thresholds_are_those_of_the_best_quantizer(bits: int) -> None:
    unit = code_tables.INTEGER_LENGTH * code_tables.COEFFICIENT_MULTIPLIER / 2**16
    best = [math.ceil(round(unit * each) * 2**16 / 1704) for each in lloyd_max(bits)[0]]
    assert code_tables.rotated_magnitudes(bits)[: len(best)].tolist() == best
    assert set(code_tables.rotated_magnitudes(bits)[len(best) : 8]) <= {0}


@pytest.mark.parametrize(("bits", "kept"), PAIRS)
def test_errors_and_gains_are_those_of_a_gaussian(bits: int, kept: int) -> None:
    """By numerical integration over the cells, which knows none of the closed forms."""
    unit = code_tables.INTEGER_LENGTH * code_tables.COEFFICIENT_MULTIPLIER / 2**16
    codes = np.array([code_of(value, bits) for value in range(-128, 128)])
    edges = [-math.inf, *((np.flatnonzero(np.diff(codes)) + 1 - 128) / unit), math.inf]
    full, part = (code_tables.rotated_levels(bits, k).astype(float) for k in (bits, kept))
    gains, energy = [0.0, 0.0], 0.0
    for code, (low, high) in enumerate(itertools.pairwise(edges)):
        moment = integrate.quad(lambda x: x * stats.norm.pdf(x), low, high)[0]
        mass = stats.norm.cdf(high) - stats.norm.cdf(low)
        whole = full[code << (4 - bits)]
        short = part[code >> (bits - kept) << (4 - kept)]
        gains[0] += moment * whole
        gains[1] += moment * short
        energy += mass * short**2
    assert code_tables.rotated_error(bits, kept) == pytest.approx(
        energy / gains[1] ** 2 - 1, rel=1e-6
    )
    factor = code_tables.rotated_level_factor(bits, kept) * code_tables.SCALE_UNIT
    assert factor == pytest.approx(gains[0] / gains[1], rel=1e-6)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_integers_cost_next_to_nothing(bits: int) -> None:
    """Against Lloyd-Max in real numbers: D / (1 - D)."""
    thresholds, levels = lloyd_max(bits)
    edges = [0.0, *thresholds, math.inf]
    explained = sum(
        2 * level**2 * (stats.norm.cdf(high) - stats.norm.cdf(low))
        for level, (low, high) in zip(levels, itertools.pairwise(edges), strict=True)
    )
    ideal = (1 - explained) / explained
    assert ideal <= code_tables.rotated_error(bits, bits) * (1 + 1e-12) <= 1.005 * ideal


@pytest.mark.parametrize(("bits", "kept"), PAIRS)
def test_no_level_can_overflow_sixteen_bits(bits: int, kept: int) -> None:
    levels = code_tables.rotated_levels(bits, kept).astype(int)
    assert np.abs(levels).max() <= 127
    assert 256 * 127 < 2**15
    # After a second round: Cauchy-Schwarz, with every number rounded by half at most.
    assert 16 * (16 * 127 + 8) < 2**15
    assert 16 * (code_tables.INTEGER_LENGTH + 8 + 8) < 2**15
