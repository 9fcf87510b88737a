"""Max-pooling indices as places in the window: a few bits instead of PyTorch's int64."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from daf.codecs.codes import ElementsCode
from daf.codecs.layout import Layout
from daf.codecs.scratch import Scratch
from daf.saved_tensors.packed_tensor import Decoded, Stored
from daf.torch_compat.autograd_graph import saved_value


class Windows(NamedTuple):
    """The windows of a max-pooling operator, one entry for each spatial dimension."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    input_size: tuple[int, ...]

    @property
    def bits(self) -> int:
        """Bits that number the elements of a window."""
        return max(1, (math.prod(self.kernel) - 1).bit_length())

    def offsets(self, indices: Tensor) -> Tensor:
        """Return int32 places in the window, row by row, of (…, *output) int64 flat indices."""
        rest = indices.to(torch.int32)
        place = torch.zeros_like(rest)
        scale = 1
        for axis in reversed(range(len(self.kernel))):
            size = self.input_size[axis]
            coordinate = rest.remainder(size) if axis else rest
            rest = rest.div(size, rounding_mode="floor") if axis else rest
            coordinate = coordinate - self._starts(indices, axis)
            place += coordinate.div_(self.dilation[axis], rounding_mode="floor").mul_(scale)
            scale *= self.kernel[axis]
        return place

    def indices(self, offsets: Tensor) -> Tensor:
        """Return the inverse of ``offsets``."""
        rest = offsets
        flat = torch.zeros_like(offsets, dtype=torch.int64)
        scale = 1
        for axis in reversed(range(len(self.kernel))):
            size = self.kernel[axis]
            step = rest.remainder(size) if axis else rest
            rest = rest.div(size, rounding_mode="floor") if axis else rest
            coordinate = step.mul(self.dilation[axis]).add_(self._starts(offsets, axis))
            flat += coordinate.mul_(scale)
            scale *= self.input_size[axis]
        return flat

    def _starts(self, outputs: Tensor, axis: int) -> Tensor:
        place = axis - len(self.kernel)
        starts = torch.arange(outputs.shape[place], dtype=torch.int32, device=outputs.device)
        starts = starts * self.stride[axis] - self.padding[axis]
        return starts.reshape(-1, *[1] * (-place - 1))


def windows_of(node: Any, input_shape: Sequence[int]) -> Windows:
    """Return the windows of a ``MaxPool2DWithIndices`` or ``MaxPool3DWithIndices`` node."""
    axes = 3 if "3D" in node.name() else 2

    def spread(values: Sequence[int]) -> tuple[int, ...]:
        return tuple(values) if len(values) == axes else tuple(values) * axes

    kernel = spread(saved_value(node, "kernel_size"))
    return Windows(
        kernel,
        spread(saved_value(node, "stride")) or kernel,
        spread(saved_value(node, "padding")),
        spread(saved_value(node, "dilation")),
        tuple(input_shape[-axes:]),
    )


class WindowPlaces(Decoded):
    """Pooling indices held as places in the window; lossless."""

    __slots__ = ("_windows",)

    def __init__(self, code: Stored[ElementsCode], layout: Layout, windows: Windows) -> None:
        super().__init__(code, layout._replace(dtype=torch.int32))
        self._windows = windows

    def restore(self, scratch: Scratch) -> Tensor:
        offsets = super().restore(scratch)
        out = scratch.empty(self.layout._replace(dtype=torch.int64))
        out.copy_(self._windows.indices(offsets))
        return out
