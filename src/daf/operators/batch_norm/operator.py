"""Batch normalisation fused with the addition and the ReLU behind it.

A normalisation takes its statistics and returns a stand-in. The addition and the ReLU recognise
it, and the ReLU computes all three. Every other operator that reads it gets the real tensor,
computed then, when somebody else may hold the normalisation's input; where a ReLU was expected,
later steps do not defer that site. What can no longer be computed raises FusionError.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from daf.core.policy import Method, Need, Treatment
from daf.operators.batch_norm.function import (
    FusedNorm,
    Norm,
    NormArguments,
    NormHeld,
    objection,
    run_forward,
)
from daf.operators.batch_norm.observation import (
    ALONE,
    Observation,
    Rectifier,
    is_plain_addition,
    read_rectifier,
)
from daf.operators.fusion_table import CallSite
from daf.operators.operator_context import FusedCall, InputHolder, OperatorContext
from daf.operators.protocol import FusedOperator, OperatorCall
from daf.operators.stand_ins import Deferred
from daf.saved_tensors.ledger import Plain, Unmade
from daf.saved_tensors.packed_tensor import Derivation, Term
from daf.torch_compat.ownership import is_held_by_none_but

_NORM = "batch_norm"
_MASK = Treatment(Method.MASK, 1)
_ONTO_FIRST = frozenset({"add_", "__iadd__"})
_LAST = "its ReLU"


class BatchNormOperator(FusedOperator):
    """Batch normalisation, residual addition and ReLU (or ReLU6) as one operator."""

    name = _NORM
    functions = frozenset({F.batch_norm})
    alone = ALONE

    def begin(self, context: OperatorContext) -> None:
        super().begin(context)
        self._observation = Observation()
        self._observed: tuple[CallSite, NormArguments] | None = None

    def replacement(self, call: OperatorCall) -> Callable[[], Any] | None:
        """Return the operator, or a stand-in, once a step observed what follows."""
        site, self._observed = self.context.site(_NORM), None
        norm = call.read(NormArguments)
        reason = objection(norm, self.context.hooks.hook)
        if norm is None or reason:
            self._observation.refuse(site, reason)
        elif self.table.is_open(site):
            self._observed = site, norm
        else:
            self.context.state.tracker.next_call(_NORM)
            return partial(self._run, norm, site)
        return None

    def _run(self, call: NormArguments, site: CallSite) -> Tensor:
        norm = call.start()
        if not self.table.is_deferred(site):
            return self._fused(norm, site, None, None)
        return self._defer(site, norm, None)

    def observe(self, call: OperatorCall, result: Any) -> None:
        if call.function not in self.functions:
            self._observation.operator(call, result)
        elif self._observed is not None:
            self._observation.norm(*self._observed, result)
            self._observed = None

    def finish(self) -> None:
        self.table.object(self._observation.objections())
        for site, pattern, reason, deferred in self._observation.verdicts():
            if self.table.is_open(site):
                self.table.decide(site, pattern, reason, deferred=deferred)

    def _defer(self, site: CallSite, norm: Norm, addend: Tensor | None) -> Tensor:
        return self.context.stand_ins.make(
            self._deferred(site, norm, addend), norm.x.shape, norm.x, norm.x.dtype
        )

    def _deferred(self, site: CallSite, norm: Norm, addend: Tensor | None) -> Deferred:
        parts = (norm.x, norm.weight, norm.bias, addend)
        reads = tuple(part for part in parts if part is not None)
        return Deferred(self, site, "batch normalisation", (norm, addend), reads)

    def compute(self, deferred: Deferred) -> Tensor:
        """Return the normalisation, and the sum, without a ReLU."""
        norm, addend = deferred.take(_LAST)
        return self._fused(norm, deferred.site, addend, None)

    def follow(self, call: OperatorCall) -> Tensor | None:
        """Return the result of an addition or ReLU that reads a stand-in."""
        if not torch.is_grad_enabled():
            return None
        if (rectified := read_rectifier(*call)) is not None:
            return self._rectify(*rectified)
        return self._add(call.name, *call.arguments) if is_plain_addition(*call) else None

    def _rectify(self, stand_in: Tensor, rectifier: Rectifier) -> Tensor | None:
        deferred = self._find(stand_in)
        if deferred is None or deferred.result is not None:
            return None
        if self.table.pattern(deferred.site) == ALONE:
            return None
        norm, addend = deferred.take(_LAST, keep=not self.context.can_run_again)
        result = self._fused(norm, deferred.site, addend, rectifier)
        if rectifier.is_in_place:
            deferred.result = result
        return result

    def _add(self, name: str, first: Tensor, second: Tensor) -> Tensor | None:
        """Return the stand-in of a sum, which takes the place of its first deferred operand's."""
        stand_ins = self.context.stand_ins
        deferred, other = self._find(first), second
        if not _may_wait(deferred):
            if name in _ONTO_FIRST:
                return None
            deferred, other = self._find(second), first
        if deferred is None or not _may_wait(deferred) or first is second:
            return None
        beside = stand_ins.find(other)
        addend = other if beside is None else stand_ins.compute(beside)
        if not _fits(addend, deferred.parts[0].x):
            return None
        norm, _ = deferred.take(_LAST, keep=not self.context.can_run_again)
        if name not in _ONTO_FIRST:
            return self._defer(deferred.site, norm, addend)
        stand_ins.change(first, self._deferred(deferred.site, norm, addend))
        return first

    def _find(self, tensor: Tensor) -> Deferred | None:
        deferred = self.context.stand_ins.find(tensor)
        return deferred if deferred is not None and deferred.operator is self else None

    def _fused(
        self, norm: Norm, site: CallSite, addend: Tensor | None, rectifier: Rectifier | None
    ) -> Tensor:
        """Run the operator, with ``rectifier`` (its ReLU) last; CodecError: unsound treatment."""
        context, state = self.context, self.context.state
        owned = is_held_by_none_but(norm)
        record = state.tracker.record(site.module, _NORM, site.call, 0)
        holder = InputHolder(context, norm.x, Need.NORM, record, norm.statistics)
        most = None if rectifier is None else rectifier.most
        inputs = (norm.x, norm.weight, norm.bias, addend)
        call = context.fuse(
            FusedNorm, inputs, holder, lambda: run_forward(norm, addend, most, holder, owned=owned)
        )
        if is_over := call.result.data_ptr() == norm.x.data_ptr():
            state.sources.renew(call.result)
        mask_bytes = 0 if call.held.mask is None else call.held.mask.nbytes
        mask = () if rectifier is None else (self._note_mask(rectifier, mask_bytes, call.result),)
        record.held_bytes -= mask_bytes
        derived = self._learn(call, addend, rectifier)
        return context.settle(call, mask, is_over=is_over, beside_bytes=mask_bytes, derives=derived)

    def _note_mask(self, rectifier: Rectifier, mask_bytes: int, result: Tensor) -> Plain:
        """Report the mask at the ReLU's site; return what plain PyTorch would hold there."""
        state = self.context.state
        path, call = state.tracker.next_call(rectifier.name)
        record = state.tracker.record(path, rectifier.name, call, 0)
        record.need, record.treatment = Need.SIGN, _MASK
        record.held_bytes += mask_bytes
        with state.ledger.counted_at(record):
            if rectifier.is_bounded and not rectifier.is_in_place:  # PyTorch saves its input
                return Plain(state.ledger, Unmade(result.nbytes))
            return state.sources.of(result).plain()

    def _learn(
        self, call: FusedCall[NormHeld], addend: Tensor | None, rectifier: Rectifier | None
    ) -> Derivation | None:
        """Let others compute the result; return the function that only a kept input would tell."""
        context, held = self.context, call.held
        if not context.policy.rederive:
            return None
        term = Term(held.values(context.state.ledger, held.geometry.elements), held.result)
        recipe = function = None
        if rectifier is None or not rectifier.is_bounded:
            recipe = context.state.provenance.added(addend, term, held.mask)
        elif addend is None:
            bounds = 0.0, rectifier.most
            function = Derivation(lambda tensor: tensor.clamp_(*bounds))
            context.state.provenance.learn_function(call.result, function)
            if held.code is None:  # a code's error hides which bound was passed
                recipe = (term._replace(derivation=function),)
        context.learn(call, recipe)
        return function


def _may_wait(deferred: Deferred | None) -> bool:
    return deferred is not None and deferred.parts is not None and deferred.parts[1] is None


def _fits(addend: Tensor, x: Tensor) -> bool:
    is_ordinary = type(addend) in (Tensor, torch.nn.Parameter) and not addend.is_neg()
    is_alike = addend.dtype is x.dtype and addend.device == x.device
    return is_ordinary and is_alike and addend.stride() == x.stride()
