"""Codes: a dense CPU tensor in, planes (and headers) in a store, a dense tensor out.

All codecs work in memory order, so every dense layout costs one pass and no
copy. Formats are in ``docs/format.md``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from daf.errors import CodecError
from daf.kernels import ChannelAffine, ElementType, Predicate, cpu, header_bytes, plane_bytes
from daf.plan import Method, Treatment
from daf.store.buffers import Buffer, Store

_ELEMENT_TYPES = {
    torch.float32: ElementType.FLOAT32,
    torch.bfloat16: ElementType.BFLOAT16,
    torch.float16: ElementType.FLOAT16,
}


def is_codable(dtype: torch.dtype) -> bool:
    """Can floats of this dtype be coded? (fp32, bf16 and fp16 can.)"""
    return dtype in _ELEMENT_TYPES


def element_type(dtype: torch.dtype) -> ElementType:
    """The kernels' word for a dtype.

    Raises:
        CodecError: floats of this dtype cannot be coded.
    """
    try:
        return _ELEMENT_TYPES[dtype]
    except KeyError:
        known = ", ".join(str(known) for known in _ELEMENT_TYPES)
        raise CodecError(f"asked to code {dtype}; codes exist for {known}: keep it") from None


class Channels(NamedTuple):
    """``value * scale[c] + shift[c]`` with ``c = (i // inner) % channels`` over memory order.

    ``scale`` and ``shift`` are contiguous (channels,) float32 CPU tensors.
    """

    scale: Tensor
    shift: Tensor
    inner: int

    @property
    def nbytes(self) -> int:
        """Bytes of both vectors."""
        return self.scale.nbytes + self.shift.nbytes

    def pointers(self) -> ChannelAffine:
        """The same as addresses; keep ``self`` alive while they are used."""
        count = self.scale.numel()
        return ChannelAffine(count, self.inner, self.scale.data_ptr(), self.shift.data_ptr())


class MaskCode:
    """One bit per element: on which side of a threshold it lies."""

    __slots__ = ("count", "words")

    def __init__(
        self,
        store: Store,
        tensor: Tensor,
        predicate: Predicate,
        low: float,
        high: float = float("nan"),
    ) -> None:
        """Encode a dense tensor; see :class:`daf.kernels.Predicate` for which bits are set."""
        self.count = tensor.numel()
        self.words: Buffer = store.allocate(plane_bytes(self.count, 1))
        cpu.encode_mask(
            tensor.data_ptr(),
            element_type(tensor.dtype),
            self.count,
            predicate,
            low,
            high,
            self.words.pointer,
            torch.get_num_threads(),
        )

    @property
    def nbytes(self) -> int:
        """Bytes in the store."""
        return self.words.nbytes

    def decode(self, out: Tensor, off_value: float, on_value: float) -> None:
        """Write the two values into a dense tensor of the coded element count."""
        _check_count(self.count, out)
        cpu.decode_mask(
            self.words.pointer,
            self.count,
            off_value,
            on_value,
            out.data_ptr(),
            element_type(out.dtype),
            torch.get_num_threads(),
        )


class ValueCode:
    """``rotated`` or ``minmax`` planes with a header for every block."""

    __slots__ = ("count", "headers", "key", "planes", "treatment")

    def __init__(
        self,
        store: Store,
        tensor: Tensor,
        treatment: Treatment,
        key: int,
        channels: Channels | None = None,
    ) -> None:
        """Encode a dense tensor, after ``channels`` has been applied to it.

        Raises:
            CodecError: the treatment is no value code, or the dtype has none.
        """
        if treatment.method not in (Method.ROTATED, Method.MINMAX):
            raise CodecError(f"asked for a value code by {treatment.method}; use rotated or minmax")
        self.count = tensor.numel()
        self.treatment = treatment
        self.key = key
        self.planes: Buffer = store.allocate(plane_bytes(self.count, treatment.bits))
        self.headers: Buffer = store.allocate(header_bytes(self.count))
        source, kind = tensor.data_ptr(), element_type(tensor.dtype)
        affine = channels.pointers() if channels else None
        threads = torch.get_num_threads()
        if treatment.method is Method.ROTATED:
            cpu.encode_rotated(
                source,
                kind,
                self.count,
                treatment.bits,
                treatment.rounds,
                key,
                self.planes.pointer,
                self.headers.pointer,
                threads,
                affine,
            )
        else:
            cpu.encode_minmax(
                source,
                kind,
                self.count,
                treatment.bits,
                key,
                self.planes.pointer,
                self.headers.pointer,
                threads,
                affine,
            )

    @property
    def nbytes(self) -> int:
        """Bytes in the store."""
        return self.planes.nbytes + self.headers.nbytes

    def decode(
        self,
        out: Tensor,
        channels: Channels | None = None,
        mask: MaskCode | None = None,
        accumulate: bool = False,
    ) -> None:
        """Write the values into a dense tensor of the coded element count.

        ``channels`` is applied to every value, then ``accumulate`` adds what
        ``out`` holds, then ``mask`` zeroes the elements whose bit is clear.
        """
        _check_count(self.count, out)
        affine = channels.pointers() if channels else None
        mask_pointer = 0
        if mask is not None:
            _check_count(mask.count, out)
            mask_pointer = mask.words.pointer
        bits, kind, threads = self.treatment.bits, element_type(out.dtype), torch.get_num_threads()
        if self.treatment.method is Method.ROTATED:
            cpu.decode_rotated(
                self.planes.pointer,
                self.headers.pointer,
                self.count,
                bits,
                bits,
                self.treatment.rounds,
                self.key,
                out.data_ptr(),
                kind,
                threads,
                affine,
                mask_pointer,
                accumulate,
            )
        else:
            cpu.decode_minmax(
                self.planes.pointer,
                self.headers.pointer,
                self.count,
                bits,
                out.data_ptr(),
                kind,
                threads,
                affine,
                mask_pointer,
                accumulate,
            )


class DerivativeCode:
    """In which interval of a smooth activation's domain each element lies."""

    __slots__ = ("bits", "count", "planes")

    def __init__(self, planes: Buffer, count: int, bits: int) -> None:
        self.planes = planes
        self.count = count
        self.bits = bits

    @classmethod
    def encode(
        cls, store: Store, tensor: Tensor, bits: int, borders: Tensor
    ) -> DerivativeCode | None:
        """Code a dense tensor; None where an element is not finite and must stay so.

        Args:
            store: where the planes go.
            tensor: dense CPU floats.
            bits: planes.
            borders: (2**bits - 1,) float32, ascending.
        """
        count = tensor.numel()
        planes = store.allocate(plane_bytes(count, bits))
        finite = cpu.encode_derivative(
            tensor.data_ptr(),
            element_type(tensor.dtype),
            count,
            bits,
            borders.data_ptr(),
            planes.pointer,
            torch.get_num_threads(),
        )
        return cls(planes, count, bits) if finite else None

    @property
    def nbytes(self) -> int:
        """Bytes in the store."""
        return self.planes.nbytes

    def decode(self, out: Tensor, levels: Tensor) -> None:
        """Write ``levels[interval]`` into a dense tensor; levels: (2**bits,) float32."""
        _check_count(self.count, out)
        cpu.decode_derivative(
            self.planes.pointer,
            self.count,
            self.bits,
            levels.data_ptr(),
            out.data_ptr(),
            element_type(out.dtype),
            torch.get_num_threads(),
        )


class IntegerCode:
    """Integers or booleans in as few bits as their range needs; lossless."""

    __slots__ = ("base", "bits", "count", "planes")

    def __init__(self, store: Store, tensor: Tensor, bits: int, base: int) -> None:
        """Encode a dense tensor of 1-, 2-, 4- or 8-byte integers in ``base … base + 2**bits - 1``.

        Unsigned bytes are read as signed ones, which loses nothing.
        """
        self.count = tensor.numel()
        self.bits = bits
        self.base = base
        self.planes: Buffer = store.allocate(plane_bytes(self.count, bits))
        cpu.encode_integers(
            tensor.data_ptr(),
            tensor.element_size(),
            self.count,
            bits,
            base,
            self.planes.pointer,
            torch.get_num_threads(),
        )

    @property
    def nbytes(self) -> int:
        """Bytes in the store."""
        return self.planes.nbytes

    def decode(self, out: Tensor) -> None:
        """Write the integers into a dense tensor of the coded element count."""
        _check_count(self.count, out)
        cpu.decode_integers(
            self.planes.pointer,
            self.count,
            self.bits,
            self.base,
            out.data_ptr(),
            out.element_size(),
            torch.get_num_threads(),
        )


def _check_count(count: int, out: Tensor) -> None:
    if out.numel() != count:
        raise CodecError(
            f"asked to decode {count} elements into a tensor of {out.numel()}; "
            "give one of the coded shape"
        )
