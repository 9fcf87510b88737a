"""The native kernels as a backend: tensors in host memory, planes as a store's views of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from daf.core.code_format import ElementType, Predicate
from daf.core.policy import Method, Treatment
from daf.kernels import (
    ChannelAffine,
    ChannelSums,
    Emission,
    GradientFactors,
    NormGradient,
    PageFields,
    RangeStrategy,
    RowGradient,
    RowMoments,
    RunningMoments,
)
from daf.kernels.backend import Blocks, Values, element_type
from daf.kernels.cpu import channel_norm, paged, reductions, row_norm
from daf.kernels.normalisation import (
    Channels,
    Geometry,
    KeptValues,
    NormOutput,
    RowBackward,
    RunningStatistics,
    Statistics,
    Sums,
    VectorGradients,
)


class CpuBackend:
    """The backend of the processor, on all of PyTorch's threads; see :class:`Backend`."""

    def encode_values(
        self,
        source: Tensor,
        planes: Any,
        treatment: Treatment,
        key: int,
        channels: Channels | None,
        rows: RowMoments | None,
        output: NormOutput | None,
    ) -> None:
        """Encode in one pass over the source."""
        start, kind, fields = source.data_ptr(), element_type(source.dtype), planes.fields
        options = (torch.get_num_threads(), _affine(channels), _emission(output), rows)
        if treatment.method is Method.ROTATED:
            paged.encode_rotated(start, kind, fields, treatment.rounds, key, *options)
        else:
            paged.encode_minmax(start, kind, fields, key, *options)

    def decode_values(
        self,
        planes: Any,
        treatment: Treatment,
        key: int,
        out: Tensor,
        channels: Channels | None,
        mask: Any,
        accumulate: bool,
        blocks: Blocks,
    ) -> None:
        """Decode in one pass over the resident planes."""
        kind, threads = element_type(out.dtype), torch.get_num_threads()
        after = (_affine(channels), _fields(mask), accumulate, blocks)
        if treatment.method is Method.ROTATED:
            rounds, place = treatment.rounds, out.data_ptr()
            paged.decode_rotated(planes.fields, rounds, key, place, kind, threads, *after)
        else:
            paged.decode_minmax(planes.fields, out.data_ptr(), kind, threads, *after)

    def encode_steps(self, source: Tensor, planes: Any, key: int, to_steps: Channels) -> None:
        """See the protocol."""
        kind, threads = element_type(source.dtype), torch.get_num_threads()
        affine = to_steps.pointers()
        paged.encode_steps(source.data_ptr(), kind, planes.fields, key, threads, affine)

    def decode_steps(self, planes: Any, out: Tensor, from_steps: Channels) -> None:
        """See the protocol."""
        kind, threads = element_type(out.dtype), torch.get_num_threads()
        paged.decode_steps(planes.fields, out.data_ptr(), kind, threads, from_steps.pointers())

    def encode_mask(
        self, source: Tensor, planes: Any, predicate: Predicate, low: float, high: float
    ) -> None:
        """See the protocol."""
        start, kind = source.data_ptr(), element_type(source.dtype)
        threads = torch.get_num_threads()
        paged.encode_mask(start, kind, planes.fields, predicate, low, high, threads)

    def decode_mask(self, planes: Any, off_value: float, on_value: float, out: Tensor) -> None:
        """See the protocol."""
        target = (out.data_ptr(), element_type(out.dtype), torch.get_num_threads())
        paged.decode_mask(planes.fields, off_value, on_value, *target)

    def encode_derivative(self, source: Tensor, planes: Any, borders: Tensor) -> bool:
        """See the protocol."""
        start, kind = source.data_ptr(), element_type(source.dtype)
        threads = torch.get_num_threads()
        at = borders.data_ptr()
        return not paged.encode_derivative(start, kind, planes.fields, at, threads)

    def decode_derivative(self, planes: Any, levels: Tensor, out: Tensor) -> None:
        """See the protocol."""
        target = (out.data_ptr(), element_type(out.dtype), torch.get_num_threads())
        paged.decode_derivative(planes.fields, levels.data_ptr(), *target)

    def encode_integers(self, source: Tensor, planes: Any, base: int) -> None:
        """Write ``value - base``; unsigned bytes are read as signed ones, which loses nothing."""
        start, size = source.data_ptr(), source.element_size()
        paged.encode_integers(start, size, planes.fields, base, torch.get_num_threads())

    def decode_integers(self, planes: Any, base: int, out: Tensor) -> None:
        """See the protocol."""
        target = (out.data_ptr(), out.element_size(), torch.get_num_threads())
        paged.decode_integers(planes.fields, base, *target)

    def measure_ranges(
        self, items: Tensor, strategy: RangeStrategy, channels: int, inner: int
    ) -> tuple[Tensor, Tensor]:
        """See the protocol."""
        count, threads, cut = items.numel(), torch.get_num_threads(), (channels, inner, strategy)
        size_bytes = reductions.ranges_workspace_bytes(count, threads, *cut)
        workspace = torch.empty(max(1, size_bytes), dtype=torch.uint8)
        low, high = torch.empty((2, channels), dtype=torch.float32).unbind()
        source = (items.data_ptr(), element_type(items.dtype), count)
        places = (low.data_ptr(), high.data_ptr(), workspace.data_ptr())
        reductions.measure_ranges(*source, *places, threads, *cut)
        return low, high

    def channel_statistics(
        self, x: Tensor, geometry: Geometry, epsilon: float, running: RunningStatistics | None
    ) -> Statistics:
        """Measure in one pass over the input."""
        room, count = _Room(geometry), x.numel()
        threads = torch.get_num_threads()
        reductions.measure_sums(x.data_ptr(), ElementType.FLOAT32, count, room.where, threads)
        found = Statistics(*torch.empty(2, geometry.channels, dtype=torch.float32).unbind())
        followed = None
        if running is not None:
            places = (running.mean.data_ptr(), running.variance.data_ptr())
            followed = RunningMoments(*places, running.momentum)
        written = (found.mean.data_ptr(), found.inverse_deviation.data_ptr())
        per_channel = geometry.per_channel
        channel_norm.statistics_of_sums(room.where, per_channel, epsilon, *written, followed)
        return found

    def emit(
        self, x: Tensor, forward: Channels, output: NormOutput, rows: RowMoments | None
    ) -> None:
        """See the protocol."""
        emission, threads = _emission(output), torch.get_num_threads()
        assert emission is not None
        channel_norm.emit(x.data_ptr(), x.numel(), forward.pointers(), emission, threads, rows)

    def derive(
        self,
        x: Tensor,
        forward: Channels,
        out: Tensor,
        channels: Channels | None,
        mask: Any,
        accumulate: bool,
        blocks: Blocks,
    ) -> None:
        """See the protocol."""
        source = (x.data_ptr(), x.numel(), forward.pointers(), _affine(channels))
        threads, bits = torch.get_num_threads(), _fields(mask)
        channel_norm.derive(*source, out.data_ptr(), threads, bits, accumulate, blocks)

    def sum_gradient(
        self,
        values: Values,
        gradient: Tensor,
        mask: Any,
        written: Tensor | None,
        geometry: Geometry,
    ) -> Sums:
        """Sum in one pass, decoding only the current block."""
        room = _Room(geometry)
        places = (gradient.data_ptr(), _pointer(written))
        _backward(values, NormGradient(*places, sums=room.where, mask=_fields(mask)))
        return room.sums

    def gradient_factors(
        self,
        sums: Sums,
        geometry: Geometry,
        inverse_deviation: Tensor,
        gamma: Tensor | None,
        gradients: VectorGradients,
    ) -> tuple[Channels, Channels]:
        """See the protocol."""
        channels, inner, _ = geometry
        scale, shift, of_gradient = torch.empty(3, channels, dtype=torch.float32).unbind()
        vectors = (*sums, inverse_deviation, gamma, scale, shift, of_gradient, *gradients)
        places = GradientFactors(*map(_pointer, vectors))
        channel_norm.factors_of_sums(channels, geometry.per_channel, places)
        return Channels(scale, shift, inner), Channels(of_gradient, of_gradient, inner)

    def write_input_gradient(
        self,
        values: Values,
        gradient: Tensor,
        mask: Any,
        written: Tensor,
        factors: tuple[Channels, Channels],
    ) -> None:
        """Write in one pass, decoding only the current block."""
        of_value, of_gradient = (factor.pointers() for factor in factors)
        places = (gradient.data_ptr(), written.data_ptr())
        _backward(values, NormGradient(*places, of_value, of_gradient, mask=_fields(mask)))

    def backward_rows(self, values: Values, job: RowBackward) -> Sums | None:
        """Run backward in one pass, decoding only the current row."""
        threads, count = torch.get_num_threads(), job.gradient.numel()
        sums = Sums(*torch.empty(2, job.length, dtype=torch.float64)) if job.summing else None
        size_bytes = row_norm.workspace_bytes(count, job.length, threads)
        workspace = torch.empty(size_bytes, dtype=torch.uint8)
        gradient = RowGradient(
            job.length,
            job.centred,
            job.gradient.data_ptr(),
            _pointer(job.written),
            _pointer(job.gamma),
            job.scale.data_ptr(),
            0 if sums is None else sums.sums.data_ptr(),
            0 if sums is None else sums.products.data_ptr(),
            workspace.data_ptr(),
        )
        if isinstance(values, KeptValues):
            source, affine = values.x.data_ptr(), values.forward.pointers()
            row_norm.backward_kept(source, count, affine, gradient, threads)
        elif values.treatment.method is Method.ROTATED:
            code = (values.planes.fields, values.treatment.rounds, values.key)
            row_norm.backward_rotated(*code, gradient, threads)
        else:
            row_norm.backward_minmax(values.planes.fields, gradient, threads)
        return sums


class _Room:
    """Room for sums, and the kernel's workspace."""

    def __init__(self, geometry: Geometry) -> None:
        channels, inner, count = geometry
        threads = torch.get_num_threads()
        size_bytes = reductions.sums_workspace_bytes(count, threads, channels, inner)
        self._workspace = torch.empty(size_bytes, dtype=torch.uint8)
        self.sums = Sums(*torch.empty(2, channels, dtype=torch.float64).unbind())
        places = (part.data_ptr() for part in (*self.sums, self._workspace))
        self.where = ChannelSums(channels, inner, *places)


def _backward(values: Values, gradient: NormGradient) -> None:
    threads = torch.get_num_threads()
    if isinstance(values, KeptValues):
        source = (values.x.data_ptr(), values.x.numel(), values.forward.pointers())
        channel_norm.backward_kept(*source, gradient, threads)
    elif values.treatment.method is Method.ROTATED:
        code = (values.planes.fields, values.treatment.rounds, values.key)
        channel_norm.backward_rotated(*code, gradient, threads)
    else:
        channel_norm.backward_minmax(values.planes.fields, gradient, threads)


def _emission(output: NormOutput | None) -> Emission | None:
    """Return the output as addresses; keep its tensors alive while they are used."""
    if output is None:
        return None
    places = (output.out.data_ptr(), _pointer(output.addend))
    return Emission(*places, _affine(output.result), output.most, _fields(output.mask))


def _affine(channels: Channels | None) -> ChannelAffine | None:
    return None if channels is None else channels.pointers()


def _fields(planes: Any) -> PageFields | None:
    return None if planes is None else planes.fields


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
