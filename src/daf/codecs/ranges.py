"""The range of a whole tensor or of each channel, by the strategy measured fastest.

Hybrid reduction (DAF, arXiv 2507.07149), chosen at run time. The first call of a size times all
strategies, PyTorch's own too, first on a part of a large tensor. This takes at most
``autotune.CALIBRATION_SECONDS`` besides compiling; a cache file keeps the choice for the device
and size. Timing again while training does not pay (``daf bench reduce --varying``).
"""

import math
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from daf.codecs.layout import in_memory_order, is_dense
from daf.codecs.ranged import WHOLE, Cut
from daf.files.cache import cache_folder
from daf.kernels import RangeStrategy
from daf.kernels.autotune import Chooser
from daf.kernels.backend import is_codable
from daf.kernels.cpu.reductions import range_strategy
from daf.kernels.devices import backend_of, can_code_on, is_processor

PYTORCH = "pytorch"
STRATEGIES = (*(strategy.name.lower() for strategy in RangeStrategy), PYTORCH)
LEAST_ELEMENTS = 1 << 16  # below this, choosing takes as long as reducing
PART_ELEMENTS = 1 << 20  # the part of a larger tensor that all strategies are tried on
MOST_ELEMENTS = 1 << 22  # that strategies are timed on by a processor; more would tell the same

Ends = tuple[Tensor, Tensor]


class Bounds(NamedTuple):
    """Least and greatest element; both NaN if any element is."""

    low: float
    high: float


class Ranges:
    """Ranges on any device, with a chooser for each; safe to call from any thread."""

    def __init__(self, cache: Path | None, chooser: type[Chooser] | None = None) -> None:
        """``cache``: the folder to keep choices in; None: only this process's memory."""
        self._cache, self._chooser_type = cache, chooser or Chooser
        self._choosers: dict[str, Chooser] = {}
        self._known: dict[Any, str] = {}  # found within a microsecond
        self._lock = threading.Lock()
        self._broken: set[torch.device] = set()

    def ends(self, tensor: Tensor) -> Ends:
        """Return the least and greatest element of floats or integers, 0-dim, on the device."""
        return self._ends(tensor, WHOLE)

    def channel_ends(self, tensor: Tensor, cut: Cut) -> Ends:
        """Return the ends of each channel of a dense float tensor, (channels,), on its device."""
        low, high = self._ends(tensor, cut)
        return low.view(cut.channels), high.view(cut.channels)

    def _ends(self, tensor: Tensor, cut: Cut) -> Ends:
        try:
            name = self.strategy_for(tensor, cut)
            return _by_pytorch(tensor, cut) if name == PYTORCH else ends_by(tensor, cut, name)
        except Exception as problem:
            if is_processor(tensor.device) or isinstance(problem, torch.OutOfMemoryError):
                raise
            # For example, no compiler: a check whether weights are finite must still work.
            self._broken.add(tensor.device)
            self._known.clear()
            warnings.warn(
                f"ranges on {tensor.device} are PyTorch's from now on: {problem}", stacklevel=3
            )
            return _by_pytorch(tensor, cut)

    def strategy_for(self, tensor: Tensor, cut: Cut = WHOLE) -> str:
        """Return the strategy for this call; the first call of a size takes some milliseconds."""
        key = tensor.numel().bit_length(), tensor.dtype, cut, tensor.device, torch.get_num_threads()
        known = self._known.get(key) if tensor.is_contiguous() else None
        if known is None:
            known = self._choose(tensor, cut)
            if self._chooser_type is Chooser and tensor.is_contiguous():
                self._known[key] = known
        return known

    def _choose(self, tensor: Tensor, cut: Cut) -> str:
        if tensor.numel() < LEAST_ELEMENTS or tensor.device in self._broken:
            return PYTORCH
        if not (is_codable(tensor.dtype) and is_dense(tensor) and can_code_on(tensor.device)):
            return PYTORCH
        name = device_name(tensor.device)
        shape_class = _class_name(tensor.dtype, tensor.numel().bit_length() // 2, cut)
        with self._lock:
            if name not in self._choosers:
                self._choosers[name] = self._chooser_type(name, STRATEGIES, self._cache)
            return self._choosers[name].choose(shape_class, _Trial(tensor, cut))


@cache
def _class_name(dtype: torch.dtype, power: int, cut: Cut) -> str:
    """Name the sizes that share a choice: elements, channels and inner length in powers of four."""
    channels = () if cut == WHOLE else (number.bit_length() // 2 for number in cut)
    return "-".join(map(str, (dtype, power, *channels))).removeprefix("torch.")


class _Trial:
    """The ranges of one tensor, as a call that strategies compete for."""

    def __init__(self, tensor: Tensor, cut: Cut) -> None:
        self._tensor, self._cut = tensor, cut
        self._is_processor = is_processor(tensor.device)

    def usual(self) -> str | None:
        """The default of the processor's kernels; None on a GPU, where no rule is known."""
        if not self._is_processor:
            return None
        count = self._tensor.numel()
        return range_strategy(count, torch.get_num_threads(), *self._cut).name.lower()

    def warm_up(self, name: str) -> None:
        """Compile a GPU's kernels for the sizes; a processor only starts its threads."""
        ends_by(self._first(LEAST_ELEMENTS if self._is_processor else None), self._cut, name)
        _wait_for(self._tensor.device)

    def seconds(self, name: str) -> float:
        items = self._first(MOST_ELEMENTS if self._is_processor else None)
        return _seconds(lambda: ends_by(items, self._cut, name), self._tensor.device)

    def part(self) -> "_Trial":
        return _Trial(self._first(PART_ELEMENTS), self._cut)

    def _first(self, count: int | None) -> Tensor:
        """Return at most ``count`` elements, but a whole number of all channels."""
        if count is None or count >= self._tensor.numel():
            return self._tensor
        once = self._cut.channels * self._cut.inner
        return in_memory_order(self._tensor)[: max(once, count // once * once)]


def bounds(tensor: Tensor) -> Bounds:
    """Return the bounds of a non-empty float or integer tensor; waits for its device."""
    low, high = ours().ends(tensor)
    return Bounds(low.item(), high.item())


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """True if no element of any float tensor is infinite or NaN; waits once for each device."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() and (tensor.is_floating_point() or tensor.is_complex()):
            by_device.setdefault(tensor.device, []).append(_is_finite(tensor.detach()))
    return all(bool(torch.stack(found).all()) for found in by_device.values())


def _is_finite(tensor: Tensor) -> Tensor:
    if tensor.layout is not torch.strided:
        tensor = tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()
    if tensor.is_complex():
        return tensor.isfinite().all()
    if tensor.dtype.itemsize < 2:  # PyTorch hardly computes with eight bits
        tensor = tensor.float()
    low, high = ours().ends(tensor)
    return low.isfinite() & high.isfinite()


def device_name(device: torch.device) -> str:
    """Return what choices hold for: a kind of GPU, or a processor's number of threads."""
    return _device_name(device, torch.get_num_threads())


@cache
def _device_name(device: torch.device, threads: int) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {threads} threads"


def _by_pytorch(tensor: Tensor, cut: Cut) -> Ends:
    items = in_memory_order(tensor) if is_dense(tensor) else tensor  # others are copied first
    if cut == WHOLE:
        low, high = torch.aminmax(items)
        return low, high
    by_channel = items.view(-1, *cut)
    return by_channel.amin(dim=(0, 2)), by_channel.amax(dim=(0, 2))


def ends_by(tensor: Tensor, cut: Cut, name: str) -> Ends:
    """Return the ends by one of ``STRATEGIES``: (channels,) each; 0-dim of a whole tensor."""
    if name == PYTORCH:
        return _by_pytorch(tensor, cut)
    strategy = RangeStrategy[name.upper()]
    low, high = backend_of(tensor).measure_ranges(in_memory_order(tensor), strategy, *cut)
    return (low[0], high[0]) if cut == WHOLE else (low, high)


def _seconds(work: Callable[[], Any], device: torch.device) -> float:
    _wait_for(device)
    begin_s = time.perf_counter()
    work()
    _wait_for(device)
    return max(time.perf_counter() - begin_s, math.ulp(1.0))


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.cuda.synchronize(device)


@cache
def ours() -> Ranges:
    """Return this process's ranges."""
    return Ranges(cache_folder("strategies"))
