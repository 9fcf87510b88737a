"""Codes: a dense CPU tensor in, planes (and headers) in a store, a dense tensor out.

All codecs work in memory order, so every dense layout costs one pass and no
copy. Formats are in ``docs/format.md``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from daf.core.code_format import BLOCK_ELEMENTS, ElementType, Predicate
from daf.core.errors import CodecError
from daf.core.policy import Method, Treatment
from daf.kernels import ChannelAffine, Emission, PageFields, RowMoments
from daf.kernels.cpu import paged
from daf.pool.paged_pool import plane_importance
from daf.pool.store import Planes, Store

_ELEMENT_TYPES = {
    torch.float32: ElementType.FLOAT32,
    torch.bfloat16: ElementType.BFLOAT16,
    torch.float16: ElementType.FLOAT16,
}
# Of values that a normalisation decodes at a time on a GPU, whose cache holds so many; never tuned.
PART_BYTES = 32 << 20


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
    def in_store(self) -> bool:
        """These are tensors of their own."""
        return False

    @property
    def nbytes(self) -> int:
        """Bytes of both vectors."""
        return self.scale.nbytes + self.shift.nbytes

    @classmethod
    def times(cls, factor: float, device: torch.device) -> Channels:
        """Multiplied by a number, whatever the channel."""
        scale = torch.full((1,), factor, dtype=torch.float32, device=device)
        return cls(scale, torch.zeros_like(scale), 1)

    def pointers(self) -> ChannelAffine:
        """The same as addresses; keep ``self`` alive while they are used."""
        count = self.scale.numel()
        return ChannelAffine(count, self.inner, self.scale.data_ptr(), self.shift.data_ptr())


class MaskCode:
    """One bit per element: on which side of a threshold it lies. Never given up."""

    __slots__ = ("count", "planes")
    in_store = True

    def __init__(
        self,
        store: Store,
        tensor: Tensor,
        predicate: Predicate,
        low: float,
        high: float = float("nan"),
    ) -> None:
        """Encode a dense tensor; see :class:`daf.kernels.Predicate` for which bits are set."""
        self._allocate(store, tensor.numel())
        paged.encode_mask(
            tensor.data_ptr(),
            element_type(tensor.dtype),
            self.planes.view.fields,
            predicate,
            low,
            high,
            torch.get_num_threads(),
        )
        self.planes.seal()

    @classmethod
    def unwritten(cls, store: Store, count: int) -> MaskCode:
        """Room for a mask of ``count`` elements; whoever has filled ``planes`` seals it."""
        mask = cls.__new__(cls)
        mask._allocate(store, count)
        return mask

    def _allocate(self, store: Store, count: int) -> None:
        self.count = count
        self.planes: Planes = store.allocate_planes(count, 1, headers=False)

    def seal(self) -> None:
        """It has been filled."""
        self.planes.seal()

    @property
    def nbytes(self) -> int:
        """Bytes of the planes."""
        return self.planes.nbytes

    def decode(self, out: Tensor, off_value: float, on_value: float) -> None:
        """Write the two values into a dense tensor of the coded element count."""
        check_count(self.count, out)
        with self.planes.pinned() as view:
            paged.decode_mask(
                view.fields,
                off_value,
                on_value,
                out.data_ptr(),
                element_type(out.dtype),
                torch.get_num_threads(),
            )


class ValueCode:
    """``rotated`` or ``minmax`` planes with a header for every block.

    Planes of ``rotated`` codes but the first may be given up by the store.
    """

    __slots__ = ("count", "key", "planes", "treatment")
    in_store = True

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
        emission: Emission | None = None,
        rows: RowMoments | None = None,
    ) -> None:
        """Encode a dense tensor, after ``channels`` has been applied to it.

        Args:
            store: where the planes go.
            tensor: dense CPU floats.
            treatment: *rotated* or *minmax*, and the width.
            key: 64-bit seed.
            channels: applied to every value before it is coded.
            weight: how much relative error here harms the gradient, beside other tensors.
            tag: 64-bit name under which the store tells what it gave up.
            emission: what is computed of the values coded, in the same pass.
            rows: how to measure ``channels``, whose vectors are then written before they are read.

        Raises:
            CodecError: the treatment is no value code, or the dtype has none.
        """
        if treatment.method not in (Method.ROTATED, Method.MINMAX):
            raise CodecError(f"asked for a value code by {treatment.method}; use rotated or minmax")
        kind = element_type(tensor.dtype)
        self.count = tensor.numel()
        self.treatment = treatment
        self.key = key
        self.planes: Planes = self._allocate(store, weight, tag)
        source, fields = tensor.data_ptr(), self.planes.view.fields
        affine = channels.pointers() if channels else None
        options = (torch.get_num_threads(), affine, emission, rows)
        if treatment.method is Method.ROTATED:
            paged.encode_rotated(source, kind, fields, treatment.rounds, key, *options)
        else:
            paged.encode_minmax(source, kind, fields, key, *options)
        self.planes.seal()

    def _allocate(self, store: Store, weight: float, tag: int) -> Planes:
        minimum_bits, importance = may_go(self.count, self.treatment, weight)
        return store.allocate_planes(
            self.count,
            self.treatment.bits,
            minimum_bits=minimum_bits,
            importance=importance,
            tag=tag,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the planes and headers that are there."""
        return self.planes.nbytes

    def decode(
        self,
        out: Tensor,
        channels: Channels | None = None,
        mask: MaskCode | None = None,
        accumulate: bool = False,
        blocks: tuple[int, int] | None = None,
    ) -> None:
        """Write the values into a dense tensor of the coded element count.

        ``channels`` is applied to every value, then ``accumulate`` adds what
        ``out`` holds, then ``mask`` zeroes the elements whose bit is clear.
        With ``blocks`` (first, last), ``out`` holds the elements of these
        blocks of 256 alone.
        """
        check_count(self.count if blocks is None else elements_in(blocks, self.count), out)
        if mask is None:
            with self.planes.pinned() as view:
                self._decode(view.fields, out, channels, None, accumulate, blocks)
            return
        with self.planes.pinned() as view, mask.planes.pinned() as chosen:
            self._decode(view.fields, out, channels, chosen.fields, accumulate, blocks)

    def _decode(
        self,
        fields: PageFields,
        out: Tensor,
        channels: Channels | None,
        mask: PageFields | None,
        accumulate: bool,
        blocks: tuple[int, int] | None,
    ) -> None:
        place, kind, threads = out.data_ptr(), element_type(out.dtype), torch.get_num_threads()
        options = (threads, channels.pointers() if channels else None, mask, accumulate, blocks)
        if self.treatment.method is Method.ROTATED:
            paged.decode_rotated(fields, self.treatment.rounds, self.key, place, kind, *options)
        else:
            paged.decode_minmax(fields, place, kind, *options)


class DerivativeCode:
    """In which interval of a smooth activation's domain each element lies. Never given up."""

    __slots__ = ("count", "planes")
    in_store = True

    def __init__(self, planes: Planes, count: int) -> None:
        self.planes = planes
        self.count = count

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
        planes = store.allocate_planes(count, bits, headers=False)
        finite = paged.encode_derivative(
            tensor.data_ptr(),
            element_type(tensor.dtype),
            planes.view.fields,
            borders.data_ptr(),
            torch.get_num_threads(),
        )
        if not finite:
            return None
        planes.seal()
        return cls(planes, count)

    @property
    def nbytes(self) -> int:
        """Bytes of the planes."""
        return self.planes.nbytes

    def decode(self, out: Tensor, levels: Tensor) -> None:
        """Write ``levels[interval]`` into a dense tensor; levels: (2**bits,) float32."""
        check_count(self.count, out)
        with self.planes.pinned() as view:
            paged.decode_derivative(
                view.fields,
                levels.data_ptr(),
                out.data_ptr(),
                element_type(out.dtype),
                torch.get_num_threads(),
            )


class IntegerCode:
    """Integers or booleans in as few bits as their range needs; lossless, never given up."""

    __slots__ = ("base", "count", "planes")
    in_store = True

    def __init__(self, store: Store, tensor: Tensor, bits: int, base: int) -> None:
        """Encode a dense tensor of 1-, 2-, 4- or 8-byte integers in ``base … base + 2**bits - 1``.

        Unsigned bytes are read as signed ones, which loses nothing.
        """
        self.count = tensor.numel()
        self.base = base
        self.planes: Planes = store.allocate_planes(self.count, bits, headers=False)
        paged.encode_integers(
            tensor.data_ptr(),
            tensor.element_size(),
            self.planes.view.fields,
            base,
            torch.get_num_threads(),
        )
        self.planes.seal()

    @property
    def nbytes(self) -> int:
        """Bytes of the planes."""
        return self.planes.nbytes

    def decode(self, out: Tensor) -> None:
        """Write the integers into a dense tensor of the coded element count."""
        check_count(self.count, out)
        with self.planes.pinned() as view:
            paged.decode_integers(
                view.fields,
                self.base,
                out.data_ptr(),
                out.element_size(),
                torch.get_num_threads(),
            )


def may_go(
    count: int, treatment: Treatment, weight: float
) -> tuple[int | None, list[float] | None]:
    """What a store may give up of a value code: how many planes stay (None: all), and each
    plane's importance: planes of ``rotated`` codes but the first, unless they stay whole.
    """
    if treatment.method is Method.MINMAX or treatment.whole:
        return None, None
    return 1, plane_importance(count, treatment.bits, weight)


def elements_in(blocks: tuple[int, int], count: int) -> int:
    """Elements of blocks first to last (exclusive) of a tensor of ``count``."""
    first, last = blocks
    return min(last * BLOCK_ELEMENTS, count) - first * BLOCK_ELEMENTS


def check_count(count: int, out: Tensor) -> None:
    """Refuse a tensor of another element count than was coded.

    Raises:
        CodecError: it is one.
    """
    if out.numel() != count:
        raise CodecError(
            f"asked to decode {count} elements into a tensor of {out.numel()}; "
            "give one of the coded shape"
        )
