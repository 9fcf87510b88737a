"""What an operator that runs in place of PyTorch's must know: why not here, run, report."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from daf.operators.fusion_table import CallSite, FusionTable
from daf.operators.operator_context import OperatorContext
from daf.operators.stand_ins import Deferred


class OperatorCall(NamedTuple):
    """A function of PyTorch that is about to run, and what it is given."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The function's own."""
        return str(getattr(self.function, "__name__", self.function))


class FusedOperator:
    """A family of operators that may run in place of PyTorch's, for all steps of one capture.

    A subclass is registered by its ``name``, which policies ask for. ``functions`` are those of
    PyTorch that it may replace; ``alone`` is the pattern of a call that is no longer deferred.
    """

    name: ClassVar[str]
    functions: ClassVar[Collection[Callable[..., Any]]]
    alone: ClassVar[str] = ""

    def __init__(self) -> None:
        self.table = FusionTable()
        self.context: OperatorContext

    def begin(self, context: OperatorContext) -> None:
        """A step begins."""
        self.context = context

    def replacement(self, call: OperatorCall) -> Callable[[], Any] | None:
        """What to run in place of a call of one of ``functions``; None: PyTorch's own.

        The reason for None belongs in ``table``.
        """
        raise NotImplementedError

    def observe(self, call: OperatorCall, result: Any) -> None:
        """One of PyTorch's own functions returned ``result``; asked of every one."""

    def finish(self) -> None:
        """The step is over: learn from it."""

    # --- of operators whose results are deferred --------------------------------------------

    def follow(self, call: OperatorCall) -> Tensor | None:
        """The result of a call that reads one of the operator's stand-ins, where it is known how
        to go on without the real tensor; else None.
        """
        del call
        return None

    def compute(self, deferred: Deferred) -> Tensor:
        """The real tensor that a stand-in stands for."""
        raise NotImplementedError

    def note_reader(self, site: CallSite, reader: str) -> None:
        """``reader`` wants the real tensor: unless that was expected, the site is not deferred
        again.
        """
        if self.table.pattern(site) != self.alone:
            self.table.decide(site, self.alone, f"its result was also read by {reader}")
