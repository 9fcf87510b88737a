"""The units in which errors count: the gradient's own, or those of an optimizer's step.

SGD steps along the gradient, so an error counts by its length. Adam and its kin divide every
element by the root of its usual square (Kingma and Ba, ICLR 2015, algorithm 1), so an error counts
for much only in a parameter of small gradients. Under LoRA, codes that add little to the whole
gradient may add much to the queries', which is small beside the pooler's.

There errors count by the mean square of a parameter's elements that have a gradient: summed over
parameters, elements x error / energy of the gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

# A gradient that is 0 in truth (a key's bias, to which attention is indifferent) holds only
# rounding: elements' squares this far below the usual do not count. In coarser dtypes, with more
# rounding, codes' errors count as at most so many times the gradient.
_ROUNDING = 1e-10
_MOST_TIMES = 16.0


def relative_counts(elements: Tensor, own: Tensor, noise: Tensor, coded: Tensor) -> Tensor:
    """Return (parameters,) float64: what a squared error of each gradient counts in a step.

    ``elements``: how many have a gradient. ``own``: energy of the batch's gradient without codes;
    ``coded``: with codes. ``noise``: what of ``own`` differs from batch to batch; the larger of
    both counts. 0 where the gradient is nothing but rounding.
    """
    own = torch.maximum(own, noise)
    energy = torch.maximum(own, coded / _MOST_TIMES)
    is_heard = own * elements.sum() > _ROUNDING * own.sum() * elements
    return torch.where(is_heard, elements / energy, torch.zeros_like(energy))
