"""Normalisations on a GPU: forward around a code, backward from one (format, sections 10 and 11).

Elements are contiguous float32, bfloat16 or float16 in memory order; the latter two computed in
float32, rounded once. Nothing waits for the device; functions raise KernelError for other uses.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from daf.core.code_format import BLOCK_ELEMENTS
from daf.core.errors import KernelError
from daf.kernels import ROWS_PER_SPAN
from daf.kernels import normalisation as norms
from daf.kernels.cpu.checks import check_row_length
from daf.kernels.triton import norm_kernels as device
from daf.kernels.triton.launch import (
    affine_of,
    double_bits,
    elements_in,
    launch,
    mask_words,
    on_device,
    patterns,
)
from daf.kernels.triton.planes import DevicePlanes
from daf.kernels.triton.reductions import SpanSums, span_elements

_COLUMNS = 128
_ROWS = 8


class Values(NamedTuple):
    """Normalised values of ``blocks`` [first, last): float32, or ``affine`` of the whole input."""

    content: Tensor
    blocks: tuple[int, int]
    affine: norms.Channels | None = None

    def part(self, count: int) -> tuple[int, int]:
        """Return the (first, last) elements of the blocks, of a tensor of ``count``."""
        first, last = self.blocks
        return first * BLOCK_ELEMENTS, min(last * BLOCK_ELEMENTS, count)

    def spans(self, count: int, span: int) -> tuple[int, int]:
        """Return the numbers of these spans [first, last) of ``span``; KernelError unless whole."""
        first, last = self.part(count)
        if first % span or (last % span and last != count):
            raise KernelError(f"asked to add elements {first} to {last}; spans have {span}")
        return first // span, -(-last // span)

    def arguments(self, count: int) -> dict[str, Any]:
        """Return the kernels' arguments."""
        first, last = self.part(count) if self.affine is None else (0, count)
        content, kind = patterns(self.content, last - first)
        places = {"values": content, "first_value": first}
        return places | {"VALUE_TYPE": kind, "affine": affine_of(self.affine)}


def emit(source: Tensor, forward: norms.Channels, output: norms.NormOutput) -> None:
    """Write ``output`` of the values ``forward`` of the source."""
    count, addend, most = source.numel(), output.addend, output.most
    elements, kind = patterns(source, count)
    launch(
        device.emit,
        count,
        source=elements,
        destination=_of_kind(output.out, kind, count),
        addend=None if addend is None else _of_kind(addend, kind, count),
        mask=mask_words(output.mask, count),
        affine=affine_of(forward),
        result=affine_of(output.result),
        most=math.nan if most == math.inf else float(most),
        TYPE=kind,
    )


def derive(source: Tensor, forward: norms.Channels, decoding: norms.Decoding) -> None:
    """Write ``emit``'s result again, of ``blocks`` or all; accumulate, then apply its mask."""
    out, result, mask, accumulate, blocks = decoding
    count = source.numel()
    elements, kind = patterns(source, count)
    asked = elements_in(blocks, count)
    launch(
        device.derive,
        asked,
        first_block=blocks[0] if blocks else 0,
        source=elements,
        destination=_of_kind(out, kind, asked),
        mask=mask_words(mask, count),
        affine=affine_of(forward),
        result=affine_of(result),
        TYPE=kind,
        ACCUMULATE=accumulate,
    )


class ChannelProducts(SpanSums):
    """Sums of the masked gradient, and of its products with the values, span by span."""

    def __init__(self, gradient: Tensor, channels: int, inner: int) -> None:
        super().__init__(gradient, channels, inner)
        self.span_blocks = span_elements(channels) // BLOCK_ELEMENTS

    def add(self, values: Values, mask: DevicePlanes | None) -> None:
        """Add the spans of these values."""
        spans = values.spans(self._count, span_elements(self._channels))
        self.add_spans(spans, mask_words(mask, self._count), values.arguments(self._count))


def write_gradient(
    gradient: Tensor,
    values: Values,
    destination: Tensor,
    of_gradient: Tensor,
    of_value: norms.Channels,
    *,
    mask: DevicePlanes | None = None,
    gamma: Tensor | None = None,
) -> None:
    """Write ``g * of_gradient[c] + of_value(v)`` in the blocks of ``values``.

    g is the masked gradient, times ``gamma`` (length,) along its row; ``of_gradient`` is
    (channels,) float32. ``destination`` may be ``gradient``.
    """
    count = gradient.numel()
    elements, kind = patterns(gradient, count)
    first, last = values.part(count)
    launch(
        device.write_gradient,
        last - first,
        first_block=values.blocks[0],
        gradient=elements,
        destination=_of_kind(destination, kind, count),
        gamma=gamma,
        gamma_channels=1 if gamma is None else gamma.numel(),
        of_gradient=of_gradient,
        of_value=affine_of(of_value),
        mask=mask_words(mask, count),
        TYPE=kind,
        **values.arguments(count),
    )


def channel_statistics(
    sums: norms.Sums, count: int, epsilon: float, followed: norms.RunningStatistics | None
) -> norms.Statistics:
    """Return the statistics of sums and sums of squares; ``followed`` follow in place."""
    channels = sums.sums.numel()
    found = norms.Statistics(*_vectors(2, sums))
    running, variance, momentum = followed or (None, None, 0.0)
    on_device(
        device.channel_statistics,
        (-(-channels // _COLUMNS),),
        sums=sums.sums,
        squares=sums.products,
        **found._asdict(),
        running_mean=running,
        running_variance=variance,
        count=count,
        epsilon=double_bits(epsilon),
        momentum=double_bits(momentum),
        bessel=double_bits(count / (count - 1) if followed else 1.0),
        kept=1.0 - momentum,
        channels=channels,
        COLUMNS=_COLUMNS,
    )
    return found


def channel_factors(
    sums: norms.Sums,
    geometry: norms.Geometry,
    inverse_deviation: Tensor,
    gamma: Tensor | None,
    gradients: norms.VectorGradients,
) -> norms.Factors:
    """Return the factors of ``write_gradient``; write gradients of gamma and beta."""
    channels, inner, _ = geometry
    of_value, offset, of_gradient = _vectors(3, sums)
    on_device(
        device.channel_factors,
        (-(-channels // _COLUMNS),),
        **sums._asdict(),
        inverse_deviation=inverse_deviation,
        gamma=gamma,
        of_value=of_value,
        offset=offset,
        of_gradient=of_gradient,
        weight=gradients[0],
        bias=gradients[1],
        count=geometry.per_channel,
        channels=channels,
        COLUMNS=_COLUMNS,
    )
    return norms.Channels(of_value, offset, inner), norms.Channels(of_gradient, of_gradient, inner)


def measure_rows(source: Tensor, affine: norms.Channels, epsilon: float, *, centred: bool) -> None:
    """Write the affine that normalises rows of ``affine.inner`` elements."""
    elements, kind = patterns(source, source.numel())
    rows = _row_count(source, affine.inner)
    if rows != affine.scale.numel():
        raise KernelError(f"asked to measure {rows} rows into {affine.scale.numel()} places")
    on_device(
        device.row_affines,
        (-(-rows // _ROWS),),
        source=elements,
        scale=affine.scale,
        shift=affine.shift,
        rows=rows,
        length=affine.inner,
        epsilon=double_bits(epsilon),
        TYPE=kind,
        CENTRED=centred,
        ROWS=_ROWS,
    )


class RowProducts:
    """Backward's sums of gradient and values of a row normalisation, span of rows by span of rows.

    The job's tensors are flat. Once all values are added, ``of_value`` is ``write_gradient``'s.
    """

    def __init__(self, job: norms.RowBackward) -> None:
        rows, found = _row_count(job.gradient, job.length), job.scale.numel()
        if rows != found:
            raise KernelError(f"asked to go back through {rows} rows by {found} scales")
        self._job = job
        self.span_blocks = job.length  # a span has as many rows as a block has elements
        factors: dict[str, Any] = {"dtype": torch.float32, "device": job.gradient.device}
        scales, shifts = torch.empty(2, rows, **factors).unbind()
        self.of_value = norms.Channels(scales, shifts, job.length)
        shape = (2, -(-rows // ROWS_PER_SPAN), job.length)
        self._spans = torch.empty(shape, **factors) if job.summing else None

    def add(self, values: Values) -> None:
        """Add the rows of these values, whole spans of them."""
        gradient, length = self._job.gradient, self._job.length
        count = gradient.numel()
        first, last = values.part(count)
        spans = values.spans(count, length * ROWS_PER_SPAN)
        elements, kind = patterns(gradient, count)
        rows = {"gradient": elements, "rows": last // length, "length": length, "TYPE": kind}
        common = values.arguments(count) | rows
        on_device(
            device.row_factors,
            (-(-((last - first) // length) // _ROWS),),
            **common,
            of_value=affine_of(self.of_value),
            own_scale=self._job.scale,
            gamma=self._job.gamma,
            first_row=first // length,
            CENTRED=self._job.centred,
            ROWS=_ROWS,
        )
        if self._spans is not None:
            on_device(
                device.column_span_sums,
                (spans[1] - spans[0], -(-length // _COLUMNS)),
                **common,
                sums=self._spans[0],
                products=self._spans[1],
                first_span=spans[0],
                SPAN_ROWS=ROWS_PER_SPAN,
                COLUMNS=_COLUMNS,
            )

    def columns(self) -> norms.Sums | None:
        """Return sums along the rows, (length,) each; None unless summing."""
        if self._spans is None:
            return None
        length = self._job.length
        out = torch.empty(2, length, dtype=torch.float64, device=self._spans.device)
        for spans, total in zip(self._spans, out, strict=True):
            on_device(
                device.add_spans,
                (-(-length // _COLUMNS),),
                span_sums=spans,
                out=total,
                spans=spans.shape[0],
                length=length,
                COLUMNS=_COLUMNS,
            )
        return norms.Sums(*torch.where(out.isnan(), math.nan, out))


def _vectors(number: int, sums: norms.Sums) -> tuple[Tensor, ...]:
    shape, device = (number, sums.sums.numel()), sums.sums.device
    return torch.empty(shape, dtype=torch.float32, device=device).unbind()


def _of_kind(tensor: Tensor, kind: int, count: int) -> Tensor:
    elements, own = patterns(tensor, count)
    if own != kind:
        raise KernelError(f"asked for a result in {tensor.dtype}; give the input's own type")
    return elements


def _row_count(tensor: Tensor, length: int) -> int:
    check_row_length(tensor.numel(), length)
    return tensor.numel() // length
