"""Layer and root-mean-square normalisation, each as one autograd operator.

Forward reads its input once: rows are measured, normalised, coded and written as
the result a cacheful at a time. Backward reads the planes once, a row at a
time. With g the gradient times gamma, y the normalised value and r the inverse
deviation, the input's gradient is

    r * (g - mean(g) - y * mean(g * y))

without ``mean(g)`` where nothing was subtracted (Ba et al., arXiv 1607.06450;
Zhang and Sennrich, arXiv 1910.07467), written over the result's gradient where
nobody else holds that. The gradients of gamma and beta come from the same pass.

The code also tells the operators behind what their input was
(``PackedTensor.recipe``), so that one serves the normalisation and all linear layers
that read its result. Second derivatives are refused by autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from daf.codecs.codes import ValueCode, Values
from daf.codecs.layout import layout_of
from daf.codecs.scratch import Scratch
from daf.core.errors import SavedTensorError
from daf.kernels import RowMoments
from daf.kernels.normalisation import Channels, KeptValues, NormOutput, RowBackward
from daf.operators.norms.passes import ComputedValues, NormValues, backward_rows, emit, unmeasured
from daf.operators.operator_context import InputHolder
from daf.saved_tensors.packed_tensor import Kept, PackedTensor, Stored, asked_for
from daf.torch_compat.autograd_graph import without_torch_function
from daf.torch_compat.ownership import holders_of, sole_holders


class RowNorm(NamedTuple):
    """One normalisation of rows of ``length`` elements.

    ``x`` is contiguous float32; ``weight`` and ``bias`` have ``length`` float32 elements or are
    None; ``moments.centred`` tells layer normalisation from root-mean-square normalisation.
    """

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    length: int
    moments: RowMoments

    def result(self) -> Channels | None:
        """The normalised value to the result; a copy, since the optimizer may be faster."""
        if self.weight is None and self.bias is None:
            return None
        return Channels(self._vector(self.weight, 1.0), self._vector(self.bias, 0.0), 1)

    def _vector(self, tensor: Tensor | None, otherwise: float) -> Tensor:
        if tensor is None:
            where = self.x.device
            return torch.full((self.length,), otherwise, dtype=torch.float32, device=where)
        return tensor.detach().reshape(-1).clone()


class RowGradients(NamedTuple):
    """Of the input, weight and bias; None where nobody asked."""

    x: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


class RowsHeld(PackedTensor):
    """What a fused normalisation of rows holds: values, scales of the rows, gamma and beta.

    ``affine`` holds both vectors of the rows only where the input itself is held; a code needs
    the first one.
    """

    __slots__ = (
        "_affine",
        "_channels",
        "_layout",
        "_length",
        "_moments",
        "_rows",
        "_scale",
        "_source",
        "result",
    )

    def __init__(
        self,
        norm: RowNorm,
        source: Stored[ValueCode] | Kept,
        scale: Tensor,
        affine: Stored[Channels] | Stored[Scales],
        result: Stored[Channels] | None,
    ) -> None:
        super().__init__()
        self._layout = layout_of(norm.x)
        self._length = norm.length
        self._moments = norm.moments
        self._source = source
        self._scale = scale
        self._affine = affine
        self.result = result

    @property
    def code(self) -> Stored[ValueCode] | None:
        """The code of the normalised value; None where the input itself is held."""
        return None if isinstance(self._source, Kept) else self._source

    def values(self) -> Stored[ValueCode] | Values:
        """The normalised values for whoever derives something from them: see ``NormHeld``."""
        source = self._source
        if not isinstance(source, Kept):
            return source
        affine = self._affine.content
        assert isinstance(affine, Channels)
        count = affine.scale.numel() * self._length
        return ComputedValues(lambda: source.restore(Scratch()), count, affine)

    def restore(self, scratch: Scratch) -> Tensor:
        """The normalisation's input, if that is held.

        Raises:
            SavedTensorError: only what its gradient needs is held.
        """
        if isinstance(self._source, Kept):
            return self._source.restore(scratch)
        raise SavedTensorError(
            "asked for the input of a fused normalisation of rows; only its normalised value and "
            "the rows' scales are held, which its gradient needs. Run without fused operators "
            "(fused=False) to read it"
        )

    def backward(
        self, gradient: Tensor, needs: tuple[bool, ...], shape: torch.Size, *, owned: bool
    ) -> RowGradients:
        """Gradients of what ``needs`` says: input, weight and bias, the latter two of ``shape``.

        ``owned``: nobody else holds ``gradient``, so that it may be written over.
        """
        if gradient.stride() != self._layout.stride or gradient.is_neg():
            gradient, owned = self._layout.empty().copy_(gradient), True
        x = None
        if needs[0]:
            x = gradient if owned else self._layout.empty()
        gamma = self.result.content.scale if self.result is not None else None
        centred = self._moments.centred
        summing = needs[1] or needs[2]
        job = RowBackward(self._length, centred, gradient, x, gamma, self._scale, summing)
        sums = backward_rows(self._values(), job)
        weight = sums.products.float().view(shape) if sums is not None and needs[1] else None
        bias = sums.sums.float().view(shape) if sums is not None and needs[2] else None
        return RowGradients(x, weight, bias)

    def _values(self) -> NormValues:
        if not isinstance(self._source, Kept):
            return self._source.content
        affine = self._affine.content
        assert isinstance(affine, Channels)
        return KeptValues(self._source.restore(Scratch()), affine)


class Scales(NamedTuple):
    """The scales of rows on their own, as something with bytes."""

    scale: Tensor

    @property
    def in_store(self) -> bool:
        """This is a tensor of its own."""
        return False

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return self.scale.nbytes


def run_forward(norm: RowNorm, holder: InputHolder) -> tuple[Tensor, RowsHeld]:
    """The result, in the input's layout, and what backward needs."""
    x = norm.x.detach()
    out, result = layout_of(x).empty(), norm.result()
    affine = unmeasured(x, norm.length)
    written = NormOutput(out, result)
    source: Stored[ValueCode] | Kept | None = holder.hold_input(norm.x)
    kept_affine: Any = affine
    if source is None:
        source = holder.encode(x, affine, written, norm.moments)
        kept_affine = Scales(affine.scale)
    else:
        emit(x, affine, written, norm.moments)
    counted = holder.stored(result) if result is not None else None
    return out, RowsHeld(norm, source, affine.scale, holder.stored(kept_affine), counted)


class FusedRowNorm(torch.autograd.Function):
    """The operator. Whoever applies it settles the one save it makes, that of the input."""

    reads_only_what_it_saved = True  # gamma is copied: see parameter_reads

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        run: Callable[[], Tensor],
    ) -> Tensor:
        """What ``run`` computes of them; see :func:`run_forward`."""
        ctx.save_for_backward(x)
        ctx.set_materialize_grads(False)
        present = weight if weight is not None else bias
        ctx.shape = present.shape if present is not None else torch.Size()
        return run()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        """From what is held in the place of the input."""
        if gradient is None:
            return (None,) * 4
        with without_torch_function():
            owned = holders_of(gradient) == sole_holders()
            saved = asked_for(lambda: ctx.saved_tensors)
            assert saved is not None
            assert isinstance(saved.held, RowsHeld)
            needs = ctx.needs_input_grad[:3]
            return (*saved.held.backward(gradient, needs, ctx.shape, owned=owned), None)
