"""Making codes where a tensor is: on the processor, or on a GPU."""

from __future__ import annotations

import math
from collections.abc import Collection
from functools import cache
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from daf.codecs.cpu import PART_BYTES, Channels, DerivativeCode, IntegerCode, MaskCode, ValueCode
from daf.codecs.ranged import RangedCode
from daf.codecs.registry import RegisteredCode, encoder_named
from daf.core.code_format import Predicate
from daf.core.errors import KernelError
from daf.core.policy import Treatment
from daf.kernels import RowMoments
from daf.pool.device_pools import DeviceStores
from daf.pool.store import Store

# Device types whose tensors Triton's kernels code (ROCm calls itself cuda too).
DEVICE_TYPES: Collection[str] = ("cuda",)


class Code(Protocol):
    """Something of a tensor's, in a store or not, with as many elements."""

    @property
    def count(self) -> int:
        """Elements."""

    @property
    def nbytes(self) -> int:
        """Bytes that are there."""

    @property
    def in_store(self) -> bool:
        """Does a store count them?"""


class Mask(Code, Protocol):
    """One bit for every element."""

    def decode(self, out: Tensor, off_value: float, on_value: float) -> None:
        """Write one of two values for every element."""

    def seal(self) -> None:
        """What was made without its bits has been filled."""


class Values(Code, Protocol):
    """Floats in a few bits each."""

    @property
    def treatment(self) -> Treatment:
        """What they are coded by."""

    def decode(
        self,
        out: Tensor,
        channels: Channels | None = None,
        mask: Any = None,  # a Mask of the same device
        accumulate: bool = False,
        blocks: tuple[int, int] | None = None,
    ) -> None:
        """Write them; see ``codec.ValueCode``."""


class Steps(Code, Protocol):
    """Numbers of steps of a range that someone else knows."""

    def decode(self, out: Tensor, from_steps: Channels) -> None:
        """Write the values that they stand for."""


class Intervals(Code, Protocol):
    """In which interval every element lies."""

    def decode(self, out: Tensor, levels: Tensor) -> None:
        """Write the level of every element's interval."""


class Packed(Code, Protocol):
    """Integers."""

    def decode(self, out: Tensor) -> None:
        """Write them."""


def can_code_on(device: torch.device) -> bool:
    """Are there kernels for tensors there? (On a GPU: is Triton installed?)"""
    if device.type in DEVICE_TYPES:
        return _device_codec() is not None
    return device.type == "cpu"


class Host(Protocol):
    """Host memory in which codes of a device's tensors may wait."""

    def room(self, tensor: Tensor, count: int, bits: int) -> Any | None:
        """A store for so many planes of a tensor's; None: there is no room."""

    def values(
        self,
        codec: Any,
        tensor: Tensor,
        treatment: Treatment,
        key: int,
        channels: Any,
        **options: Any,
    ) -> Any | None:
        """A dense tensor's values, made by whoever is free to; None: there is no room."""


class Coder:
    """Makes codes of tensors; the processor's go to ``store``, a GPU's to that of ``devices``, or,
    where they may travel, to ``host``.
    """

    def __init__(
        self, store: Store, devices: DeviceStores | None = None, host: Host | None = None
    ) -> None:
        self._store = store
        self._host = host
        self._devices = DeviceStores() if devices is None else devices

    def mask(
        self,
        tensor: Tensor,
        predicate: Predicate,
        low: float,
        high: float = math.nan,
        *,
        on_host: bool = False,
    ) -> Mask:
        """One bit of every element of a dense tensor."""
        codec = _codec_on(tensor)
        if codec is not None:
            store = self._place(tensor, 1, on_host)
            return codec.DeviceMaskCode(store, tensor, predicate, low, high)  # type: ignore[no-any-return]
        return MaskCode(self._store, tensor, predicate, low, high)

    def unwritten_mask(self, tensor: Tensor, *, on_host: bool = False) -> Mask:
        """Room for one bit of every element, for who fills its planes."""
        codec = _codec_on(tensor)
        if codec is not None:
            store = self._place(tensor, 1, on_host)
            return codec.DeviceMaskCode.unwritten(store, tensor.numel())  # type: ignore[no-any-return]
        return MaskCode.unwritten(self._store, tensor.numel())

    def values(
        self,
        tensor: Tensor,
        treatment: Treatment,
        key: int,
        channels: Channels | None,
        *,
        weight: float,
        tag: int,
        emission: Any = None,
        rows: RowMoments | None = None,
    ) -> Values:
        """A dense tensor's floats; the arguments are those of ``codec.ValueCode``.

        ``emission`` is one that ``norms`` made for the tensor.
        """
        options = {"weight": weight, "tag": tag, "emission": emission, "rows": rows}
        codec = _codec_on(tensor)
        if codec is not None:
            arguments = (tensor, treatment, key, channels)
            if treatment.on_host and self._host is not None:
                found = self._host.values(codec, *arguments, **options)
                if found is not None:
                    return found  # type: ignore[no-any-return]
            store = self._devices.on(tensor.device)
            return codec.DeviceValueCode(store, *arguments, **options)  # type: ignore[no-any-return]
        return ValueCode(self._store, tensor, treatment, key, channels, **options)

    def intervals(
        self, tensor: Tensor, bits: int, borders: Tensor, *, on_host: bool = False
    ) -> Intervals | None:
        """Intervals of a dense tensor's elements; None if it is known that one is not finite."""
        codec = _codec_on(tensor)
        if codec is not None:
            store = self._place(tensor, bits, on_host)
            return codec.DeviceDerivativeCode(store, tensor, bits, borders)  # type: ignore[no-any-return]
        return DerivativeCode.encode(self._store, tensor, bits, borders)

    def registered(self, tensor: Tensor, treatment: Treatment, key: int) -> RegisteredCode | None:
        """A dense tensor's values by a registered codec; None: it stays as it is."""
        is_here = _codec_on(tensor) is None
        store = self._store if is_here else self._devices.on(tensor.device)
        return encoder_named(treatment.codec)(store, tensor, treatment, key)

    def steps(
        self, tensor: Tensor, bits: int, key: int, to_steps: Channels, *, on_host: bool = False
    ) -> Steps:
        """A dense tensor's floats in steps of a range, which ``to_steps`` makes of them."""
        codec = _codec_on(tensor)
        if codec is not None:
            store = self._place(tensor, bits, on_host)
            return codec.DeviceRangedCode(store, tensor, bits, key, to_steps)  # type: ignore[no-any-return]
        return RangedCode(self._store, tensor, bits, key, to_steps)

    def integers(self, tensor: Tensor, bits: int, base: int, *, on_host: bool = False) -> Packed:
        """A dense tensor's integers, which lie in ``base … base + 2**bits - 1``."""
        codec = _codec_on(tensor)
        if codec is not None:
            store = self._place(tensor, bits, on_host)
            return codec.DeviceIntegerCode(store, tensor, bits, base)  # type: ignore[no-any-return]
        return IntegerCode(self._store, tensor, bits, base)

    def _place(self, tensor: Tensor, bits: int, on_host: bool) -> Any:
        """Where the planes of a device's tensor lie."""
        if on_host and self._host is not None:
            found = self._host.room(tensor, tensor.numel(), bits)
            if found is not None:
                return found
        return self._devices.on(tensor.device)


def is_processor(device: torch.device) -> bool:
    """Is it none that has memory of its own?"""
    return device.type not in DEVICE_TYPES


def is_read_freely(tensor: Tensor) -> bool:
    """May the program look at the elements without waiting for a device?"""
    return is_processor(tensor.device)


def norm_part_bytes_on(device: torch.device) -> int:
    """The most that a fused normalisation decodes at a time there (float32); 0: a few blocks."""
    return 0 if is_processor(device) else PART_BYTES


def is_coded_on_device(tensor: Tensor) -> bool:
    """Are the codes of such a tensor made on a GPU, which it is on?"""
    return _codec_on(tensor) is not None


def is_recorded(tensor: Tensor) -> bool:
    """Is work recorded now, to be run again (a CUDA graph)? It would write pages again that have
    become someone else's.
    """
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _codec_on(tensor: Tensor) -> ModuleType | None:
    return None if is_read_freely(tensor) else _device_codec()


@cache
def _device_codec() -> ModuleType | None:
    try:
        from daf.codecs import cuda
    except (KernelError, ImportError):  # no Triton here
        return None
    return cuda
