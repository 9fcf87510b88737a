"""Layer and root-mean-square normalisation, each as one autograd operator.

Forward reads its input once: it measures, normalises and codes rows and writes them as the result,
a cacheful at a time. Backward reads the planes once, a row at a time. With g the gradient times
gamma, y the normalised value and r the inverse deviation, the input's gradient is

    r * (g - mean(g) - y * mean(g * y))

without ``mean(g)`` where no mean was subtracted (Ba et al., arXiv 1607.06450; Zhang and Sennrich,
arXiv 1910.07467), written over the result's gradient where nobody else holds that. The gradients of
gamma and beta come from the same pass.

The operators behind derive their input from the same code (``PackedTensor.recipe``), so that one
code serves the normalisation and all linear layers that read its result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from daf.codecs.layout import layout_of
from daf.codecs.scratch import Scratch
from daf.core.errors import SavedTensorError
from daf.kernels import RowMoments
from daf.kernels.normalisation import Channels, NormOutput, RowBackward
from daf.operators.fused_function import FusedFunction
from daf.operators.norms.passes import backward_rows, unmeasured
from daf.operators.norms.save import NormSave, Source
from daf.operators.operator_context import InputHolder
from daf.saved_tensors.ledger import Holding
from daf.saved_tensors.norm_inputs import copied_affine
from daf.saved_tensors.packed_tensor import Kept, Stored


class FusedRowNorm(FusedFunction):
    """The autograd function of a fused normalisation of rows."""


class RowNorm(NamedTuple):
    """One normalisation of rows of ``length`` elements.

    ``x`` is contiguous float32; ``weight`` and ``bias`` have ``length`` float32 elements or are
    None. ``moments.centred`` is True for layer and False for root-mean-square normalisation.
    """

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    length: int
    moments: RowMoments

    @property
    def parameter_shape(self) -> torch.Size:
        """The shape of weight and bias; empty where there are none."""
        present = self.weight if self.weight is not None else self.bias
        return torch.Size() if present is None else present.shape


class RowsHeld(NormSave):
    """What a fused normalisation of rows holds for backward.

    ``affine`` is that of the rows. A code needs its scale only, and ``shift`` is freed.
    """

    __slots__ = ("_centred", "_length", "_scale", "_shape", "_shift")

    def __init__(
        self,
        norm: RowNorm,
        source: Source,
        affine: Channels,
        result: Stored[Channels] | None,
        counted: Holding,
    ) -> None:
        super().__init__(norm.x, source, result, counted)
        self._length = norm.length
        self._centred = norm.moments.centred
        self._shape = norm.parameter_shape
        self._scale = affine.scale
        self._shift = affine.shift if isinstance(source, Kept) else None

    @property
    def forward(self) -> Channels:
        """The affine from the input to the normalised values, where the input is held."""
        assert self._shift is not None
        return Channels(self._scale, self._shift, self._length)

    def restore(self, scratch: Scratch) -> Tensor:
        """Return the normalisation's input, if that is held.

        Raises:
            SavedTensorError: only what its gradient needs is held.
        """
        if isinstance(self.source, Kept):
            return self.source.restore(scratch)
        raise SavedTensorError(
            "asked for the input of a fused normalisation of rows; only its normalised value and "
            "the rows' scales are held, which its gradient needs. Run without fused operators "
            "(fused=False) to read it"
        )

    def backward(
        self, gradient: Tensor, needs: Sequence[bool], *, owned: bool
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of the input, weight and bias."""
        x = None
        if needs[0]:
            x = gradient if owned else self.layout.empty()
        summing = needs[1] or needs[2]
        job = RowBackward(
            self._length, self._centred, gradient, x, self.gamma, self._scale, summing
        )
        sums = backward_rows(self.read_values(), job)
        if sums is None:
            return x, None, None
        weight = sums.products.float().view(self._shape) if needs[1] else None
        bias = sums.sums.float().view(self._shape) if needs[2] else None
        return x, weight, bias


def run_forward(norm: RowNorm, holder: InputHolder) -> tuple[Tensor, RowsHeld]:
    """Return the result, in the input's layout, and what backward needs."""
    out = layout_of(norm.x).empty()
    result = copied_affine(norm.weight, norm.bias, 1)
    affine = unmeasured(norm.x, norm.length)
    source = holder.normalise(norm.x, affine, NormOutput(out, result), norm.moments)
    kept_bytes = affine.nbytes if isinstance(source, Kept) else affine.scale.nbytes
    counted = holder.stored(result) if result is not None else None
    return out, RowsHeld(norm, source, affine, counted, holder.count(kept_bytes))
