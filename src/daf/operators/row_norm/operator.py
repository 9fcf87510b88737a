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
from daf.operators.row_norm.call import ROW_NORMS, objection, read_call, row_norm_of
from daf.operators.row_norm.function import FusedRowNorm, RowNorm, RowsHeld, run_forward
from daf.saved_tensors.ledger import Plain, Unmade
from daf.saved_tensors.packed_tensor import Term
from daf.saved_tensors.packer import SMALL_BYTES


class RowNormOperator(FusedOperator):
    """``F.layer_norm`` and ``F.rms_norm``, each as one operator."""

    name = "row_norm"
    functions = ROW_NORMS

    def replacement(self, call: OperatorCall) -> Callable[[], Any] | None:
        """The operator, wherever it computes the same."""
        norm = read_call(*call)
        reason = objection(norm, self.context.hooks.hook, SMALL_BYTES)
        path, count = self.context.state.tracker.present_call(call.name)
        site = CallSite(path, call.name, count)
        self.table.decide(site, "" if reason else call.name, reason)
        if norm is None or reason:
            return None
        return partial(self._run, row_norm_of(norm), site)

    def _run(self, norm: RowNorm, site: CallSite) -> Tensor:
        context, tracker = self.context, self.context.state.tracker
        context.note_moment()
        tracker.next_call(site.operator)
        record = tracker.record(*site, _place_of_input(norm))
        made: list[tuple[RowsHeld, InputHolder, tuple[Plain, ...]]] = []

        def run() -> Tensor:
            holder = InputHolder(context, norm.x, Need.NORM, record)
            out, held = run_forward(norm, holder)
            made.append((held, holder, self._plain_beside(norm)))
            return out

        with context.counted_at(record):
            with context.hooks.collecting() as pending:
                inputs = (norm.x, norm.weight, norm.bias)
                result: Tensor = FusedRowNorm.apply(*inputs, run)  # type: ignore[no-untyped-call]
            (held, holder, beside), (saved,) = *made, pending
            if holder.is_external:
                context.hooks.note_read(norm.x, held)
        if context.policy.rederive:
            context.learn(result, held, (Term(context.counted(held.values()), held.result),))
        context.note_saved(saved, norm.x, held, holder)
        saved.settle(held, (*holder.plain, *beside))
        return result

    def _plain_beside(self, norm: RowNorm) -> tuple[Plain, ...]:
        """What plain PyTorch would save beside the input."""
        rows = 4 * (norm.x.numel() // norm.length)
        if norm.moments.centred:
            sizes = [rows, rows]  # mean and inverse deviation
        elif norm.weight is None or norm.x.is_cuda:
            sizes = [rows]
        else:  # PyTorch has no such operator on the CPU, but several in a row
            sizes = [rows, norm.x.nbytes]
        return tuple(Plain(self.context.state.ledger, Unmade(size)) for size in sizes)


def _place_of_input(norm: RowNorm) -> int:
    """How many tensors PyTorch's own operator saves before its input: beta."""
    return int(norm.bias is not None)
