"""Normalisations on a GPU: forward around a code, backward from one (format, sections 10, 11).

Elements are contiguous float32, bfloat16 or float16 in memory order; of the latter two, what is
computed between them is float32, and one rounding ends it. Normalised values are
:class:`Values`: float32 of some whole blocks, or an affine of the input. Nothing waits for the
device; each function raises KernelError outside its contract.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from daf.errors import KernelError
from daf.kernels import BLOCK_ELEMENTS, ROWS_PER_SPAN
from daf.kernels import gpu_norm_device as device
from daf.kernels.contract import check_channels
from daf.kernels.gpu_launch import (
    Affine,
    elements_in,
    launch,
    mask_arguments,
    on_device,
    patterns,
)
from daf.kernels.gpu_planes import DevicePlanes
from daf.kernels.gpu_reduce import (
    are_side_by_side,
    divided,
    fold_spans,
    run_options,
    side_by_side_grid,
    side_by_side_options,
    span_elements,
    span_shape,
)

_ROWS = 8
_COLUMNS = 128


class Values(NamedTuple):
    """Normalised values of ``blocks`` [first, last) of a tensor.

    ``content`` holds them in float32, and those alone; or, with ``affine``, it is the whole
    input, of which they are the affine.
    """

    content: Tensor
    blocks: tuple[int, int]
    affine: Affine | None = None

    @property
    def first(self) -> int:
        """Number of the element that ``content`` begins with."""
        return 0 if self.affine is not None else self.blocks[0] * BLOCK_ELEMENTS

    def part(self, count: int) -> tuple[int, int]:
        """(first, last) elements of the blocks, of a tensor of ``count``."""
        first, last = self.blocks
        return first * BLOCK_ELEMENTS, min(last * BLOCK_ELEMENTS, count)

    def arguments(self, count: int) -> dict[str, Any]:
        """The kernels' arguments."""
        first, last = self.part(count)
        held = count if self.affine is not None else last - first
        content, kind = patterns(self.content, held)
        scale, shift = (self.affine.scale, self.affine.shift) if self.affine else (None, None)
        return {
            "values": content,
            "first_value": self.first,
            "VALUE_TYPE": kind,
            "AFFINE": self.affine is not None,
            "scale": scale,
            "shift": shift,
        }


# --- forward --------------------------------------------------------------------------------


def emit(
    source: Tensor,
    forward: Affine,
    destination: Tensor,
    result: Affine | None = None,
    addend: Tensor | None = None,
    mask: DevicePlanes | None = None,
    most: float = math.inf,
) -> None:
    """``result`` of the normalised values, plus ``addend``; with ``mask``, through ReLU.

    That lets pass ``most`` at most. ``destination`` may be ``source``.
    """
    elements, kind = patterns(source, source.numel())
    written = _of_kind(destination, kind, source.numel())
    added = None if addend is None else _of_kind(addend, kind, source.numel())
    places = mask_arguments(mask, source.numel())
    launch(
        device.emit,
        source.numel(),
        source.device,
        source=elements,
        destination=written,
        addend=added,
        region=places["mask_region"],
        table=places["mask_table"],
        runs=places["mask_runs"],
        page_words=places["mask_page_words"],
        most=math.nan if most == math.inf else float(most),
        TYPE=kind,
        ADDED=addend is not None,
        RECTIFIED=mask is not None,
        PAGED=places["MASKED"] == 2,
        **_affines(forward, result),
    )


def derive(
    source: Tensor,
    forward: Affine,
    destination: Tensor,
    result: Affine | None = None,
    mask: DevicePlanes | None = None,
    accumulate: bool = False,
    blocks: tuple[int, int] | None = None,
) -> None:
    """``emit``'s result again, of ``blocks`` [first, last), or of all.

    ``accumulate`` adds what ``destination`` holds, then the mask that ``emit`` wrote zeroes.
    """
    count = source.numel()
    elements, kind = patterns(source, count)
    asked = elements_in(blocks, count)
    places = mask_arguments(mask, count)
    launch(
        device.derive,
        asked,
        source.device,
        first_block=blocks[0] if blocks else 0,
        source=elements,
        destination=_of_kind(destination, kind, asked),
        region=places["mask_region"],
        table=places["mask_table"],
        runs=places["mask_runs"],
        page_words=places["mask_page_words"],
        TYPE=kind,
        ACCUMULATE=accumulate,
        MASKED=places["MASKED"],
        **_affines(forward, result),
    )


# --- backward, by channels ------------------------------------------------------------------


class ChannelProducts:
    """Sums of the masked gradient, and of its products with the values, span by span."""

    def __init__(self, gradient: Tensor, channels: int, inner: int) -> None:
        check_channels(channels, inner)
        self._gradient = gradient
        self._channels = channels
        # Of one channel all elements are neighbours, however they lie.
        self._inner = gradient.numel() if channels == 1 else inner
        self.span_blocks = span_elements(channels) // BLOCK_ELEMENTS
        self._rows = torch.zeros(
            (2, *span_shape(gradient.numel(), channels)),
            dtype=torch.float64,
            device=gradient.device,
        )

    def add(self, values: Values, mask: DevicePlanes | None) -> None:
        """The spans of these values.

        Raises:
            KernelError: they are no whole spans.
        """
        count, channels, inner = self._gradient.numel(), self._channels, self._inner
        first, last = values.part(count)
        span = span_elements(channels)
        if first % span or (last % span and last != count):
            raise KernelError(f"asked to add elements {first} to {last}; spans have {span}")
        elements, kind = patterns(self._gradient, count)
        spans, where = -(-(last - first) // span), self._gradient.device
        common = {
            "gradient": elements,
            "sums": self._rows[0],
            "products": self._rows[1],
            "count": count,
            "first_span": first // span,
            "TYPE": kind,
            **values.arguments(count),
            **mask_arguments(mask, count),
        }
        if are_side_by_side(channels, inner):
            options = side_by_side_options(spans, channels)
            grid: tuple[int, ...] = side_by_side_grid(spans, channels)
            on_device(device.side_by_side_products, grid, where, **common, **options)
        else:
            runs = run_options(channels, inner)
            grid = (spans * runs["tiles"],)
            on_device(device.channel_span_products, grid, where, **common, **runs)

    def totals(self) -> tuple[Tensor, Tensor]:
        """(channels,) float64 each: sums, and sums of products."""
        return fold_spans(self._rows)


def write_gradient(
    gradient: Tensor,
    values: Values,
    destination: Tensor,
    of_gradient: Tensor,
    of_value: Affine,
    *,
    mask: DevicePlanes | None = None,
    gamma: Tensor | None = None,
) -> None:
    """``g * of_gradient[c] + of_value(v)`` in the blocks of ``values``.

    g is the masked gradient, times ``gamma`` (length,) along its row; ``of_gradient`` is
    (channels,) float32. ``destination`` may be ``gradient``.
    """
    count = gradient.numel()
    elements, kind = patterns(gradient, count)
    first, last = values.part(count)
    launch(
        device.write_gradient,
        last - first,
        gradient.device,
        first_block=values.blocks[0],
        gradient=elements,
        destination=_of_kind(destination, kind, count),
        gamma=gamma,
        gamma_channels=1 if gamma is None else gamma.numel(),
        of_gradient=of_gradient,
        of_value=of_value.scale,
        offset=of_value.shift,
        channels=of_value.scale.numel(),
        inner=of_value.inner,
        TYPE=kind,
        GAMMA=gamma is not None,
        **values.arguments(count),
        **mask_arguments(mask, count),
    )


# --- rows -----------------------------------------------------------------------------------


def row_sums(source: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """(rows,) float64 each: sums and sums of squares of rows of ``length`` elements."""
    elements, kind = patterns(source, source.numel())
    rows = _row_count(source, length)
    sums, squares = torch.empty(2, rows, dtype=torch.float64, device=source.device).unbind()
    on_device(
        device.row_sums,
        (-(-rows // _ROWS),),
        source.device,
        source=elements,
        sums=sums,
        squares=squares,
        rows=rows,
        length=length,
        TYPE=kind,
        ROWS=_ROWS,
    )
    return sums, squares


def measure_rows(source: Tensor, affine: Affine, epsilon: float, *, centred: bool) -> None:
    """Write what makes normalised values of rows of ``affine.inner`` elements."""
    length = affine.inner
    sums, squares = row_sums(source, length)
    square = divided(squares, length)
    if not centred:
        affine.scale.copy_(1.0 / torch.sqrt(square + epsilon))
        affine.shift.zero_()
        return
    mean = divided(sums, length)
    variance = square - mean * mean
    inverse = 1.0 / torch.sqrt(torch.where(variance < 0, 0.0, variance) + epsilon)  # NaN stays
    affine.scale.copy_(inverse)
    affine.shift.copy_(-(mean * inverse))


class RowProducts:
    """What a normalisation of rows needs of gradient and values, span of rows by span of rows.

    ``sums`` and ``products``: (rows,) float32, of g and of g times the values along each row.
    """

    def __init__(self, gradient: Tensor, length: int, gamma: Tensor | None, *, summing: bool):
        rows = _row_count(gradient, length)
        self._gradient = gradient
        self.length = length
        self._gamma = gamma
        of_gradient: dict[str, Any] = {"dtype": torch.float32, "device": gradient.device}
        self.sums, self.products = torch.empty(2, rows, **of_gradient).unbind()
        shape = (2, -(-rows // ROWS_PER_SPAN), length)
        self._spans = torch.empty(shape, **of_gradient) if summing else None

    @property
    def span_blocks(self) -> int:
        """Blocks in a span: its rows are as many as a block's elements."""
        return self.length

    def add(self, values: Values) -> None:
        """The rows of these values.

        Raises:
            KernelError: they are no whole spans.
        """
        count = self._gradient.numel()
        first, last = values.part(count)
        span = self.length * ROWS_PER_SPAN
        if first % span or (last % span and last != count):
            raise KernelError(f"asked to add elements {first} to {last}; spans have {span}")
        elements, kind = patterns(self._gradient, count)
        common = values.arguments(count) | {
            "gradient": elements,
            "rows": last // self.length,
            "length": self.length,
            "TYPE": kind,
        }
        self._add_rows(first, last, common)
        if self._spans is not None:
            self._add_columns(self._spans, first // span, -(-(last - first) // span), common)

    def _add_rows(self, first: int, last: int, common: dict[str, Any]) -> None:
        on_device(
            device.row_products,
            (-(-((last - first) // self.length) // _ROWS),),
            self._gradient.device,
            **common,
            sums=self.sums,
            products=self.products,
            gamma=self._gamma,
            first_row=first // self.length,
            GAMMA=self._gamma is not None,
            ROWS=_ROWS,
        )

    def _add_columns(
        self, spans: Tensor, first_span: int, count: int, common: dict[str, Any]
    ) -> None:
        on_device(
            device.column_span_sums,
            (count, -(-self.length // _COLUMNS)),
            self._gradient.device,
            **common,
            sums=spans[0],
            products=spans[1],
            first_span=first_span,
            SPAN_ROWS=ROWS_PER_SPAN,
            COLUMNS=_COLUMNS,
        )

    def columns(self) -> tuple[Tensor, Tensor] | None:
        """(length,) float64 each: of the gradient, and of its products with the values."""
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
        gradient, products = torch.where(out.isnan(), math.nan, out)
        return gradient, products


def row_factors(products: RowProducts, scale: Tensor, *, centred: bool) -> Affine:
    """What ``write_gradient`` takes for values; ``scale`` (rows,) is the rows' own."""
    length, wide = products.length, scale.double()
    of_value = (-(wide * divided(products.products.double(), length))).float()
    if not centred:
        return Affine(of_value, torch.zeros_like(of_value), length)
    offset = (-(wide * divided(products.sums.double(), length))).float()
    return Affine(of_value, offset, length)


# --- arguments ------------------------------------------------------------------------------


def _affines(forward: Affine, result: Affine | None) -> dict[str, Any]:
    found: dict[str, Any] = {
        "scale": forward.scale,
        "shift": forward.shift,
        "channels": forward.scale.numel(),
        "inner": forward.inner,
        "RESULT": result is not None,
    }
    if result is None:
        return found | {"gamma": None, "beta": None, "result_channels": 1, "result_inner": 1}
    return found | {
        "gamma": result.scale,
        "beta": result.shift,
        "result_channels": result.scale.numel(),
        "result_inner": result.inner,
    }


def _of_kind(tensor: Tensor, kind: int, count: int) -> Tensor:
    elements, own = patterns(tensor, count)
    if own != kind:
        raise KernelError(f"asked for a result in {tensor.dtype}; give the input's own type")
    return elements


def _row_count(tensor: Tensor, length: int) -> int:
    if length < 1 or tensor.numel() % length:
        raise KernelError(
            f"asked for rows of {length} of {tensor.numel()} elements; give a length that divides"
        )
    return tensor.numel() // length
