"""Batch normalisation, residual addition and ReLU (or ReLU6) as one autograd operator."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from daf.codecs.codes import ElementsCode
from daf.codecs.layout import layout_of
from daf.kernels import normalisation as norms
from daf.kernels.devices import backend_of
from daf.operators import eligibility
from daf.operators.fused_function import FusedFunction, Gradients
from daf.operators.norms.save import NormSave, Source, reading
from daf.operators.operator_context import InputHolder
from daf.saved_tensors.ledger import Holding
from daf.saved_tensors.norm_inputs import channel_stride, copied_affine
from daf.saved_tensors.packed_tensor import Stored


class FusedNorm(FusedFunction):
    """The autograd function of a fused batch normalisation."""


class Norm(NamedTuple):
    """One training-mode batch normalisation.

    ``x`` is dense: float32, or on a device any float that has a code; ``weight`` and ``bias``
    are (channels,) float32 or None.
    """

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    statistics: norms.Statistics
    geometry: norms.Geometry
    epsilon: float


class NormHeld(NormSave):
    """What a fused batch normalisation holds for backward."""

    __slots__ = ("epsilon", "geometry", "mask", "statistics")

    def __init__(
        self,
        norm: Norm,
        source: Source,
        mask: Stored[ElementsCode] | None,
        result: Stored[norms.Channels] | None,
        counted: Holding,
    ) -> None:
        super().__init__(norm.x, source, result, counted)
        self.geometry, self.epsilon = norm.geometry, norm.epsilon
        self.mask, self.statistics = mask, norm.statistics

    @property
    def forward(self) -> norms.Channels:
        return self.statistics.forward(self.geometry.inner)

    @property
    def inverse(self) -> norms.Channels:
        return self.statistics.inverse(self.geometry.inner)

    def run_again(self, x: Tensor, *parameters: Tensor | None) -> Tensor:
        """Return PyTorch's own result."""
        weight, bias = parameters
        return F.batch_norm(x, None, None, weight, bias, training=True, eps=self.epsilon)

    def differentiable(
        self, gradient: Tensor, inputs: Sequence[Tensor | None], needs: Sequence[bool]
    ) -> Gradients:
        """Return gradients that can be differentiated themselves, the addend's too."""
        if self.mask is not None:
            passed = self.layout.empty()
            self.mask.content.decode(passed, low=0.0, high=1.0)
            gradient = torch.where(passed.bool(), gradient, 0)
        addend = gradient if needs[3] else None
        return (*super().differentiable(gradient, inputs, needs[:3]), addend)

    def backward(self, gradient: Tensor, needs: Sequence[bool], *, owned: bool) -> Gradients:
        """Return the gradients of the input, weight, bias and addend."""
        values, backend = self.read_values(), backend_of(gradient)
        mask = self.mask.content if self.mask else None
        addend = gradient if needs[3] else None
        if addend is not None and mask is not None and not owned:
            addend = self.layout.empty()
        written = addend if mask is not None else None
        with reading(values, mask) as (source, planes):
            given = norms.MaskedGradient(gradient, planes, written)
            sums = backend.sum_gradient(source, given, self.geometry)
        x, weight, bias = None, self._vector(needs[1]), self._vector(needs[2])
        vectors = (self.statistics.inverse_deviation, self.gamma, (weight, bias))
        factors = backend.gradient_factors(sums, self.geometry, *vectors)
        if needs[0]:
            masked, mask = (addend, None) if addend is not None else (gradient, mask)
            x = gradient if owned and addend is None else self.layout.empty()
            with reading(values, mask) as (source, planes):
                given = norms.MaskedGradient(masked, planes, x)
                backend.write_input_gradient(source, given, factors)
        return x, weight, bias, addend

    def _vector(self, needed: bool) -> Tensor | None:
        return torch.empty_like(self.statistics.mean) if needed else None


def run_forward(
    norm: Norm, addend: Tensor | None, most: float | None, holder: InputHolder, *, owned: bool
) -> tuple[Tensor, NormHeld]:
    """Return the result, in the input's layout, and what backward needs.

    Args:
        norm: the normalisation.
        addend: of the input's dtype and layout; None: nothing is added.
        most: the upper bound of the ReLU that comes last; None: there is no ReLU.
        holder: holds the input.
        owned: nobody else holds the input, which is overwritten if it is coded.
    """
    # Every block is read, and coded from registers, before it is written.
    out = _over(norm.x) if owned and not holder.is_kept else layout_of(norm.x).empty()
    result = copied_affine(norm.weight, norm.bias, norm.geometry.inner)
    mask = None if most is None else holder.new_mask(norm.x)
    written = norms.NormOutput(out, result, addend, mask, math.inf if most is None else most)
    source = holder.normalise(norm.x, norm.statistics.forward(norm.geometry.inner), written)
    if mask is not None:
        mask.planes.seal()
    counted = [holder.stored(part) if part is not None else None for part in (mask, result)]
    statistics = holder.count(sum(vector.nbytes for vector in norm.statistics))
    return out, NormHeld(norm, source, counted[0], counted[1], statistics)


def _over(x: Tensor) -> Tensor:
    """Return another tensor on the memory of ``x``, which autograd takes for one of its own."""
    place = (x.storage_offset(), x.shape, x.stride())
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage(), *place)


class NormArguments(NamedTuple):
    """The arguments of ``F.batch_norm``, in its order."""

    input: Any
    running_mean: Any = None
    running_var: Any = None
    weight: Any = None
    bias: Any = None
    training: Any = False
    momentum: Any = 0.1
    eps: Any = 1e-5

    def start(self) -> Norm:
        """Take the statistics, and update the running ones; the call met no ``objection``."""
        x, running = self.input, None
        if self.running_mean is not None:
            running = norms.RunningStatistics(self.running_mean, self.running_var, self.momentum)
        geometry = norms.Geometry(x.shape[1], channel_stride(x) or 1, x.numel())
        with torch.no_grad():
            statistics = backend_of(x).channel_statistics(x.detach(), geometry, self.eps, running)
        return Norm(x, self.weight, self.bias, statistics, geometry, self.eps)


def objection(call: NormArguments | None, pack: Callable[..., Any]) -> str:
    """Return why this call must stay PyTorch's, else empty; ``pack`` is the saved-tensor hook."""
    if call is None:
        return "its arguments are odd"
    if call.training is not True:
        return "it does not normalise by the batch's statistics"
    x = call.input
    if reason := eligibility.input_objection(x):
        return reason
    if x.dim() < 2 or x.numel() // x.shape[1] < 2:
        return "it has one value per channel"
    vectors = (call.weight, call.bias, call.running_mean, call.running_var)
    channels = (x.shape[1],)
    if not all(v is None or eligibility.is_vector(v, channels, x) for v in vectors):
        return "its parameters or statistics are no contiguous float32 vectors"
    if (call.running_mean is None) != (call.running_var is None):
        return "it has only one of the running statistics"
    if not isinstance(call.momentum, (int, float)) or not isinstance(call.eps, (int, float)):
        return "its momentum or epsilon is no number"
    return eligibility.autocast_objection(x) or eligibility.autograd_objection(
        (x, call.weight, call.bias), pack
    )
