"""Ranges and sums of tensors on a GPU: three strategies, one result (format, section 8).

The strategies are those of :class:`daf.kernels.RangeStrategy`. Which is fastest depends on device,
shape and load; ``daf.kernels.autotune`` measures it. Nothing here waits for the device. Functions
raise KernelError outside their contract.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from daf.core.code_format import BLOCK_ELEMENTS
from daf.kernels import RangeStrategy
from daf.kernels.cpu.checks import check_channels, check_member
from daf.kernels.normalisation import Sums
from daf.kernels.triton.launch import on_device, patterns
from daf.kernels.triton.planes import NO_PLANES
from daf.kernels.triton.reduction_kernels import (
    channel_span_sums,
    finish_ranges,
    fold_halves,
    reduce_ranges,
    side_by_side_sums,
)

_TILE = 2048
_MOST_PARTIALS = 512
_MOST_ALONE = 8  # tiles that one program takes alone, to spare a second kernel; not tuned yet
_WIDEST = 32
_LEAST_SPAN_BLOCKS = 16
_SPANS = 8  # of channels side by side, per program
_MOST_COLUMNS = 128
_LANES = 16
_CHANNELS = 8
_MOST_FOLDED = 4096  # sums in a program's registers
_KEYS: dict[str, Any] = {"dtype": torch.int32}
_GREATEST_KEY = 2**31 - 1
_ALONE = 3  # beside the numbers of RangeStrategy: one program, nothing to combine

_Pair = tuple[Tensor, Tensor]  # of the least and of the greatest


def measure_ranges(
    source: Tensor, strategy: RangeStrategy, channels: int = 1, inner: int = 1
) -> tuple[Tensor, Tensor]:
    """Return the least and greatest element of each channel; (channels,) float32 each.

    ``source`` is contiguous float32, bfloat16 or float16; channels are ``(i // inner) % channels``.
    -0 is below +0. A channel with a NaN has it for both ends, an empty one +inf and -inf.
    """
    check_member("strategy", strategy, tuple(RangeStrategy))
    check_channels(channels, inner)
    elements, kind = patterns(source, source.numel())
    tiles = _cut(source.numel(), channels, 1 if channels == 1 else inner)
    least, greatest = (torch.empty(channels, device=source.device, **_KEYS) for _ in range(2))
    if tiles.programs == 1:
        _reduce(elements, kind, _ALONE, tiles, (least, greatest))
    else:
        keys = _places_of_keys(strategy, tiles, source.device)
        _reduce(elements, kind, int(strategy), tiles, keys)
        _finish(keys, (least, greatest))
    return least.view(torch.float32), greatest.view(torch.float32)


class _Tiles(NamedTuple):
    """How programs share a tensor: each takes ``steps`` tiles of (rows, columns)."""

    size: int
    rows: int
    channels: int
    inner: int
    tile_rows: int
    columns: int
    steps: int
    programs: int  # of one group of channels


def _cut(count: int, channels: int, inner: int) -> _Tiles:
    rows = inner * -(-count // (channels * inner))
    columns = min(_power_of_two(channels), _WIDEST) if inner < _WIDEST else 1
    tile_rows = _TILE // columns
    steps = _power_of_two(-(-rows // tile_rows))
    if steps > _MOST_ALONE:
        steps = _power_of_two(-(-rows // (tile_rows * _MOST_PARTIALS)))
    programs = max(1, -(-rows // (tile_rows * steps)))
    return _Tiles(count, rows, channels, inner, tile_rows, columns, steps, programs)


def _places_of_keys(strategy: RangeStrategy, tiles: _Tiles, device: torch.device) -> _Pair:
    """Return (partials, channels) each: room to write, or cells filled to compare with."""
    if strategy is RangeStrategy.TREE:
        shape = (tiles.programs, tiles.channels)
        low, high = (torch.empty(shape, device=device, **_KEYS) for _ in range(2))
        return low, high
    cells = torch.full((2, 1, tiles.channels), _GREATEST_KEY, device=device, **_KEYS)
    return cells[0], cells[1]


def _reduce(elements: Tensor, kind: int, strategy: int, tiles: _Tiles, written: _Pair) -> None:
    on_device(
        reduce_ranges,
        (tiles.programs, -(-tiles.channels // tiles.columns)),
        elements.device,
        source=elements,
        least=written[0],
        greatest=written[1],
        count=tiles.size,
        rows=tiles.rows,
        channels=tiles.channels,
        inner=tiles.inner,
        TYPE=kind,
        STRATEGY=strategy,
        STEPS=tiles.steps,
        ROWS=tiles.tile_rows,
        COLUMNS=tiles.columns,
    )


def _finish(keys: _Pair, ends: _Pair) -> None:
    partials, channels = keys[0].shape
    columns = min(_power_of_two(channels), 8)
    on_device(
        finish_ranges,
        (-(-channels // columns),),
        keys[0].device,
        least=keys[0],
        greatest=keys[1],
        least_out=ends[0],
        greatest_out=ends[1],
        partials=partials,
        channels=channels,
        ROWS=_power_of_two(partials),
        COLUMNS=columns,
    )


def measure_sums(source: Tensor, channels: int = 1, inner: int = 1) -> Sums:
    """Return sums and, as products, sums of squares, of what ``measure_ranges`` takes."""
    check_channels(channels, inner)
    count = source.numel()
    elements, kind = patterns(source, count)
    shape = (2, *span_shape(count, channels))
    rows = torch.zeros(shape, dtype=torch.float64, device=source.device)
    spans = -(-count // span_elements(channels))
    if count > 0:
        alone = {
            "mask": NO_PLANES,
            "values": None,
            "first_value": 0,
            "VALUE_TYPE": kind,
            "affine": None,
        }
        given = {"source": elements, "count": count, "TYPE": kind, **alone}
        sum_spans(rows, (0, spans), channels, count if channels == 1 else inner, given)
    return fold_spans(rows)


def span_shape(count: int, channels: int) -> tuple[int, int]:
    """Return (spans up to a power of two, channels): the shape of the spans' sums."""
    return _power_of_two(-(-count // span_elements(channels))), channels


def fold_spans(rows: Tensor) -> Sums:
    """Fold two kinds of sums, (2, spans, channels), to (channels,) each, by halving strides."""
    while rows.shape[1] > _MOST_FOLDED:
        half = rows.shape[1] // 2
        rows = rows[:, :half] + rows[:, half:]
    _, spans, channels = rows.shape
    columns = min(_power_of_two(channels), max(1, _MOST_FOLDED // spans), 8)
    out = torch.empty(2, channels, dtype=torch.float64, device=rows.device)
    on_device(
        fold_halves,
        (-(-channels // columns), 2),
        rows.device,
        rows=rows,
        out=out,
        channels=channels,
        WIDTH=spans,
        LEVELS=spans.bit_length() - 1,
        COLUMNS=columns,
    )
    return Sums(out[0], out[1])


def sum_spans(
    rows: Tensor, spans: tuple[int, int], channels: int, inner: int, given: dict[str, Any]
) -> None:
    """Sum channels and products in spans [first, last) of ``rows``; ``given``: other arguments."""
    first, count = spans[0], spans[1] - spans[0]
    span, where = span_elements(channels), rows.device
    arguments = {"sums": rows[0], "products": rows[1], "first_span": first, **given}
    if inner == 1 and channels % _LANES == 0:  # a channel's elements then have one of sixteen lanes
        columns = min(_power_of_two(channels), _MOST_COLUMNS)
        sides = SideBySide(channels, span, count, -(-span // channels))
        grid: tuple[int, ...] = (-(-count // _SPANS), -(-channels // columns))
        on_device(
            side_by_side_sums, grid, where, **arguments, sides=sides, SPANS=_SPANS, COLUMNS=columns
        )
        return
    period, tiles = channels * inner, -(-channels // _CHANNELS)
    periods, groups = (span - 1) // period + 2, (min(inner, span) + 14) // 16 + 1
    runs = Runs(channels, inner, period, span, periods, groups, tiles, _CHANNELS * inner)
    grid = (count * tiles,)
    on_device(channel_span_sums, grid, where, **arguments, runs=runs, COLUMNS=_CHANNELS)


class Runs(NamedTuple):
    """How ``channel_span_sums`` reads a channel's elements, in runs of ``inner``."""

    channels: int
    inner: int
    period: int
    span: int
    periods: int
    groups: int
    tiles: int
    tile_elements: int


class SideBySide(NamedTuple):
    """How ``side_by_side_sums`` reads the channels of ``spans`` together."""

    channels: int
    span: int
    spans: int
    periods: int


def span_elements(channels: int) -> int:
    """Return the elements of a span (section 8 of the format)."""
    return BLOCK_ELEMENTS * max(_LEAST_SPAN_BLOCKS, _power_of_two(channels))


def _power_of_two(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()
