"""Layer and root-mean-square normalisation, which read their code directly in backward.

Nothing has to be observed first: the operator returns what the call would.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from daf.core.policy import Need
from daf.operators.fusion_table import CallSite
from daf.operators.operator_context import InputHolder
from daf.operators.protocol import FusedOperator, OperatorCall
from daf.operators.row_norm.call import SIGNATURES, objection, row_norm_of
from daf.operators.row_norm.function import FusedRowNorm, RowNorm, run_forward
from daf.saved_tensors.packed_tensor import Term


class RowNormOperator(FusedOperator):
    """``F.layer_norm`` and ``F.rms_norm``, each as one operator."""

    name = "row_norm"
    functions = frozenset(SIGNATURES)

    def replacement(self, call: OperatorCall) -> Callable[[], Any] | None:
        """Return the operator, wherever it computes the same."""
        norm = call.read(SIGNATURES[call.function])
        reason = objection(norm, self.context.hooks.hook)
        site = self.context.site(call.name)
        self.table.decide(site, "" if reason else call.name, reason)
        if norm is None or reason:
            return None
        return partial(self._run, row_norm_of(norm), site)

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
    """Return the bytes of the tensors that plain PyTorch would save beside the input."""
    rows = 4 * (norm.x.numel() // norm.length)
    if norm.moments.centred:
        return rows, rows  # mean and inverse deviation
    if norm.weight is None or norm.x.is_cuda:
        return (rows,)
    return rows, norm.x.nbytes  # several operators in a row: PyTorch has none on the CPU
