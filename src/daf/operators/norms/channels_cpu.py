"""A normalisation over memory order: statistics, forward with or without a code, backward.

Tensors are dense float32 on the CPU. Element i of the memory belongs to channel
``(i // inner) % channels``. Normalised values come from a code, block by block
(:class:`CodedValues`), or from the input itself (:class:`KeptValues`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from daf.codecs.cpu import Channels, MaskCode, ValueCode, check_count, elements_in
from daf.core.code_format import ElementType
from daf.core.policy import Method, Treatment
from daf.kernels import (
    ChannelSums,
    Emission,
    GradientFactors,
    NormGradient,
    PageFields,
    RunningMoments,
)
from daf.kernels.cpu import channel_norm, reductions


class Sums(NamedTuple):
    """(channels,) float64 each: sums, and sums of squares or of products."""

    sums: Tensor
    products: Tensor


class Geometry(NamedTuple):
    """Which channel an element belongs to, and how many elements each channel has."""

    channels: int
    inner: int
    elements: int

    @property
    def per_channel(self) -> int:
        """Elements of one channel."""
        return self.elements // self.channels


class RunningStatistics(NamedTuple):
    """Running statistics, contiguous (channels,) float32, and how fast they follow."""

    mean: Tensor
    variance: Tensor
    momentum: float


class Statistics(NamedTuple):
    """(channels,) float32 each, as the forward pass used them."""

    mean: Tensor
    inverse_deviation: Tensor

    def forward(self, inner: int) -> Channels:
        """The input to the normalised value."""
        return Channels(self.inverse_deviation, -self.mean * self.inverse_deviation, inner)


class Values(Protocol):
    """Where normalised values come from."""

    def run(self, gradient: NormGradient) -> None:
        """One pass of backward over them."""


class CodedValues(NamedTuple):
    """The values of a code; nothing is decoded but the block at hand."""

    code: ValueCode

    def run(self, gradient: NormGradient) -> None:
        """One pass of backward over them."""
        threads, treatment = torch.get_num_threads(), self.code.treatment
        with self.code.planes.pinned() as view:
            if treatment.method is Method.ROTATED:
                rounds, key = treatment.rounds, self.code.key
                channel_norm.backward_rotated(view.fields, rounds, key, gradient, threads)
            else:
                channel_norm.backward_minmax(view.fields, gradient, threads)


class KeptValues(NamedTuple):
    """``forward`` of the input, computed anew."""

    x: Tensor
    forward: Channels

    def run(self, gradient: NormGradient) -> None:
        """One pass of backward over them."""
        source, threads = self.x.data_ptr(), torch.get_num_threads()
        channel_norm.backward_kept(
            source, self.x.numel(), self.forward.pointers(), gradient, threads
        )


class ComputedValues:
    """The values of an input that is held anyway, computed again by whoever reads them.

    To recipes they are a code that has every bit and takes no bytes. ``read`` returns the input.
    """

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
        mask: MaskCode | None = None,
        accumulate: bool = False,
        blocks: tuple[int, int] | None = None,
    ) -> None:
        """Write them, bit for bit as ``emit`` did; the rest is as in ``ValueCode.decode``."""
        check_count(self.count if blocks is None else elements_in(blocks, self.count), out)
        if mask is None:
            self._derive(out, channels, None, accumulate, blocks)
            return
        with mask.planes.pinned() as view:
            self._derive(out, channels, view.fields, accumulate, blocks)

    def _derive(
        self,
        out: Tensor,
        channels: Channels | None,
        mask: PageFields | None,
        accumulate: bool,
        blocks: tuple[int, int] | None,
    ) -> None:
        x = self._read()
        affine = channels.pointers() if channels else None
        place, threads = out.data_ptr(), torch.get_num_threads()
        source = (x.data_ptr(), self.count, self._forward.pointers())
        channel_norm.derive(*source, affine, place, threads, mask, accumulate, blocks)


def take_statistics(
    x: Tensor, geometry: Geometry, epsilon: float, running: RunningStatistics | None
) -> Statistics:
    """Mean and inverse deviation of every channel, in one pass; running ones follow in place."""
    room = _Room(geometry)
    kind, threads = ElementType.FLOAT32, torch.get_num_threads()
    reductions.measure_sums(x.data_ptr(), kind, x.numel(), room.where, threads)
    mean, inverse_deviation = torch.empty(2, geometry.channels, dtype=torch.float32).unbind()
    followed = None
    if running is not None:
        torch.autograd.graph.increment_version((running.mean, running.variance))
        followed = RunningMoments(
            running.mean.data_ptr(), running.variance.data_ptr(), running.momentum
        )
    places = mean.data_ptr(), inverse_deviation.data_ptr()
    channel_norm.statistics_of_sums(room.where, geometry.per_channel, epsilon, *places, followed)
    return Statistics(mean, inverse_deviation)


def emission(
    out: Tensor,
    result: Channels | None,
    addend: Tensor | None,
    mask: MaskCode | None,
    most: float = math.inf,
) -> Emission:
    """What to write while values are read; keep every argument alive until that is done.

    Args:
        out: dense, written: ``result`` of the values, plus ``addend``, through ReLU if there is
            a mask.
        result: gamma and beta; None: neither.
        addend: in the layout of ``out``, or None.
        mask: yet unwritten; its bits are set where ReLU lets through.
        most: what ReLU lets through at most, with a mask.
    """
    return Emission(
        out.data_ptr(),
        addend.data_ptr() if addend is not None else 0,
        result.pointers() if result is not None else None,
        mask.planes.view.fields if mask is not None else None,
        most,
    )


def emit(x: Tensor, forward: Channels, written: Emission) -> None:
    """Forward without a code."""
    channel_norm.emit(x.data_ptr(), x.numel(), forward.pointers(), written, torch.get_num_threads())


def sum_gradient(
    values: Values,
    gradient: Tensor,
    mask: MaskCode | None,
    written: Tensor | None,
    geometry: Geometry,
) -> Sums:
    """Backward's first pass: sums of the masked gradient and of its products with the values.

    ``written`` receives the masked gradient; it may be ``gradient`` itself.
    """
    room = _Room(geometry)
    destination = written.data_ptr() if written is not None else 0
    _run(values, NormGradient(gradient.data_ptr(), destination, sums=room.where), mask)
    return room.sums


def take_factors(
    sums: Sums,
    geometry: Geometry,
    inverse_deviation: Tensor,
    gamma: Tensor | None,
    gradients: tuple[Tensor | None, Tensor | None],
) -> tuple[Channels, Channels]:
    """What backward's second pass multiplies values and gradient by, from the first one's sums.

    ``gradients`` of gamma and beta, (channels,) float32, are written; None: not asked for.
    """
    scale, shift, of_gradient = torch.empty(3, geometry.channels, dtype=torch.float32).unbind()
    read = (*sums, inverse_deviation, gamma)
    written = (scale, shift, of_gradient, *gradients)
    places = (0 if each is None else each.data_ptr() for each in (*read, *written))
    channel_norm.factors_of_sums(geometry.channels, geometry.per_channel, GradientFactors(*places))
    inner = geometry.inner
    return Channels(scale, shift, inner), Channels(of_gradient, of_gradient, inner)


def write_input_gradient(
    values: Values,
    gradient: Tensor,
    mask: MaskCode | None,
    written: Tensor,
    factors: tuple[Channels, Channels],
) -> None:
    """Backward's second pass: ``written = masked gradient * b.scale + a(values)``.

    ``factors`` are (a, b); ``written`` may be ``gradient`` itself.
    """
    of_value, of_gradient = (factor.pointers() for factor in factors)
    at = (gradient.data_ptr(), written.data_ptr())
    _run(values, NormGradient(*at, of_value, of_gradient), mask)


def _run(values: Values, gradient: NormGradient, mask: MaskCode | None) -> None:
    if mask is None:
        values.run(gradient)
        return
    with mask.planes.pinned() as view:
        values.run(gradient._replace(mask=view.fields))


class _Room:
    """Where sums are written, and what the kernel works in meanwhile."""

    def __init__(self, geometry: Geometry) -> None:
        channels, inner, count = geometry
        threads = torch.get_num_threads()
        both = torch.empty(2, channels, dtype=torch.float64)
        size = reductions.sums_workspace_bytes(count, threads, channels, inner)
        self._workspace = torch.empty(size, dtype=torch.uint8)
        self.sums = Sums(both[0], both[1])
        places = (part.data_ptr() for part in (both[0], both[1], self._workspace))
        self.where = ChannelSums(channels, inner, *places)
