"""Expected mean-square error of every lossy code, relative to a block's energy without its mean.

For Gaussian values. ``rotated`` makes other values alike; for ``minmax`` it is only typical.
"""

from daf.core.code_tables import rotated_error
from daf.core.policy import Method, Treatment

# E[(max - min)²] of 256 independent unit Gaussians (numerical integration of the range's
# distribution; H. L. Harter, "Order Statistics and Their Use", 1970, gives E[range] = 5.6387).
GAUSSIAN_BLOCK_SQUARED_RANGE = 32.17


def minmax_error(bits: int) -> float:
    """Return the error of ``minmax`` codes with stochastic rounding.

    An element at fraction f between two levels has variance f(1 - f) steps²: 1/6 on average if
    cells are narrow; with a single cell, E[f(1 - f)] range² is range²/4 - 1.
    """
    return _squared_step_error(GAUSSIAN_BLOCK_SQUARED_RANGE, bits)


def _squared_step_error(squared_range: float, bits: int) -> float:
    return squared_range / 4 - 1 if bits == 1 else float(squared_range / (6 * (2**bits - 1) ** 2))


# The same of 1,000,000: E[range] = 9.73, of a range that a whole tensor or a channel shares.
GAUSSIAN_TENSOR_SQUARED_RANGE = 94.8


def ranged_error(bits: int) -> float:
    """Return the typical error of min-max codes of one range for all, as in ``minmax_error``."""
    return _squared_step_error(GAUSSIAN_TENSOR_SQUARED_RANGE, bits)


# Squared range of GELU's derivative (1.26) over its mean square for unit Gaussian inputs (0.456).
DERIVATIVE_SQUARED_RANGE = 3.47


def relative_error(treatment: Treatment) -> float:
    """Return a treatment's error, 0 if lossless or unknown."""
    if treatment.method is Method.MINMAX:
        return minmax_error(treatment.bits)
    if treatment.method is Method.RANGED:
        return ranged_error(treatment.bits)
    if treatment.method is Method.DERIVATIVE:  # 1/6 of the squared distance of two levels
        return float(DERIVATIVE_SQUARED_RANGE / (6 * (2**treatment.bits - 1) ** 2))
    if treatment.method is Method.ROTATED:
        return rotated_error(treatment.bits, treatment.bits)
    return 0.0


def error_growth(bits: int, lost_planes: float) -> float:
    """Return the growth of a ``rotated`` code's error; parts of evicted planes count pro rata."""
    lost = min(bits - 1.0, lost_planes)
    kept, part = bits - int(lost), lost - int(lost)
    error = rotated_error(bits, kept)
    if part > 0.0:
        error += part * (rotated_error(bits, kept - 1) - error)
    return error / rotated_error(bits, bits)
