"""The native kernels as a backend: tensors in host memory, planes as a store's views of them."""

from typing import Any

import torch
from torch import Tensor

import daf._native as _native
from daf import kernels
from daf.core.code_format import ElementType
from daf.core.code_tables import DERIVATIVE_PIECES
from daf.kernels import normalisation as norms
from daf.kernels.backend import Backend, element_type
from daf.kernels.cpu import codecs, reductions
from daf.kernels.cpu.checks import checked_table
from daf.kernels.cpu.job import Job, fields_of


class CpuBackend(Backend):
    """The backend of the processor, on all of PyTorch's threads.

    Each job is one pass over source or planes; backward decodes only the current block or row.
    """

    def encode_values(self, code: norms.CodedValues, encoding: norms.Encoding) -> bool:
        return codecs.encode(code.codec, _reading(encoding, **_coded(code)))

    def decode_values(self, code: norms.CodedValues, decoding: norms.Decoding) -> None:
        codecs.decode(code.codec, _writing(decoding, code.elements, **_coded(code)))

    def encode_elements(self, source: Tensor, planes: Any, code: norms.ElementCode) -> bool:
        if code.codec is kernels.Codec.DERIVATIVE:
            checked_table("lines' numbers", code.table, 3 * DERIVATIVE_PIECES - 1)
        job = _of_elements(source, planes.fields, code)
        job = job._replace(source=source.data_ptr(), affine=code.channels)
        return not codecs.encode(code.codec, job)

    def decode_elements(self, planes: Any, out: Tensor, code: norms.ElementCode) -> None:
        if code.codec is kernels.Codec.DERIVATIVE:
            checked_table("levels", code.table, 2**planes.fields.bits)
        job = _of_elements(out, planes.fields, code)
        job = job._replace(destination=out.data_ptr(), after=code.channels)
        codecs.decode(code.codec, job)

    def measure_ranges(
        self, items: Tensor, strategy: kernels.RangeStrategy, channels: int, inner: int
    ) -> tuple[Tensor, Tensor]:
        count, threads = items.numel(), torch.get_num_threads()
        size_bytes = reductions.ranges_workspace_bytes(count, threads, channels, inner, strategy)
        workspace = torch.empty(max(1, size_bytes), dtype=torch.uint8)
        low, high = torch.empty((2, channels), dtype=torch.float32).unbind()
        job = Job(threads, count, element_type(items.dtype), items.data_ptr(), workspace=workspace)
        job = job._replace(geometry=norms.Geometry(channels, inner, count))
        reductions.measure_ranges(job, low, high, strategy)
        return low, high

    def channel_statistics(
        self,
        x: Tensor,
        geometry: norms.Geometry,
        epsilon: float,
        running: norms.RunningStatistics | None,
    ) -> norms.Statistics:
        """Measure in one pass over the input.

        The variance ``max(squares / count - mean², 0)`` is float64's. Its relative error is about
        2⁻⁵² · (1 + mean² / variance) times the longest chain of additions: of float32's 24 bits
        none is lost to cancellation.
        """
        room = _room_for_sums(geometry)
        codecs.read(Job(torch.get_num_threads(), x.numel(), source=x.data_ptr(), **room))
        found = norms.Statistics(*torch.empty(2, geometry.channels, dtype=torch.float32).unbind())
        shape = (geometry.channels, geometry.per_channel)
        _native.statistics_of_sums(*shape, epsilon, (*room["sums"], *found), running)
        return found

    def emit(self, encoding: norms.Encoding) -> None:
        codecs.read(_reading(encoding))

    def derive(self, values: norms.KeptValues, decoding: norms.Decoding) -> None:
        x, forward = values
        codecs.copy(_writing(decoding, x.numel(), source=x.data_ptr(), affine=forward))

    def sum_gradient(
        self, values: norms.Values, given: norms.MaskedGradient, geometry: norms.Geometry
    ) -> norms.Sums:
        room = _room_for_sums(geometry)
        _read_values(values, gradient=given, **room)
        sums: norms.Sums = room["sums"]
        return sums

    def gradient_factors(
        self,
        sums: norms.Sums,
        geometry: norms.Geometry,
        inverse_deviation: Tensor,
        gamma: Tensor | None,
        gradients: norms.VectorGradients,
    ) -> norms.Factors:
        channels, inner, _ = geometry
        scale, shift, of_gradient = torch.empty(3, channels, dtype=torch.float32).unbind()
        vectors = (*sums, inverse_deviation, gamma, scale, shift, of_gradient, *gradients)
        _native.factors_of_sums(channels, geometry.per_channel, vectors)
        return norms.Channels(scale, shift, inner), norms.Channels(of_gradient, of_gradient, inner)

    def write_input_gradient(
        self, values: norms.Values, given: norms.MaskedGradient, factors: norms.Factors
    ) -> None:
        of_value, of_gradient = factors
        _read_values(values, gradient=given, of_value=of_value, of_gradient=of_gradient)

    def backward_rows(self, values: norms.Values, job: norms.RowBackward) -> norms.Sums | None:
        threads, count = torch.get_num_threads(), job.gradient.numel()
        sums = norms.Sums(*torch.empty(2, job.length, dtype=torch.float64)) if job.summing else None
        size_bytes = reductions.rows_workspace_bytes(count, job.length, threads)
        workspace = torch.empty(size_bytes, dtype=torch.uint8)
        _read_values(values, row_gradient=job, sums=sums, workspace=workspace)
        return sums


def _room_for_sums(geometry: norms.Geometry) -> dict[str, Any]:
    channels, inner, count = geometry
    threads = torch.get_num_threads()
    size_bytes = reductions.sums_workspace_bytes(count, threads, channels, inner)
    return {
        "sums": norms.Sums(*torch.empty(2, channels, dtype=torch.float64).unbind()),
        "geometry": geometry,
        "workspace": torch.empty(size_bytes, dtype=torch.uint8),
    }


# Jobs hold addresses: keep the tensors alive while one runs.
def _reading(encoding: norms.Encoding, **options: Any) -> Job:
    source, channels, rows, output = encoding
    return Job(
        *(torch.get_num_threads(), source.numel(), element_type(source.dtype), source.data_ptr()),
        affine=channels,
        rows=rows,
        emission=output,
        **options,
    )


def _writing(decoding: norms.Decoding, elements: int, **options: Any) -> Job:
    out, channels, mask, accumulate, blocks = decoding
    return Job(
        *(torch.get_num_threads(), elements, element_type(out.dtype)),
        destination=out.data_ptr(),
        after=channels,
        accumulate=accumulate,
        blocks=blocks,
        mask=fields_of(mask),
        **options,
    )


def _coded(code: norms.CodedValues) -> dict[str, Any]:
    return {"pages": code.planes.fields, "key": code.key}


def _of_elements(items: Tensor, pages: kernels.PageFields, code: norms.ElementCode) -> Job:
    """Return the job without places; unsigned bytes count as signed ones, which loses nothing."""
    is_float = code.codec is not kernels.Codec.INTEGERS
    kind = element_type(items.dtype) if is_float else ElementType.FLOAT32
    return Job(
        *(torch.get_num_threads(), items.numel(), kind),
        pages=pages,
        key=code.key,
        predicate=code.predicate,
        low=code.low,
        high=code.high,
        table=0 if code.table is None else code.table.data_ptr(),
        item_bytes=items.element_size(),
        base=code.base,
    )


def _read_values(values: norms.Values, **gradient: Any) -> None:
    """Run a pass of backward, a ``gradient`` or ``row_gradient``, over values."""
    if isinstance(values, norms.KeptValues):
        codecs.copy(_reading(norms.Encoding(*values), **gradient))
    else:
        job = Job(torch.get_num_threads(), values.elements, **_coded(values), **gradient)
        codecs.decode(values.codec, job)
