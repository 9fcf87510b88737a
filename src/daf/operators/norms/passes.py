"""The passes of a normalisation over memory order: statistics, forward, backward.

Tensors are dense; float32 on the host, any float with a code on a device. Normalised values come
from a code or from the input itself (:class:`KeptValues`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from daf.codecs.codes import ElementsCode, ValueCode, Values, opened, pinned
from daf.core.policy import Method, Treatment
from daf.kernels import RowMoments
from daf.kernels.devices import backend_of
from daf.kernels.normalisation import (
    Channels,
    CodedValues,
    Decoding,
    Encoding,
    Geometry,
    KeptValues,
    MaskedGradient,
    NormOutput,
    RowBackward,
    Sums,
)

NormValues = ValueCode | KeptValues


class ComputedValues(Values):
    """The values of a resident input, recomputed when read: a whole code of no bytes."""

    __slots__ = ("_forward", "_read", "count")
    in_store = False
    nbytes = 0
    treatment = Treatment(Method.KEEP, 32)

    def __init__(self, read: Callable[[], Tensor], count: int, forward: Channels) -> None:
        self._read = read
        self._forward = forward
        self.count = count

    def _write(self, decoding: Decoding) -> None:
        """Write the values bit for bit as ``emit`` did."""
        backend_of(decoding.out).derive(KeptValues(self._read(), self._forward), decoding)


def unmeasured(x: Tensor, length: int) -> Channels:
    """Allocate the affine of each row of ``length`` elements, in two tensors on x's device."""
    count = x.numel() // length
    scale, shift = (torch.empty(count, dtype=torch.float32, device=x.device) for _ in range(2))
    return Channels(scale, shift, length)


def emit(x: Tensor, forward: Channels, output: NormOutput, rows: RowMoments | None = None) -> None:
    """Run forward without a code; with ``rows`` the affine is measured on the way."""
    with opened(output) as written:
        backend_of(x).emit(Encoding(x, forward, rows, written))


def sum_gradient(
    values: NormValues,
    gradient: Tensor,
    mask: ElementsCode | None,
    written: Tensor | None,
    geometry: Geometry,
) -> Sums:
    """Run backward's first pass: sums of the masked gradient and of its products with the values.

    ``written`` receives the masked gradient; it may be ``gradient`` itself.
    """
    with _read(values) as source, pinned(mask) as chosen:
        masked = MaskedGradient(gradient, chosen, written)
        return backend_of(gradient).sum_gradient(source, masked, geometry)


def write_input_gradient(
    values: NormValues,
    gradient: Tensor,
    mask: ElementsCode | None,
    written: Tensor,
    factors: tuple[Channels, Channels],
) -> None:
    """Run backward's second pass: ``written = masked gradient * b.scale + a(values)``.

    ``factors`` are (a, b); ``written`` may be ``gradient`` itself.
    """
    with _read(values) as source, pinned(mask) as chosen:
        masked = MaskedGradient(gradient, chosen, written)
        backend_of(gradient).write_input_gradient(source, masked, factors)


def backward_rows(values: NormValues, job: RowBackward) -> Sums | None:
    """Run backward of a normalisation of rows; all its passes read the same planes."""
    with _read(values) as source:
        return backend_of(job.gradient).backward_rows(source, job)


@contextmanager
def _read(values: NormValues) -> Iterator[CodedValues | KeptValues]:
    if isinstance(values, KeptValues):
        yield values
        return
    with values.planes.pinned() as planes:
        yield values.at(planes)
