"""Codes of tensors on a GPU: their planes lie there too, and nothing waits for the device.

The same formats as ``codec``, made by Triton (``kernels.gpu``), in pages of ``device_pool``.
Importing this raises KernelError where Triton is not installed.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import cache

import torch
from torch import Tensor

from daf.codecs.cpu import Channels, check_count, elements_in, may_go
from daf.codecs.cuda_outputs import DeviceEmission, affine_of
from daf.codecs.layout import in_memory_order
from daf.core.code_format import Predicate
from daf.core.errors import CodecError
from daf.core.policy import Method, Treatment
from daf.kernels import RowMoments
from daf.kernels.triton import codecs as triton_codecs
from daf.kernels.triton import row_norm as triton_rows
from daf.kernels.triton.launch import Affine
from daf.pool.device_pool import DevicePagedStore, DevicePlaneTensor
from daf.pool.host_planes import HostPlanes, HostStore

Store = DevicePagedStore | HostStore
Planes = DevicePlaneTensor | HostPlanes


class _DeviceCode:
    """Planes on a device, with headers or without; never given up unless said otherwise.

    In a ``HostStore`` they wait on the host instead, and pass through.
    """

    __slots__ = ("count", "planes")
    in_store = True

    def __init__(self, tensor: Tensor, planes: Planes) -> None:
        self.count = tensor.numel()
        self.planes = planes

    @property
    def nbytes(self) -> int:
        """Bytes of the planes and headers that are there, and of the table of their pages."""
        return self.planes.nbytes

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.planes.device


class DeviceMaskCode(_DeviceCode):
    """``codec.MaskCode`` on a device."""

    __slots__ = ()

    def __init__(
        self,
        store: Store,
        tensor: Tensor,
        predicate: Predicate,
        low: float,
        high: float = math.nan,
    ) -> None:
        """Encode a dense tensor."""
        super().__init__(tensor, store.allocate_planes(tensor.numel(), 1, headers=False))
        with self.planes.writing() as planes:
            triton_codecs.encode_mask(in_memory_order(tensor), planes, predicate, low, high)

    @classmethod
    def unwritten(cls, store: Store, count: int) -> DeviceMaskCode:
        """Room for a mask of ``count`` elements; whoever has filled ``planes`` seals it."""
        mask = cls.__new__(cls)
        mask.count = count
        mask.planes = store.allocate_planes(count, 1, headers=False)
        return mask

    def seal(self) -> None:
        """It has been filled."""
        self.planes.seal()

    def decode(self, out: Tensor, off_value: float, on_value: float) -> None:
        """Write the two values into a dense tensor of the coded element count."""
        check_count(self.count, out)
        with self.planes.pinned() as planes:
            triton_codecs.decode_mask(planes, off_value, on_value, in_memory_order(out))


class DeviceValueCode(_DeviceCode):
    """``codec.ValueCode`` on a device: of ``rotated`` codes all planes but the first may go."""

    __slots__ = ("key", "treatment")

    def __init__(
        self,
        store: Store,
        tensor: Tensor,
        treatment: Treatment,
        key: int,
        channels: Channels | None = None,
        *,
        weight: float = 1.0,
        tag: int = 0,
        emission: DeviceEmission | None = None,
        rows: RowMoments | None = None,
    ) -> None:
        """Encode a dense tensor, after ``channels`` (vectors on its device) has been applied.

        ``rows`` and ``emission`` are those of ``codec.ValueCode``.

        Raises:
            CodecError: the treatment is neither *rotated* nor *minmax*.
            KernelError: the dtype has no code.
        """
        if treatment.method not in (Method.ROTATED, Method.MINMAX):
            raise CodecError(f"asked for a value code by {treatment.method}; use rotated or minmax")
        minimum_bits, importance = may_go(tensor.numel(), treatment, weight)
        planes_there = store.allocate_planes(
            tensor.numel(),
            treatment.bits,
            minimum_bits=minimum_bits,
            importance=importance,
            tag=tag,
        )
        super().__init__(tensor, planes_there)
        self.treatment = treatment
        self.key = key
        source, affine = in_memory_order(tensor), _affine(channels)
        if rows is not None and affine is not None:
            triton_rows.measure_rows(source, affine, rows.epsilon, centred=rows.centred)
        with self.planes.writing() as planes:
            if treatment.method is Method.ROTATED:
                triton_codecs.encode_rotated(source, planes, treatment.rounds, key, affine)
            else:
                triton_codecs.encode_minmax(source, planes, key, affine)
        if emission is not None and channels is not None:
            emission.carry_out(tensor, channels)

    @classmethod
    def packed_elsewhere(
        cls, planes: HostPlanes, tensor: Tensor, treatment: Treatment, key: int
    ) -> DeviceValueCode:
        """Of a dense tensor that the processor codes, into these planes."""
        code = cls.__new__(cls)
        _DeviceCode.__init__(code, tensor, planes)
        code.treatment, code.key = treatment, key
        return code

    def decode(
        self,
        out: Tensor,
        channels: Channels | None = None,
        mask: DeviceMaskCode | None = None,
        accumulate: bool = False,
        blocks: tuple[int, int] | None = None,
    ) -> None:
        """Write the values, as ``codec.ValueCode.decode`` does."""
        check_count(self.count if blocks is None else elements_in(blocks, self.count), out)
        chosen = nullcontext() if mask is None else mask.planes.pinned()
        place, affine = in_memory_order(out), _affine(channels)
        with self.planes.pinned() as planes, chosen as chosen_planes:
            if self.treatment.method is Method.ROTATED:
                options = (place, affine, chosen_planes, accumulate, blocks)
                triton_codecs.decode_rotated(planes, self.treatment.rounds, self.key, *options)
            else:
                triton_codecs.decode_minmax(
                    planes, place, affine, chosen_planes, accumulate, blocks
                )


class DeviceRangedCode(_DeviceCode):
    """``ranged.RangedCode`` on a device."""

    __slots__ = ()

    def __init__(
        self, store: Store, tensor: Tensor, bits: int, key: int, to_steps: Channels
    ) -> None:
        """Encode a dense tensor of floats, rounding stochastically."""
        super().__init__(tensor, store.allocate_planes(tensor.numel(), bits, headers=False))
        with self.planes.writing() as planes:
            triton_codecs.encode_steps(in_memory_order(tensor), planes, key, affine_of(to_steps))

    def decode(self, out: Tensor, from_steps: Channels) -> None:
        """Write the values into a dense tensor of the coded element count."""
        check_count(self.count, out)
        with self.planes.pinned() as planes:
            triton_codecs.decode_steps(planes, in_memory_order(out), affine_of(from_steps))


class DeviceDerivativeCode(_DeviceCode):
    """``codec.DerivativeCode`` on a device."""

    __slots__ = ("_broken",)

    def __init__(self, store: Store, tensor: Tensor, bits: int, borders: Tensor) -> None:
        """Code a dense tensor; ``borders``: (2**bits - 1,) float32, ascending, on any device.

        Whether all elements are finite is known on the device alone; where one is
        not, all of the tensor decodes to NaN.
        """
        super().__init__(tensor, store.allocate_planes(tensor.numel(), bits, headers=False))
        source, table = in_memory_order(tensor), _table_on(borders, tensor.device)
        with self.planes.writing() as planes:
            self._broken = triton_codecs.encode_derivative(source, planes, table)

    def decode(self, out: Tensor, levels: Tensor) -> None:
        """Write ``levels[interval]`` into a dense tensor; levels: (2**bits,) float32."""
        check_count(self.count, out)
        place = in_memory_order(out)
        with self.planes.pinned() as planes:
            triton_codecs.decode_derivative(planes, _table_on(levels, out.device), place)
        place.masked_fill_(self._broken != 0, math.nan)


class DeviceIntegerCode(_DeviceCode):
    """``codec.IntegerCode`` on a device; the caller knows that the range holds."""

    __slots__ = ("base",)

    def __init__(self, store: Store, tensor: Tensor, bits: int, base: int) -> None:
        """Encode a dense tensor of integers in ``base … base + 2**bits - 1``, or of booleans."""
        super().__init__(tensor, store.allocate_planes(tensor.numel(), bits, headers=False))
        self.base = base
        with self.planes.writing() as planes:
            triton_codecs.encode_integers(_signed(in_memory_order(tensor)), planes, base)

    def decode(self, out: Tensor) -> None:
        """Write the integers into a dense tensor of the coded element count."""
        check_count(self.count, out)
        with self.planes.pinned() as planes:
            triton_codecs.decode_integers(planes, self.base, _signed(in_memory_order(out)))


@cache
def _table_on(table: Tensor, device: torch.device) -> Tensor:
    """A table of an activation, of which there are few, copied once."""
    return table.to(device)


def _signed(items: Tensor) -> Tensor:
    return items.view(torch.int8) if items.dtype == torch.uint8 else items


def _affine(channels: Channels | None) -> Affine | None:
    return None if channels is None else affine_of(channels)
