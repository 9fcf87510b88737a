"""A normalisation of rows: forward with or without a code, and backward in one pass.

Tensors are dense float32 on the CPU, contiguous; a row is ``length`` elements.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from daf.codecs.cpu import Channels, ValueCode
from daf.core.policy import Method
from daf.kernels import Emission, RowGradient, RowMoments
from daf.kernels.cpu import channel_norm, row_norm


class RowSums(NamedTuple):
    """(length,) float64 each: of the result's gradient, and of its products with the values."""

    gradient: Tensor
    products: Tensor


class KeptRows(NamedTuple):
    """The values of an input that is held as it is: ``affine`` of it."""

    x: Tensor
    affine: Channels


class RowBackward(NamedTuple):
    """What backward is given besides values.

    ``gradient`` is that of the result; ``written`` receives the input's and may be ``gradient``
    itself, or None; ``gamma`` is (length,) or None; ``scale`` (rows,) is the affine's;
    without ``summing`` no sums are taken.
    """

    length: int
    centred: bool
    gradient: Tensor
    written: Tensor | None
    gamma: Tensor | None
    scale: Tensor
    summing: bool

    def pointers(self, sums: RowSums | None, workspace: Tensor) -> RowGradient:
        """The same as addresses; ``sums`` are written; keep all alive while they are used."""
        return RowGradient(
            self.length,
            self.centred,
            self.gradient.data_ptr(),
            self.written.data_ptr() if self.written is not None else 0,
            self.gamma.data_ptr() if self.gamma is not None else 0,
            self.scale.data_ptr(),
            sums.gradient.data_ptr() if sums is not None else 0,
            sums.products.data_ptr() if sums is not None else 0,
            workspace.data_ptr(),
        )


def backward_rows(asked: RowBackward, values: ValueCode | KeptRows) -> RowSums | None:
    """One pass; nothing is decoded but the row at hand."""
    threads, count = torch.get_num_threads(), asked.gradient.numel()
    room = torch.empty(2, asked.length, dtype=torch.float64)
    sums = RowSums(*room) if asked.summing else None
    size = row_norm.workspace_bytes(count, asked.length, threads)
    workspace = torch.empty(size, dtype=torch.uint8)
    pointers = asked.pointers(sums, workspace)
    if isinstance(values, KeptRows):
        source, affine = values.x.data_ptr(), values.affine.pointers()
        row_norm.backward_kept(source, count, affine, pointers, threads)
        return sums
    with values.planes.pinned() as view:
        if values.treatment.method is Method.ROTATED:
            rounds, key = values.treatment.rounds, values.key
            row_norm.backward_rotated(view.fields, rounds, key, pointers, threads)
        else:
            row_norm.backward_minmax(view.fields, pointers, threads)
    return sums


def unmeasured(x: Tensor, length: int) -> Channels:
    """Room for the affine of each row, where the tensor is."""
    # Two tensors: the second may be forgotten before the first.
    count = x.numel() // length
    scale, shift = (torch.empty(count, dtype=torch.float32, device=x.device) for _ in range(2))
    return Channels(scale, shift, length)


def emit_rows(x: Tensor, affine: Channels, moments: RowMoments, written: Emission) -> None:
    """Forward without a code; ``affine`` is measured on the way."""
    threads = torch.get_num_threads()
    channel_norm.emit(x.data_ptr(), x.numel(), affine.pointers(), written, threads, moments)
