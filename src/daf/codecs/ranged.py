"""Grids of min-max codes whose range is the whole tensor's or each channel's, for which there is a
true reduction (DAF, arXiv 2507.07149): no headers, eight bytes for every channel.

Ranges of blocks fit closer, so that no plan chooses these: they are what was published, to
compare with.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from daf.kernels.normalisation import Channels


class Cut(NamedTuple):
    """Which elements share a range: ``i`` in memory order is of ``(i // inner) % channels``."""

    channels: int = 1
    inner: int = 1

    @classmethod
    def along(cls, tensor: Tensor, dimension: int) -> Cut:
        """Every index of a dense tensor's dimension is a channel."""
        channels = tensor.shape[dimension]
        return cls(channels, tensor.stride(dimension)) if channels > 1 else cls()


WHOLE = Cut()


class Grid(NamedTuple):
    """What makes numbers of steps of values, and values of these."""

    to_steps: Channels
    from_steps: Channels


def grid_of(low: Tensor, high: Tensor, bits: int, inner: int) -> Grid:
    """The grid of ``2**bits`` values from ``low`` to ``high``, for every channel.

    (channels,) floats each, on any device, where the vectors are made too. Where all values are
    one, that one comes back exactly; where an end is not finite, NaN does.
    """
    low, high = low.double(), high.double()
    step = (high - low) / (2**bits - 1)
    per_value = torch.where(step > 0, 1 / step, 0.0).float()
    per_value = torch.where(per_value.isfinite(), per_value, 0.0)  # of a step that is next to none
    finite = low.isfinite() & high.isfinite()
    least = torch.where(finite, low, torch.nan).float()
    to_steps = Channels(per_value, (-low * per_value).float(), inner)
    return Grid(to_steps, Channels(step.float(), least, inner))
