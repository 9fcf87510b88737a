"""Grids of min-max codes whose range is the tensor's or each channel's (DAF, arXiv 2507.07149).

They need no headers, only eight bytes per channel. Ranges of blocks fit closer, so no plan chooses
these grids: they serve to compare with the published method.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from daf.kernels.normalisation import Channels


class Cut(NamedTuple):
    """Which elements share a range: channel ``(i // inner) % channels`` in memory order."""

    channels: int = 1
    inner: int = 1

    @classmethod
    def along(cls, tensor: Tensor, dimension: int) -> "Cut":
        """Return the cut of a dense tensor with a channel for every index of ``dimension``."""
        channels = tensor.shape[dimension]
        return cls(channels, tensor.stride(dimension)) if channels > 1 else cls()


WHOLE = Cut()


class Grid(NamedTuple):
    """The affines from values to numbers of steps, and back."""

    to_steps: Channels
    from_steps: Channels


def grid_of(low: Tensor, high: Tensor, bits: int, inner: int) -> Grid:
    """Return the grid of ``2**bits`` values from ``low`` to ``high``, (channels,) floats each.

    If all values are equal, they come back exactly; if an end is not finite, NaN comes back.
    """
    low, high = low.double(), high.double()
    step = (high - low) / (2**bits - 1)
    per_value = torch.where(step > 0, 1 / step, 0.0).float()
    per_value = torch.where(per_value.isfinite(), per_value, 0.0)  # infinite for a step near 0
    least = torch.where(low.isfinite() & high.isfinite(), low, torch.nan).float()
    to_steps = Channels(per_value, (-low * per_value).float(), inner)
    return Grid(to_steps, Channels(step.float(), least, inner))
