"""What a normalisation on a device writes while, or without, its values being coded."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import NamedTuple, Protocol

from torch import Tensor

from daf.codecs.cpu import Channels
from daf.codecs.layout import in_memory_order
from daf.kernels.triton import channel_norm as triton_norm
from daf.kernels.triton.launch import Affine
from daf.pool.device_pool import DevicePlaneTensor
from daf.pool.host_planes import HostPlanes


class UnwrittenMask(Protocol):
    """A mask of a device's tensor, with room for its bits."""

    @property
    def planes(self) -> DevicePlaneTensor | HostPlanes:
        """That room."""


class DeviceEmission(NamedTuple):
    """``result`` of the values, plus ``addend``, into ``out``; with ``mask``, through ReLU.

    That lets pass ``most`` at most. ``out`` and ``addend`` are dense, of the input's layout.
    """

    out: Tensor
    result: Channels | None
    addend: Tensor | None
    mask: UnwrittenMask | None
    most: float = math.inf

    def carry_out(self, x: Tensor, forward: Channels) -> None:
        """For values that are ``forward`` of the dense tensor ``x``."""
        filling = nullcontext() if self.mask is None else self.mask.planes.filling()
        addend = None if self.addend is None else in_memory_order(self.addend)
        with filling as mask:
            triton_norm.emit(
                in_memory_order(x),
                affine_of(forward),
                in_memory_order(self.out),
                None if self.result is None else affine_of(self.result),
                addend,
                mask,
                self.most,
            )


def affine_of(channels: Channels) -> Affine:
    """The same for kernels."""
    return Affine(channels.scale, channels.shift, channels.inner)
