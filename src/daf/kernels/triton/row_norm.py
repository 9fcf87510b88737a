"""Normalisations of rows on a GPU (format, section 11); KernelError outside the contract."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from daf.core.errors import KernelError
from daf.kernels import ROWS_PER_SPAN
from daf.kernels.cpu.checks import check_row_length
from daf.kernels.normalisation import Channels, Sums
from daf.kernels.triton import row_norm_kernels as device
from daf.kernels.triton.channel_norm import Values
from daf.kernels.triton.launch import affine_of, double_bits, on_device, patterns

_ROWS = 8
_COLUMNS = 128


def measure_rows(source: Tensor, affine: Channels, epsilon: float, *, centred: bool) -> None:
    """Write the affine that normalises rows of ``affine.inner`` elements."""
    elements, kind = patterns(source, source.numel())
    rows = _row_count(source, affine.inner)
    if rows != affine.scale.numel():
        raise KernelError(f"asked to measure {rows} rows into {affine.scale.numel()} places")
    on_device(
        device.row_affines,
        (-(-rows // _ROWS),),
        source.device,
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

    ``scale`` (rows,) is the rows' own. After all values are added, ``of_value`` is what
    ``channel_norm.write_gradient`` takes for them.
    """

    def __init__(
        self,
        gradient: Tensor,
        scale: Tensor,
        length: int,
        gamma: Tensor | None,
        *,
        centred: bool,
        summing: bool,
    ) -> None:
        rows = _row_count(gradient, length)
        if rows != scale.numel():
            raise KernelError(f"asked to go back through {rows} rows by {scale.numel()} scales")
        self._gradient = gradient
        self._scale = scale
        self.length = length
        self.span_blocks = length  # a span has as many rows as a block has elements
        self._gamma = gamma
        self._centred = centred
        factors: dict[str, Any] = {"dtype": torch.float32, "device": gradient.device}
        scales, shifts = torch.empty(2, rows, **factors).unbind()
        self.of_value = Channels(scales, shifts, length)
        shape = (2, -(-rows // ROWS_PER_SPAN), length)
        self._spans = torch.empty(shape, **factors) if summing else None

    def add(self, values: Values) -> None:
        """Add the rows of these values, whole spans of them."""
        count = self._gradient.numel()
        first, last = values.part(count)
        spans = values.spans(count, self.length * ROWS_PER_SPAN)
        elements, kind = patterns(self._gradient, count)
        common = values.arguments(count) | {
            "gradient": elements,
            "rows": last // self.length,
            "length": self.length,
            "TYPE": kind,
        }
        on_device(
            device.row_factors,
            (-(-((last - first) // self.length) // _ROWS),),
            self._gradient.device,
            **common,
            of_value=affine_of(self.of_value),
            own_scale=self._scale,
            gamma=self._gamma,
            first_row=first // self.length,
            CENTRED=self._centred,
            ROWS=_ROWS,
        )
        if self._spans is not None:
            on_device(
                device.column_span_sums,
                (spans[1] - spans[0], -(-self.length // _COLUMNS)),
                self._gradient.device,
                **common,
                sums=self._spans[0],
                products=self._spans[1],
                first_span=spans[0],
                SPAN_ROWS=ROWS_PER_SPAN,
                COLUMNS=_COLUMNS,
            )

    def columns(self) -> Sums | None:
        """Return sums along the rows, (length,) each; None unless summing."""
        if self._spans is None:
            return None
        shape = (2, self.length)
        out = torch.empty(shape, dtype=torch.float64, device=self._gradient.device)
        for spans, total in zip(self._spans, out, strict=True):
            on_device(
                device.add_spans,
                (-(-self.length // _COLUMNS),),
                out.device,
                span_sums=spans,
                out=total,
                spans=spans.shape[0],
                length=self.length,
                COLUMNS=_COLUMNS,
            )
        return Sums(*torch.where(out.isnan(), math.nan, out))


def _row_count(tensor: Tensor, length: int) -> int:
    check_row_length(tensor.numel(), length)
    return tensor.numel() // length
