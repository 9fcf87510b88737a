"""Codes: a dense tensor as planes (and headers) in a store, decoded into a dense tensor.

All codecs work in memory order, so every dense layout costs one pass and no copy. The device's
kernels do the work; ``docs/format.md`` describes the formats.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor

from daf.codecs.layout import in_memory_order
from daf.core.code_format import BLOCK_ELEMENTS
from daf.core.errors import CodecError
from daf.core.policy import Method, Treatment
from daf.kernels import Codec, RowMoments, normalisation
from daf.kernels.backend import element_type
from daf.kernels.devices import backend_of
from daf.pool.paged_pool import plane_importance
from daf.pool.views import ZeroView


class Values(ABC):
    """Floats in a few bits each, or recomputed when read; other tensors are derived from them."""

    __slots__ = ()
    count: int  # of elements
    in_store: bool  # whether a store counts the bytes
    treatment: Treatment  # that they are coded by

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes held now."""

    def decode(
        self,
        out: Tensor,
        channels: normalisation.Channels | None = None,
        mask: "ElementsCode | None" = None,
        accumulate: bool = False,
        blocks: tuple[int, int] | None = None,
    ) -> None:
        """Write the values into a dense tensor of the encoded element count.

        ``channels`` applies first; ``accumulate`` then adds what ``out`` holds; then ``mask``
        zeroes where its bit is clear. With ``blocks``, ``out`` holds blocks [first, last) of 256.
        """
        count = self.count if blocks is None else elements_in(blocks, self.count)
        _check_count(count, out)
        with pinned(mask) as chosen:
            self._write(normalisation.Decoding(out, channels, chosen, accumulate, blocks))

    @abstractmethod
    def _write(self, decoding: normalisation.Decoding) -> None: ...


class _Code:
    """Planes in a store; none is evicted unless a subclass says so."""

    __slots__ = ("count", "planes")
    in_store = True

    def __init__(self, count: int, planes: Any) -> None:
        self.count, self.planes = count, planes

    @property
    def nbytes(self) -> int:
        return int(self.planes.nbytes)


class ElementsCode(_Code):
    """A code of every element by itself; ``code`` is what it was written by."""

    __slots__ = ("_broken", "code")

    def __init__(
        self, store: Any, count: int, bits: int, code: normalisation.ElementCode, **options: Any
    ) -> None:
        super().__init__(count, store.allocate_planes(count, bits, headers=False, **options))
        self.code = code._replace(channels=None, table=None)  # of the encoder alone
        self._broken: Tensor | None = None

    @classmethod
    def encode(
        cls, store: Any, tensor: Tensor, bits: int, code: normalisation.ElementCode, **options: Any
    ) -> "ElementsCode | None":
        """Encode a dense tensor; CodecError if its dtype has no code; ``options`` of its planes.

        None if a *derivative* code's element is not finite; NaN where only the device knows.
        """
        if code.codec is not Codec.INTEGERS:
            element_type(tensor.dtype)
        found = cls(store, tensor.numel(), bits, code, **options)
        with found.planes.filling() as planes:
            broken = backend_of(tensor).encode_elements(tensor, planes, code)
        if broken is True:
            return None
        found._broken = None if broken is False else broken
        found.planes.seal()
        return found

    @classmethod
    def unwritten_mask(cls, store: Any, count: int) -> "ElementsCode":
        """Allocate a mask of ``count`` elements; the caller fills and seals ``planes``."""
        return cls(store, count, 1, normalisation.ElementCode(Codec.MASK))

    def decode(self, out: Tensor, **read: Any) -> None:
        """Write a dense tensor of the encoded element count; ``read``: fields of ElementCode."""
        _check_count(self.count, out)
        with self.planes.pinned() as planes:
            if isinstance(planes, ZeroView):
                out.zero_()  # zeros of a code may stand for the least of a range
                return
            backend_of(out).decode_elements(planes, out, self.code._replace(**read))
        if self._broken is not None:
            in_memory_order(out).masked_fill_(self._broken != 0, math.nan)


class ValueCode(_Code, Values):
    """``rotated`` or ``minmax`` planes with block headers; ``rotated`` keeps at least its first.

    ``is_finite``: False if a value is known not to be, whose block of 256 decodes to NaN.
    """

    __slots__ = ("is_finite", "key", "treatment")

    def __init__(
        self,
        store: Any,
        tensor: Tensor,
        treatment: Treatment,
        key: int,
        channels: normalisation.Channels | None = None,
        *,
        weight: float = 1.0,
        tag: int = 0,
        output: normalisation.NormOutput | None = None,
        rows: RowMoments | None = None,
    ) -> None:
        """Encode a dense tensor after ``channels`` is applied to it.

        Args:
            store: where the planes go.
            tensor: dense floats.
            treatment: *rotated* or *minmax*, and the width; CodecError for others or their dtypes.
            key: int in [0, 2**64), the seed.
            channels: applied to every value before it is encoded; vectors on the tensor's device.
            weight: how much relative error here harms the gradient, relative to other tensors.
            tag: 64-bit name under which the store reports evictions.
            output: what a normalisation writes from the encoded values; its mask is unwritten.
            rows: how to measure ``channels``, whose vectors are then written before they are read.
        """
        if treatment.method not in (Method.ROTATED, Method.MINMAX):
            raise CodecError(f"asked for a value code by {treatment.method}; use rotated or minmax")
        element_type(tensor.dtype)
        count = tensor.numel()
        # Those of ``rotated`` codes after the first are evictable unless the code stays whole.
        stays = treatment.method is Method.MINMAX or treatment.whole
        bits, minimum_bits = treatment.bits, None if stays else 1
        importance = None if stays else plane_importance(count, bits, weight)
        planes = store.allocate_planes(
            count,
            bits,
            minimum_bits=minimum_bits,
            importance=importance,
            weight=None if treatment.whole else weight,
            tag=tag,
        )
        self._hold(count, planes, treatment, key)
        with self.planes.filling() as filled, opened(output) as written:
            encoding = normalisation.Encoding(tensor, channels, rows, written)
            self.is_finite = backend_of(tensor).encode_values(self.at(filled), encoding)
        self.planes.seal()

    @classmethod
    def packed_elsewhere(
        cls, planes: Any, tensor: Tensor, treatment: Treatment, key: int
    ) -> "ValueCode":
        """Return the code of a dense tensor whose planes the host packs."""
        code = cls.__new__(cls)
        code._hold(tensor.numel(), planes, treatment, key)
        return code

    def _hold(self, count: int, planes: Any, treatment: Treatment, key: int) -> None:
        super().__init__(count, planes)
        self.treatment, self.key, self.is_finite = treatment, key, True

    def at(self, planes: Any) -> normalisation.CodedValues:
        """Return the code as kernels take it, whose ``planes`` are open or pinned."""
        return normalisation.CodedValues(planes, self.treatment, self.key, self.count)

    def _write(self, decoding: normalisation.Decoding) -> None:
        with self.planes.pinned() as planes:
            backend_of(decoding.out).decode_values(self.at(planes), decoding)


def pinned(mask: ElementsCode | None) -> AbstractContextManager[Any]:
    """Pin a mask's planes for reading; None without a mask."""
    return nullcontext() if mask is None else mask.planes.pinned()


@contextmanager
def opened(output: normalisation.NormOutput | None) -> Iterator[normalisation.NormOutput | None]:
    """Open the output's unwritten mask and yield the output with its planes in its place."""
    if output is None or output.mask is None:
        yield output
        return
    with output.mask.planes.filling() as planes:
        yield output._replace(mask=planes)


def _check_count(count: int, out: Tensor) -> None:
    if out.numel() != count:
        raise CodecError(
            f"asked to decode {count} elements into a tensor of {out.numel()}; "
            "give one of the coded shape"
        )


def elements_in(blocks: tuple[int, int], count: int) -> int:
    """Return the elements of blocks first to last (exclusive) of a tensor of ``count``."""
    first, last = blocks
    return min(last * BLOCK_ELEMENTS, count) - first * BLOCK_ELEMENTS
