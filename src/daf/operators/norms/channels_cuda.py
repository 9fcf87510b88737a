"""``normalised`` on a device: the same statistics, result and gradients, by Triton's kernels.

Tensors are dense float32, bfloat16 or float16. Coded values are decoded into float32 a part at a
time, which is read at once, and forgotten. Importing this raises KernelError without Triton.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from daf.codecs.cpu import PART_BYTES, Channels, check_count, elements_in
from daf.codecs.cuda import DeviceMaskCode, DeviceValueCode
from daf.codecs.cuda_outputs import DeviceEmission, affine_of
from daf.codecs.layout import in_memory_order
from daf.core.code_format import BLOCK_ELEMENTS, block_count
from daf.core.policy import Method, Treatment
from daf.kernels.triton import channel_norm as triton_norm
from daf.kernels.triton import codecs as triton_codecs
from daf.kernels.triton import reductions as triton_reductions
from daf.kernels.triton.planes import DevicePlanes
from daf.operators.norms.channels_cpu import Geometry, RunningStatistics, Statistics, Sums


class Values(Protocol):
    """Where normalised values come from."""

    def parts(self, span_blocks: int) -> Iterator[triton_norm.Values]:
        """All of them, whole spans of so many blocks at a time."""


class CodedValues(NamedTuple):
    """The values of a code."""

    code: DeviceValueCode

    def parts(self, span_blocks: int) -> Iterator[triton_norm.Values]:
        """Decoded into memory that the next part takes over."""
        count = self.code.count
        blocks = block_count(count)
        step = span_blocks * max(1, PART_BYTES // (4 * BLOCK_ELEMENTS * span_blocks))
        size = elements_in((0, min(step, blocks)), count)
        room = torch.empty(size, dtype=torch.float32, device=self.code.device)
        for first in range(0, blocks, step):
            here = (first, min(blocks, first + step))
            part = room[: elements_in(here, count)]
            self.code.decode(part, blocks=here)
            yield triton_norm.Values(part, here)


class KeptValues(NamedTuple):
    """``forward`` of the input, computed anew."""

    x: Tensor
    forward: Channels

    def parts(self, span_blocks: int) -> Iterator[triton_norm.Values]:  # noqa: ARG002 - all at once
        """They take no memory."""
        whole = (0, block_count(self.x.numel()))
        yield triton_norm.Values(in_memory_order(self.x), whole, affine_of(self.forward))


class ComputedValues:
    """``normalised.ComputedValues`` on a device."""

    __slots__ = ("_forward", "_read", "count")
    in_store = False
    nbytes = 0
    treatment = Treatment(Method.KEEP, 32)

    def __init__(self, read: Callable[[], Tensor], count: int, forward: Channels) -> None:
        self._read = read
        self._forward = forward
        self.count = count

    def decode(
        self,
        out: Tensor,
        channels: Channels | None = None,
        mask: DeviceMaskCode | None = None,
        accumulate: bool = False,
        blocks: tuple[int, int] | None = None,
    ) -> None:
        """Write them, bit for bit as ``emit`` did; the rest is as in ``ValueCode.decode``."""
        check_count(self.count if blocks is None else elements_in(blocks, self.count), out)
        with _pinned(mask) as planes:
            triton_norm.derive(
                in_memory_order(self._read()),
                affine_of(self._forward),
                in_memory_order(out),
                None if channels is None else affine_of(channels),
                planes,
                accumulate,
                blocks,
            )


def take_statistics(
    x: Tensor, geometry: Geometry, epsilon: float, running: RunningStatistics | None
) -> Statistics:
    """Mean and inverse deviation of every channel; running ones follow in place."""
    sums, squares = triton_reductions.measure_sums(
        in_memory_order(x), geometry.channels, geometry.inner
    )
    followed = None
    if running is not None:
        torch.autograd.graph.increment_version((running.mean, running.variance))
        followed = triton_norm.Followed(*running)
    count = geometry.per_channel
    return Statistics(*triton_norm.channel_statistics(sums, squares, count, epsilon, followed))


def emission(
    out: Tensor,
    result: Channels | None,
    addend: Tensor | None,
    mask: DeviceMaskCode | None,
    most: float = math.inf,
) -> DeviceEmission:
    """What to write once values are coded; the arguments are those of ``normalised.emission``."""
    return DeviceEmission(out, result, addend, mask, most)


def emit(x: Tensor, forward: Channels, written: DeviceEmission) -> None:
    """Forward without a code."""
    written.carry_out(x, forward)


def sum_gradient(
    values: Values,
    gradient: Tensor,
    mask: DeviceMaskCode | None,
    written: Tensor | None,
    geometry: Geometry,
) -> Sums:
    """Backward's first pass: as ``normalised.sum_gradient``."""
    given = in_memory_order(gradient)
    with _pinned(mask) as planes:
        if planes is not None and written is not None:
            triton_codecs.apply_mask(planes, given, in_memory_order(written))
            given, planes = in_memory_order(written), None
        elif written is not None and written is not gradient:
            written.copy_(gradient)
        sums = triton_norm.ChannelProducts(given, geometry.channels, geometry.inner)
        for part in values.parts(sums.span_blocks):
            sums.add(part, planes)
    return Sums(*sums.totals())


def take_factors(
    sums: Sums,
    geometry: Geometry,
    inverse_deviation: Tensor,
    gamma: Tensor | None,
    gradients: tuple[Tensor | None, Tensor | None],
) -> tuple[Channels, Channels]:
    """What backward's second pass multiplies by: as ``normalised.take_factors``."""
    vectors = (inverse_deviation, gamma, gradients)
    found = triton_norm.channel_factors(sums.sums, sums.products, geometry.per_channel, *vectors)
    inner, of_gradient = geometry.inner, found.of_gradient
    return Channels(found.of_value, found.offset, inner), Channels(of_gradient, of_gradient, inner)


def write_input_gradient(
    values: Values,
    gradient: Tensor,
    mask: DeviceMaskCode | None,
    written: Tensor,
    factors: tuple[Channels, Channels],
) -> None:
    """Backward's second pass: as ``normalised.write_input_gradient``."""
    of_value, of_gradient = factors
    given, out = in_memory_order(gradient), in_memory_order(written)
    with _pinned(mask) as planes:
        for part in values.parts(1):
            triton_norm.write_gradient(
                given, part, out, of_gradient.scale, affine_of(of_value), mask=planes
            )


def _pinned(mask: DeviceMaskCode | None) -> AbstractContextManager[DevicePlanes | None]:
    return nullcontext() if mask is None else mask.planes.pinned()
