"""Running layer and root-mean-square normalisation as the fused operator, where it is the same.

Nothing has to be observed first: the operator returns what the call would.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from daf.core.policy import Need
from daf.core.reports import FusionReport
from daf.operators.capture_context import CountingHolder, OperatorContext, told_of
from daf.operators.row_norm.call import objection, read_call, row_norm_of
from daf.operators.row_norm.function import FusedRowNorm, RowNorm, RowsHeld, run_forward
from daf.saved_tensors.ledger import Plain, Unmade
from daf.saved_tensors.packed_tensor import Term
from daf.saved_tensors.packer import SMALL_BYTES
from daf.torch_compat.ownership import sole_holders


class RowFusion:
    """What became of each normalisation of rows when it ran last."""

    def __init__(self) -> None:
        self._reports: dict[tuple[str, str, int], FusionReport] = {}

    def reports(self) -> tuple[FusionReport, ...]:
        """Every one seen so far."""
        return tuple(self._reports.values())

    def note(self, report: FusionReport) -> None:
        """It ran so."""
        self._reports[report.module, report.operator, report.call] = report


class RowFusing:
    """Runs them for one ``with`` of a capture."""

    def __init__(self, fusion: RowFusion, carrier: OperatorContext) -> None:
        self._fusion = fusion
        self._carrier = carrier
        sole_holders()  # known before the first backward pass asks

    def chosen(
        self,
        operator: Callable[..., Any],
        arguments: Sequence[Any],
        keywords: Mapping[str, Any],
    ) -> Callable[..., Any]:
        """What to run in the place of ``F.layer_norm`` or ``F.rms_norm``: perhaps itself."""
        call = read_call(operator, arguments, keywords)
        reason = objection(call, self._carrier.pack, SMALL_BYTES)
        name: str = operator.__name__
        path, count = self._carrier.tracker.present_call(name)
        pattern = "" if reason else name
        self._fusion.note(FusionReport(path, count, pattern, reason, name))
        if call is None or reason:
            return operator
        norm = row_norm_of(call)
        return lambda *_arguments, **_keywords: self._run(name, norm)

    def _run(self, name: str, norm: RowNorm) -> Tensor:
        carrier = self._carrier
        path, call = carrier.tracker.next_call(name)
        record = carrier.tracker.record(path, name, call, _place_of_input(norm))
        told, plain = carrier.ledger.reported_bytes, carrier.ledger.plain_bytes
        made: list[tuple[RowsHeld, CountingHolder, tuple[Plain, ...]]] = []

        def run() -> Tensor:
            holder = CountingHolder(carrier, norm.x, (), Need.NORM, record)
            out, held = run_forward(norm, holder)
            made.append((held, holder, self._plain_beside(norm)))
            return out

        with carrier.hooks.collecting() as pending:
            inputs = (norm.x, norm.weight, norm.bias)
            result: Tensor = FusedRowNorm.apply(*inputs, run)  # type: ignore[no-untyped-call]
        (held, holder, beside), (saved,) = *made, pending
        if holder.is_external:
            carrier.hooks.note_read(norm.x, held)
        record.plain_bytes += carrier.ledger.plain_bytes - plain
        record.held_bytes += carrier.ledger.reported_bytes - told
        self._learn(held, result)
        if carrier.hooks.watcher is not None and not holder.is_external:
            carrier.hooks.watcher.saved(told_of(saved, norm.x, held, holder))
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
        return tuple(Plain(self._carrier.ledger, Unmade(size)) for size in sizes)

    def _learn(self, held: RowsHeld, result: Tensor) -> None:
        if self._carrier.policy.rederive:
            held.recipe = (Term(self._carrier.counted(held.values()), held.result),)
            self._carrier.provenance.learn(result, held)


def _place_of_input(norm: RowNorm) -> int:
    """How many tensors PyTorch's own operator saves before its input: beta."""
    return int(norm.bias is not None)
