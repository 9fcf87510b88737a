"""Expected relative mean-square error of every lossy code, in one unit for all of them.

The unit is the energy that is left of a block after its mean was removed. The
numbers hold for blocks of Gaussian values; ``rotated`` makes others alike, for
``minmax`` they are only typical.
"""

from __future__ import annotations

from daf.core.code_tables import rotated_error
from daf.core.policy import Method, Treatment

# E[(max - min)²] of 256 independent unit Gaussians (numerical integration of the range's
# distribution; H. L. Harter, "Order Statistics and Their Use", 1970, gives E[range] = 5.6387).
GAUSSIAN_BLOCK_SQUARED_RANGE = 32.17


# Whose error depends on the tensor: nobody knows it beforehand.
WITHOUT_ERROR = frozenset({Method.RANGED, Method.REGISTERED})


def minmax_error(bits: int) -> float:
    """Of ``minmax`` codes with stochastic rounding.

    An element at fraction f between two levels has the variance f(1 - f) steps². That is 1/6 on
    average when a cell is narrow; with a single cell, E[f(1 - f)] range² is range²/4 - 1.
    """
    if bits == 1:
        return GAUSSIAN_BLOCK_SQUARED_RANGE / 4 - 1
    return float(GAUSSIAN_BLOCK_SQUARED_RANGE / (6 * (2**bits - 1) ** 2))


def relative_error(treatment: Treatment) -> float:
    """What a treatment leaves; 0 where nothing is lost, or nobody knows (``WITHOUT_ERROR``).

    A derivative code is taken to err as a rotated code of as many bits does.
    """
    if treatment.method is Method.MINMAX:
        return minmax_error(treatment.bits)
    if treatment.method in (Method.ROTATED, Method.DERIVATIVE):
        return rotated_error(treatment.bits, treatment.bits)
    return 0.0


def error_growth(bits: int, lost_planes: float) -> float:
    """By which factor a ``rotated`` code's error grows when planes are given up, the last first.

    Of a plane that is lost in part, the error counts in proportion.
    """
    lost = min(bits - 1.0, lost_planes)
    kept, part = bits - int(lost), lost - int(lost)
    error = rotated_error(bits, kept)
    if part > 0.0:
        error += part * (rotated_error(bits, kept - 1) - error)
    return error / rotated_error(bits, bits)
