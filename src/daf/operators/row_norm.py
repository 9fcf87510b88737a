"""Layer and root-mean-square normalisation, each as one autograd operator."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from daf.codecs.layout import layout_of
from daf.core.policy import Need
from daf.kernels import RowMoments
from daf.kernels.devices import backend_of, is_coded_on_device
from daf.kernels.normalisation import Channels, NormOutput, RowBackward
from daf.operators import eligibility
from daf.operators.fused_function import FusedFunction, Gradients
from daf.operators.fusion_table import CallSite
from daf.operators.norms.save import NormSave, Source, reading
from daf.operators.operator_context import InputHolder
from daf.operators.protocol import FusedOperator, OperatorCall
from daf.saved_tensors.ledger import Holding
from daf.saved_tensors.norm_inputs import copied_affine
from daf.saved_tensors.packed_tensor import Kept, Stored, Term


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


class RowsHeld(NormSave):
    """What a fused normalisation of rows holds for backward; a code frees the affine's shift."""

    __slots__ = ("_centred", "_epsilon", "_length", "_scale", "_shape", "_shift")

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
        self._epsilon, self._centred = norm.moments
        present = norm.weight if norm.weight is not None else norm.bias
        self._shape = torch.Size() if present is None else present.shape
        self._scale = affine.scale
        self._shift = affine.shift if isinstance(source, Kept) else None

    @property
    def forward(self) -> Channels:
        assert self._shift is not None
        return Channels(self._scale, self._shift, self._length)

    @property
    def inverse(self) -> Channels:
        """The affine from the values to the input, less the rows' means where it subtracts these.

        Means are not held; derivatives of any order are the same without.
        """
        inverse = self._scale.reciprocal()
        return Channels(inverse, torch.zeros_like(inverse), self._length)

    def run_again(self, x: Tensor, *parameters: Tensor | None) -> Tensor:
        """Return PyTorch's own result."""
        weight, bias = (each if each is None else each.flatten() for each in parameters)
        rows, shape = x.reshape(-1, self._length), (self._length,)
        if self._centred:
            return F.layer_norm(rows, shape, weight, bias, self._epsilon).view_as(x)
        return F.rms_norm(rows, shape, weight, self._epsilon).view_as(x)

    def backward(self, gradient: Tensor, needs: Sequence[bool], *, owned: bool) -> Gradients:
        """Return the gradients of the input, weight and bias."""
        x = None
        if needs[0]:
            x = gradient if owned else self.layout.empty()
        summed = needs[1] or needs[2]
        job = RowBackward(self._length, self._centred, gradient, x, self.gamma, self._scale, summed)
        with reading(self.read_values()) as (values, _):
            sums = backend_of(gradient).backward_rows(values, job)
        if sums is None:
            return x, None, None
        weight = sums.products.float().view(self._shape) if needs[1] else None
        bias = sums.sums.float().view(self._shape) if needs[2] else None
        return x, weight, bias


def run_forward(norm: RowNorm, holder: InputHolder) -> tuple[Tensor, RowsHeld]:
    """Return the result, in the input's layout, and what backward needs."""
    out = layout_of(norm.x).empty()
    result = copied_affine(norm.weight, norm.bias, 1)
    rows, device = norm.x.numel() // norm.length, norm.x.device
    # In two tensors: a code frees the shift.
    scale, shift = (torch.empty(rows, dtype=torch.float32, device=device) for _ in range(2))
    affine = Channels(scale, shift, norm.length)
    source = holder.normalise(norm.x, affine, NormOutput(out, result), norm.moments)
    kept_bytes = affine.nbytes if isinstance(source, Kept) else affine.scale.nbytes
    counted = holder.stored(result) if result is not None else None
    return out, RowsHeld(norm, source, affine, counted, holder.count(kept_bytes))


# A program there reads eight rows from end to end, and a part is at least 256 rows.
LONGEST_ROW_ON_DEVICE = 1 << 14


class LayerNormArguments(NamedTuple):
    """The arguments of ``F.layer_norm``, in its order."""

    input: Any
    normalized_shape: Any
    weight: Any = None
    bias: Any = None
    eps: Any = 1e-5


class RmsNormArguments(NamedTuple):
    """The arguments of ``F.rms_norm``, in its order."""

    input: Any
    normalized_shape: Any
    weight: Any = None
    eps: Any = None

    @property
    def bias(self) -> None:
        """None: it has none."""


RowNormArguments = LayerNormArguments | RmsNormArguments
SIGNATURES: Mapping[Callable[..., Any], Callable[..., RowNormArguments]] = {
    F.layer_norm: LayerNormArguments,
    F.rms_norm: RmsNormArguments,
}


def row_norm_of(call: RowNormArguments) -> RowNorm:
    """Return what a call that met no ``objection`` computes."""
    epsilon = torch.finfo(call.input.dtype).eps if call.eps is None else call.eps  # as PyTorch
    moments = RowMoments(float(epsilon), isinstance(call, LayerNormArguments))
    return RowNorm(call.input, call.weight, call.bias, math.prod(call.normalized_shape), moments)


def objection(call: RowNormArguments | None, pack: Callable[..., Any]) -> str:
    """Return why this call must stay PyTorch's, else empty; ``pack`` is the saved-tensor hook."""
    if call is None or not _is_shape(call):
        return "its arguments are odd"
    x = call.input
    if not eligibility.is_plain(x):
        return "its input is no float32 tensor that there are kernels for"
    if not x.is_contiguous() or not eligibility.has_usual_strides(x):
        return "its input is not contiguous"
    if reason := eligibility.size_objection(x):
        return reason
    shape = tuple(call.normalized_shape)
    if is_coded_on_device(x) and math.prod(shape) > LONGEST_ROW_ON_DEVICE:
        return "its rows are longer than a GPU's kernels are made for"
    vectors = (call.weight, call.bias)
    if not all(vector is None or eligibility.is_vector(vector, shape, x) for vector in vectors):
        return "its parameters are no contiguous float32 tensors of a row's shape"
    if not (call.eps is None or (isinstance(call.eps, (int, float)) and call.eps >= 0)):
        return "its epsilon is no number of 0 or more"
    return eligibility.autocast_objection(x) or eligibility.autograd_objection((x, *vectors), pack)


def _is_shape(call: RowNormArguments) -> bool:
    """True if the normalised dimensions are the last ones of the input."""
    shape = call.normalized_shape
    if not isinstance(call.input, Tensor) or not isinstance(shape, (tuple, list, torch.Size)):
        return False
    return len(shape) > 0 and tuple(call.input.shape[-len(shape) :]) == tuple(shape)


class RowNormOperator(FusedOperator):
    """``F.layer_norm`` and ``F.rms_norm``, each as one operator."""

    name = "row_norm"
    functions = frozenset(SIGNATURES)

    def replacement(self, call: OperatorCall) -> Callable[[], Any] | None:
        norm = call.read(SIGNATURES[call.function])
        reason = objection(norm, self.context.hooks.hook)
        site = self.context.site(call.name)
        self.table.decide(site, "" if reason else call.name, reason)
        return None if norm is None or reason else partial(self._run, row_norm_of(norm), site)

    def _run(self, norm: RowNorm, site: CallSite) -> Tensor:
        context, tracker = self.context, self.context.state.tracker
        tracker.next_call(site.operator)
        # PyTorch's own operator saves beta, where there is one, before its input.
        record = tracker.record(*site, int(norm.bias is not None))
        unmade_bytes = _bytes_beside(norm)
        holder = InputHolder(context, norm.x, Need.NORM, record, unmade_bytes=unmade_bytes)
        inputs = (norm.x, norm.weight, norm.bias)
        call = context.fuse(FusedRowNorm, inputs, holder, lambda: run_forward(norm, holder))
        if context.policy.rederive:
            values = call.held.values(context.state.ledger, norm.x.numel())
            context.learn(call, (Term(values, call.held.result),))
        return context.settle(call)


def _bytes_beside(norm: RowNorm) -> tuple[int, ...]:
    rows = 4 * (norm.x.numel() // norm.length)
    if norm.moments.centred:
        return rows, rows  # mean and inverse deviation
    if norm.weight is None or norm.x.is_cuda:
        return (rows,)
    return rows, norm.x.nbytes  # several operators in a row: PyTorch has none on the CPU
