"""Which site caused how much of a change that several caused together: pure, no torch.

Every pass draws each site's codes anew at random, and every pair of passes gives one equation:
the squared distance of their gradients is, in expectation, the sum of what
the sites that differ between the two add. The equations are solved for non-negative
unknowns, drawn towards a prior where they leave something open.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from daf.sensitivity.non_negative import non_negative_least_squares

Floats = NDArray[np.float64]
Draws = NDArray[np.int64]
DRAWS = 3
_ROUNDS = 4
_FIRST_SCATTER, _LEAST_SCATTER = 0.3, 0.02
_TINY = 1e-300


@dataclass(frozen=True, slots=True)
class Separation:
    """(sites,) estimates and their standard errors, in the unit of the squared distances."""

    values: Floats
    standard_errors: Floats


def random_draws(sites: int, passes: int, seed: int) -> Draws:
    """(passes, sites) of 0, 1 and 2: equally many sites take each, and every site takes two.

    Three draws rather than two, so that one unlucky pair of them does not decide.
    """
    random = np.random.default_rng(seed)
    draws = np.stack([random.permutation(np.arange(sites) % DRAWS) for _ in range(passes)])
    for column in np.flatnonzero(~draws.any(0)):
        draws[random.integers(passes), column] = 1
    return draws


def separate(
    draws: Draws,
    distances: Floats,
    change: Floats,
    prior: Floats,
    prior_deviation: Floats,
) -> Separation:
    """Least squares over all pairs of passes.

    Rows are weighted by the inverse of what the fit expects of them, because a squared distance
    scatters in proportion to itself; n + 1 passes make n(n + 1)/2 rows, which together
    count as n. A standard error is the larger of two: that of the linear model with the scatter
    of the residuals, which approaches the prior's own deviation where the rows say little, and
    the jackknife over passes (Efron and Stein, Annals of Statistics 1981).

    Args:
        draws: (passes, sites); two passes differ at a site where these differ.
        distances: (passes, passes) squared distances of gradients.
        change: (sites,) by how much of its variance a site changes a squared distance (2 for
            two independent draws, 1 for a code against none).
        prior: (sites,) expected values, in proportion; their scale is fitted.
        prior_deviation: (sites,) how far a value may be from its prior, in units of it.
    """
    pairs = list(combinations(range(len(draws)), 2))
    first, second = np.array([p for p, _ in pairs]), np.array([q for _, q in pairs])
    matrix = (draws[first] != draws[second]) * change
    measured = distances[first, second]
    told = matrix.any(1)
    matrix, measured, first, second = matrix[told], measured[told], first[told], second[told]
    share = 2.0 / len(draws)
    values = _scaled(matrix, measured, np.maximum(prior, _TINY))
    deviation = np.maximum(values * prior_deviation, _TINY)
    expected_values, scatter = values, _FIRST_SCATTER
    for _ in range(_ROUNDS):
        fitted = np.maximum(matrix @ values, _TINY)
        weight = np.sqrt(share) / (scatter * fitted)
        system = np.vstack([matrix * weight[:, None], np.diag(1.0 / deviation)])
        target = np.concatenate([measured * weight, expected_values / deviation])
        scale = 1.0 / np.abs(system).max(0)  # unknowns span many orders of magnitude
        values = non_negative_least_squares(system * scale, target) * scale
        residual = measured / np.maximum(matrix @ values, _TINY) - 1.0
        scatter = max(_LEAST_SCATTER, float(np.sqrt(np.mean(np.square(residual)))))
    without = [
        np.concatenate([(first != one) & (second != one), np.ones(len(prior), bool)])
        for one in range(len(draws))
    ]
    errors = np.maximum(
        _model_errors(system * scale), _jackknife_errors(system * scale, target, without)
    )
    return Separation(values, errors * scale)


def _scaled(matrix: Floats, measured: Floats, prior: Floats) -> Floats:
    """The prior times the one factor that explains the measured rows best."""
    explained = matrix @ prior
    ratios = measured / np.maximum(explained, _TINY)
    return prior * max(float(np.median(ratios)), _TINY)


def _model_errors(system: Floats) -> Floats:
    errors: Floats = np.sqrt(np.diag(np.linalg.inv(system.T @ system)))
    return errors


def _jackknife_errors(system: Floats, target: Floats, without: list[NDArray[np.bool_]]) -> Floats:
    values = np.stack([non_negative_least_squares(system[rows], target[rows]) for rows in without])
    spread = np.square(values - values.mean(0)).sum(0)
    errors: Floats = np.sqrt(spread * (len(without) - 1) / len(without))
    return errors
