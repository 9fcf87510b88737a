"""Batch normalisation, residual addition and ReLU (or ReLU6) as one autograd operator.

Forward reads the input twice: once for the statistics, once to write the
result, the exact 1-bit mask and the code of the normalised value, a few blocks
at a time; into the input's own memory where nobody else holds that. Backward
reads the planes block by block, twice: sums of the gradient g and of g times
the value v for each channel, then the input's gradient

    gamma * inverse_deviation * (g - mean(g) - v * mean(g * v))

(Ioffe and Szegedy, 2015), written over the incoming gradient where nobody else
holds that. Nothing is decoded beyond the block at hand.

The same code and mask tell the operator behind what its input was
(``PackedTensor.recipe``), so that a convolution holds nothing of its own.

What is held is handed to autograd's saved-tensor hooks as any other saved
tensor is, and freed with it. Second derivatives are refused by autograd.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from daf.codecs.codes import MaskCode, ValueCode, Values
from daf.codecs.layout import layout_of
from daf.codecs.scratch import Scratch
from daf.kernels.devices import backend_of
from daf.kernels.normalisation import Channels, Geometry, KeptValues, NormOutput, Statistics
from daf.operators.norms.passes import (
    ComputedValues,
    NormValues,
    emit,
    sum_gradient,
    write_input_gradient,
)
from daf.operators.operator_context import InputHolder
from daf.saved_tensors.packed_tensor import Kept, PackedTensor, Stored, asked_for
from daf.torch_compat.autograd_graph import without_torch_function
from daf.torch_compat.ownership import holders_of, sole_holders


class Norm(NamedTuple):
    """One training-mode batch normalisation.

    ``x`` is dense: float32, or on a device any float that has a code; ``weight`` and ``bias``
    are (channels,) float32 or None.
    """

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    statistics: Statistics
    geometry: Geometry

    def result(self) -> Channels | None:
        """The normalised value to the result; a copy, since the optimizer may be faster."""
        gamma, beta = self.weight, self.bias
        if gamma is None and beta is None:
            return None
        mean = self.statistics.mean
        scale = gamma.detach().clone() if gamma is not None else torch.ones_like(mean)
        shift = beta.detach().clone() if beta is not None else torch.zeros_like(mean)
        return Channels(scale, shift, self.geometry.inner)


class Gradients(NamedTuple):
    """Of the input, weight, bias and addend; None where nobody asked."""

    x: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    addend: Tensor | None


class NormHeld(PackedTensor):
    """What a fused normalisation holds for backward: values, mask, vectors of the channels."""

    __slots__ = (
        "_layout",
        "_source",
        "_vectors",
        "geometry",
        "mask",
        "result",
        "statistics",
    )

    def __init__(
        self,
        norm: Norm,
        source: Stored[ValueCode] | Kept,
        mask: Stored[MaskCode] | None,
        result: Stored[Channels] | None,
        vectors: object = None,
    ) -> None:
        """Hold ``source`` (the code of the values, or the input) and what goes with it.

        ``vectors`` is kept for as long as this is: what accounts for the statistics.
        """
        super().__init__()
        self._layout = layout_of(norm.x)
        self._source = source
        self._vectors = vectors
        self.geometry = norm.geometry
        self.mask = mask
        self.result = result
        self.statistics = norm.statistics

    @property
    def code(self) -> Stored[ValueCode] | None:
        """The code of the normalised value; None where the input itself is held."""
        return None if isinstance(self._source, Kept) else self._source

    def values(self) -> Stored[ValueCode] | Values:
        """The normalised values for whoever derives something from them: coded, or computed again
        from the input, which they then hold too.
        """
        source = self._source
        if not isinstance(source, Kept):
            return source
        forward = self.statistics.forward(self.geometry.inner)
        count = self.geometry.elements
        return ComputedValues(lambda: source.restore(Scratch()), count, forward)

    def restore(self, scratch: Scratch) -> Tensor:
        """The normalisation's input."""
        if isinstance(self._source, Kept):
            return self._source.restore(scratch)
        mean, inverse_deviation = self.statistics
        out = scratch.empty(self._layout)
        inner = self.geometry.inner
        self._source.content.decode(out, Channels(inverse_deviation.reciprocal(), mean, inner))
        return out

    def backward(self, gradient: Tensor, needs: tuple[bool, ...], *, owned: bool) -> Gradients:
        """Gradients of what ``needs`` says: input, weight, bias, addend.

        ``owned``: nobody else holds ``gradient``, so that it may be written over.
        """
        if gradient.stride() != self._layout.stride or gradient.is_neg():
            gradient, owned = self._layout.empty().copy_(gradient), True
        values = self._values()
        mask = self.mask.content if self.mask else None
        addend = gradient if needs[3] else None
        if addend is not None and mask is not None and not owned:
            addend = self._layout.empty()
        written = addend if mask is not None else None
        sums = sum_gradient(values, gradient, mask, written, self.geometry)
        x, weight, bias = None, self._vector(needs[1]), self._vector(needs[2])
        gamma = self.result.content.scale if self.result is not None else None
        inverse_deviation = self.statistics.inverse_deviation
        vectors = (inverse_deviation, gamma, (weight, bias))
        factors = backend_of(gradient).gradient_factors(sums, self.geometry, *vectors)
        if needs[0]:
            source, mask = (addend, None) if addend is not None else (gradient, mask)
            x = gradient if owned and addend is None else self._layout.empty()
            write_input_gradient(values, source, mask, x, factors)
        return Gradients(x, weight, bias, addend)

    def _vector(self, needed: bool) -> Tensor | None:
        return torch.empty_like(self.statistics.mean) if needed else None

    def _values(self) -> NormValues:
        if isinstance(self._source, Kept):
            forward = self.statistics.forward(self.geometry.inner)
            return KeptValues(self._source.restore(Scratch()), forward)
        return self._source.content


def run_forward(
    norm: Norm,
    addend: Tensor | None,
    most: float | None,
    holder: InputHolder,
    *,
    owned: bool = False,
) -> tuple[Tensor, NormHeld]:
    """The result, in the input's layout, and what backward needs.

    ``addend`` is of the input's type and layout. ``most``: a ReLU comes last that lets pass
    no more than this; None: there is none. ``owned``: nobody else holds the input, which is
    written over if it is coded.
    """
    source: Stored[ValueCode] | Kept | None = holder.hold_input(norm.x)
    # Every block is read, and coded from registers, before it is written.
    out = _over(norm.x) if owned and source is None else layout_of(norm.x).empty()
    result = norm.result()
    mask = None if most is None else holder.new_mask(norm.x)
    written = NormOutput(out, result, addend, mask, math.inf if most is None else most)
    forward = norm.statistics.forward(norm.geometry.inner)
    if source is None:
        source = holder.encode(norm.x.detach(), forward, written)
    else:
        emit(norm.x, forward, written)
    if mask is not None:
        mask.seal()
    counted = [holder.stored(part) if part is not None else None for part in (mask, result)]
    vectors = holder.stored(Channels(*norm.statistics, norm.geometry.inner))
    return out, NormHeld(norm, source, counted[0], counted[1], vectors)


def _over(x: Tensor) -> Tensor:
    """Another tensor on the memory of ``x``, which autograd takes for one of its own."""
    place = (x.storage_offset(), x.shape, x.stride())
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage(), *place)


class FusedNorm(torch.autograd.Function):
    """The operator. Whoever applies it settles the one save it makes, that of the input."""

    reads_only_what_it_saved = True  # gamma is copied: see parameter_reads

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        _weight: Tensor | None,
        _bias: Tensor | None,
        _addend: Tensor | None,
        run: Callable[[], Tensor],
    ) -> Tensor:
        """What ``run`` computes of them; see :func:`run_forward`."""
        ctx.save_for_backward(x)
        ctx.set_materialize_grads(False)
        return run()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        """From what is held in the place of the input."""
        if gradient is None:
            return (None,) * 5
        with without_torch_function():
            owned = holders_of(gradient) == sole_holders()
            saved = asked_for(lambda: ctx.saved_tensors)
            assert saved is not None
            assert isinstance(saved.held, NormHeld)
            needs = ctx.needs_input_grad[:4]
            return (*saved.held.backward(gradient, needs, owned=owned), None)
