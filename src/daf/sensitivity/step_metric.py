"""In which units errors count: the gradient's own, or those of an optimizer's step.

SGD steps along the gradient, and what an error does to a step is its length. Adam and its kin
divide every element by the root of what its square usually is (Kingma and Ba, ICLR 2015,
algorithm 1), so that the same error is nothing in a parameter of large gradients and
everything in one of small: under LoRA the queries' gradients have a thousandth of the
pooler's energy, and codes that add next to nothing to the whole gradient may add as much
to the queries' as there is.

There errors are counted as that step makes them, by a parameter's mean squared element: summed
over parameters, elements x error / energy of its gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from daf.optimizer_trials import divides_by_gradients

# A gradient that is 0 in truth, as that of a key's bias is, to which attention is indifferent, is
# left with its rounding, which says nothing: elements' squares this far below the usual do not
# count. In coarser types, where rounding is more, codes' errors count as so many times the
# gradient at the most.
_ROUNDING = 1e-10
_MOST_TIMES = 16.0


def relative_counts(parameters: tuple[nn.Parameter, ...], exact: Tensor, coded: Tensor) -> Tensor:
    """What a squared error of each parameter's gradient counts in steps that are divided by it.

    Args:
        parameters: those that are sketched.
        exact: (parameters, buckets): the batch's gradient without codes.
        coded: (parameters, buckets): under them.

    Returns:
        (parameters,) float64; 0 where there is no gradient but rounding.
    """
    elements = torch.tensor([each.numel() for each in parameters], dtype=torch.float64)
    own = exact.square().sum(1)
    energy = torch.maximum(own, coded.square().sum(1) / _MOST_TIMES)
    is_heard = own / elements > _ROUNDING * own.sum() / elements.sum()
    return torch.where(is_heard, elements / energy, torch.zeros_like(energy))


def counts_relatively(optimizer: torch.optim.Optimizer | None) -> bool:
    """Is it an optimizer's step, and not the gradient, whose error is to be small?"""
    return optimizer is not None and divides_by_gradients(optimizer)
