"""In which units errors count: the gradient's own, or those of an optimizer's step.

SGD steps along the gradient, and what an error does to a step is its length. Adam and its kin
divide every element by the root of what its square usually is (Kingma and Ba, ICLR 2015,
algorithm 1), so that the same error is nothing in a parameter of large gradients and
everything in one of small: under LoRA the queries' gradients are small beside the pooler's,
and codes that add next to nothing to the whole gradient may add much to the queries'.

There errors are counted as that step makes them, by the mean square of a parameter's elements
that have a gradient: summed over parameters, elements x error / energy of the gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

# A gradient that is 0 in truth, as that of a key's bias is, to which attention is indifferent, is
# left with its rounding, which says nothing: elements' squares this far below the usual do not
# count. In coarser types, where rounding is more, codes' errors count as so many times the
# gradient at the most.
_ROUNDING = 1e-10
_MOST_TIMES = 16.0


def relative_counts(elements: Tensor, own: Tensor, noise: Tensor, coded: Tensor) -> Tensor:
    """What a squared error of each parameter's gradient counts in steps that are divided by it.

    Args:
        elements: (parameters,): how many have a gradient.
        own: (parameters,): energy of the batch's gradient without codes.
        noise: (parameters,): what of that differs from batch to batch; where it is more, this
            batch's gradient is small by chance.
        coded: (parameters,): energy under codes.

    Returns:
        (parameters,) float64; 0 where there is no gradient but rounding.
    """
    own = torch.maximum(own, noise)
    energy = torch.maximum(own, coded / _MOST_TIMES)
    is_heard = own * elements.sum() > _ROUNDING * own.sum() * elements
    return torch.where(is_heard, elements / energy, torch.zeros_like(energy))
