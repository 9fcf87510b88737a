"""Ranges and sums of tensors on a GPU: three strategies, one result (format, section 8).

The strategies are those of :class:`daf.kernels.RangeStrategy`. Which is fastest depends on device,
shape and load; ``daf.kernels.autotune`` measures it. Nothing here waits for the device. Functions
raise KernelError outside their contract.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from daf.core.code_format import BLOCK_ELEMENTS
from daf.kernels import RangeStrategy
from daf.kernels.cpu.checks import check_channels, check_member
from daf.kernels.normalisation import Sums
from daf.kernels.triton import reduction_kernels
from daf.kernels.triton.launch import on_device, patterns
from daf.kernels.triton.planes import NO_PLANES, PlaneWords

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
    items: Tensor, strategy: RangeStrategy, channels: int = 1, inner: int = 1
) -> tuple[Tensor, Tensor]:
    """Return the least and greatest element of each channel; (channels,) float32 each.

    ``items`` are contiguous float32, bfloat16 or float16; channels are ``(i // inner) % channels``.
    -0 is below +0. A channel with a NaN has it for both ends, an empty one +inf and -inf.
    """
    check_member("strategy", strategy, tuple(RangeStrategy))
    check_channels(channels, inner)
    elements, kind = patterns(items, items.numel())
    programs, tiles = _cut(items.numel(), channels, 1 if channels == 1 else inner)
    least, greatest = (torch.empty(channels, device=items.device, **_KEYS) for _ in range(2))
    is_alone = programs == 1
    shape = (programs, channels)
    keys = (least, greatest) if is_alone else _places_of_keys(strategy, shape, items.device)
    on_device(
        reduction_kernels.reduce_ranges,
        (programs, -(-channels // tiles["COLUMNS"])),
        source=elements,
        least=keys[0],
        greatest=keys[1],
        TYPE=kind,
        STRATEGY=_ALONE if is_alone else int(strategy),
        **tiles,
    )
    if not is_alone:
        _finish(keys, (least, greatest))
    return least.view(torch.float32), greatest.view(torch.float32)


def _cut(count: int, channels: int, inner: int) -> tuple[int, dict[str, int]]:
    """Return a channel group's programs, each of STEPS tiles (ROWS, COLUMNS); their arguments."""
    rows = inner * -(-count // (channels * inner))
    columns = min(_power_of_two(channels), _WIDEST) if inner < _WIDEST else 1
    tile_rows = _TILE // columns
    steps = _power_of_two(-(-rows // tile_rows))
    if steps > _MOST_ALONE:
        steps = _power_of_two(-(-rows // (tile_rows * _MOST_PARTIALS)))
    programs = max(1, -(-rows // (tile_rows * steps)))
    sizes = {"count": count, "rows": rows, "channels": channels, "inner": inner}
    return programs, sizes | {"STEPS": steps, "ROWS": tile_rows, "COLUMNS": columns}


def _places_of_keys(strategy: RangeStrategy, shape: tuple[int, int], device: torch.device) -> _Pair:
    """Return (partials, channels) each: room to write, or cells filled to compare with."""
    if strategy is RangeStrategy.TREE:
        low, high = (torch.empty(shape, device=device, **_KEYS) for _ in range(2))
        return low, high
    cells = torch.full((2, 1, shape[1]), _GREATEST_KEY, device=device, **_KEYS)
    return cells[0], cells[1]


def _finish(keys: _Pair, ends: _Pair) -> None:
    partials, channels = keys[0].shape
    columns = min(_power_of_two(channels), 8)
    on_device(
        reduction_kernels.finish_ranges,
        (-(-channels // columns),),
        least=keys[0],
        greatest=keys[1],
        low_out=ends[0],
        high_out=ends[1],
        partials=partials,
        channels=channels,
        ROWS=_power_of_two(partials),
        COLUMNS=columns,
    )


def measure_sums(source: Tensor, channels: int = 1, inner: int = 1) -> Sums:
    """Return sums and, as products, sums of squares, of what ``measure_ranges`` takes."""
    sums = SpanSums(source, channels, inner)
    if source.numel() > 0:
        spans = (0, -(-source.numel() // span_elements(channels)))
        sums.add_spans(spans, NO_PLANES, {"values": None, "first_value": 0, "affine": None})
    return sums.totals()


class SpanSums:
    """Sums of channels of masked elements, and of their products with values, span by span."""

    def __init__(self, source: Tensor, channels: int, inner: int) -> None:
        check_channels(channels, inner)
        self._count, self._channels = source.numel(), channels
        self._elements, self._kind = patterns(source, self._count)
        # The elements of a single channel are neighbours in any layout.
        self._inner = self._count if channels == 1 else inner
        spans = _power_of_two(-(-self._count // span_elements(channels)))
        self.rows = torch.zeros((2, spans, channels), dtype=torch.float64, device=source.device)

    def add_spans(self, spans: tuple[int, int], mask: PlaneWords, values: dict[str, Any]) -> None:
        """Add spans [first, last); ``values``: the kernels' arguments, squares without any."""
        channels, inner, rows = self._channels, self._inner, self.rows
        first, count = spans[0], spans[1] - spans[0]
        span = span_elements(channels)
        given: dict[str, Any] = {"source": self._elements, "count": self._count, "mask": mask}
        given |= {"sums": rows[0], "products": rows[1], "first_span": first}
        given |= {"TYPE": self._kind, "VALUE_TYPE": self._kind, **values}
        if inner == 1 and channels % _LANES == 0:
            # A channel's elements then have one of sixteen lanes.
            columns = min(_power_of_two(channels), _MOST_COLUMNS)
            sides = SideBySide(channels, span, count, -(-span // channels))
            grid: tuple[int, ...] = (-(-count // _SPANS), -(-channels // columns))
            given |= {"sides": sides, "SPANS": _SPANS, "COLUMNS": columns}
            on_device(reduction_kernels.side_by_side_sums, grid, **given)
            return
        period, tiles = channels * inner, -(-channels // _CHANNELS)
        periods, groups = (span - 1) // period + 2, (min(inner, span) + 14) // 16 + 1
        runs = Runs(channels, inner, period, span, periods, groups, tiles, _CHANNELS * inner)
        grid = (count * tiles,)
        on_device(reduction_kernels.channel_span_sums, grid, **given, runs=runs, COLUMNS=_CHANNELS)

    def totals(self) -> Sums:
        """Fold both kinds of the spans' sums to (channels,) each, by halving strides."""
        rows = self.rows
        while rows.shape[1] > _MOST_FOLDED:
            half = rows.shape[1] // 2
            rows = rows[:, :half] + rows[:, half:]
        _, spans, channels = rows.shape
        columns = min(_power_of_two(channels), max(1, _MOST_FOLDED // spans), 8)
        out = torch.empty(2, channels, dtype=torch.float64, device=rows.device)
        on_device(
            reduction_kernels.fold_halves,
            (-(-channels // columns), 2),
            rows=rows,
            out=out,
            channels=channels,
            WIDTH=spans,
            LEVELS=spans.bit_length() - 1,
            COLUMNS=columns,
        )
        return Sums(out[0], out[1])


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
