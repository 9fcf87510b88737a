"""The published dynamic quantization, re-implemented on the same kernels: ActNN's and GACT's.

Their code (groups of 256, per-group range, stochastic rounding), their exact masks, and
GACT's allocation of widths by measured sensitivity.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Any

from torch import nn

from daf.core.code_errors import minmax_error
from daf.core.policy import Method, Need, Policy, Treatment, exact_policy
from daf.step.microbatch import LossFunction, likely_cut
from daf_bench.accuracy.bit_allocation import gact_widths
from daf_bench.accuracy.policies import Example, coded_elements, measured

# A part of the batch tells which tensors are sensitive, at a part of the cost.
FITTED_ON = 4


def minmax_policy(bits: int) -> Policy:
    """ActNN's and GACT's: one width of min-max codes wherever backward reads floats.

    Masks, indices and dropped content are exact, as both papers have them.
    """
    code = Treatment(Method.MINMAX, bits)
    lossy = dict.fromkeys((Need.LINEAR, Need.NORM, Need.PRODUCT, Need.PROBABILITY), code)
    lossy[Need.SMOOTH] = Treatment(Method.DERIVATIVE, min(max(bits, 2), 4))
    exact = dict(exact_policy().by_need)
    return Policy(f"min-max {bits}", MappingProxyType(exact | lossy), rederive=False)


def gact_policy(bits: int, model: nn.Module, loss_fn: LossFunction, batch: Any) -> Policy:
    """The same code, its widths (8, 4, 2, 1) allocated as GACT does, ``bits`` on average.

    Fitted on a quarter of the batch, with a few passes; the model stays as it is. A tensor's
    sensitivity is the squared distance of two gradients under different seeds of its 1-bit
    code, which is twice that code's variance.
    """
    cut = likely_cut(batch)
    part = cut.take(batch, 0, -(-cut.size(batch) // FITTED_ON))
    example = Example(model, loss_fn, part)
    uniform = minmax_policy(bits)
    elements = coded_elements(example, uniform)
    variances = measured(example, uniform, elements)
    distances = {site: 2 * value * minmax_error(1) for site, value in variances.items()}
    widths = gact_widths(elements, distances, bits)
    by_site = {site: Treatment(Method.MINMAX, width) for site, width in widths.items()}
    return replace(uniform, name=f"GACT {bits}", by_site=MappingProxyType(by_site))
