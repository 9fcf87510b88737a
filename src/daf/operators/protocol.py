"""The interface of an operator that runs in place of PyTorch's."""

from collections.abc import Callable, Collection
from typing import Any, ClassVar, NamedTuple, TypeVar

from daf.operators.operator_context import OperatorContext
from daf.operators.stand_ins import DefersResults
from daf.torch_compat.operator_mode import Arguments, Keywords

Signature = TypeVar("Signature")


class OperatorCall(NamedTuple):
    """A function of PyTorch that is about to run, and its arguments."""

    function: Callable[..., Any]
    arguments: Arguments
    keywords: Keywords

    @property
    def name(self) -> str:
        """The function's own."""
        return str(getattr(self.function, "__name__", self.function))

    def read(self, signature: Callable[..., Signature]) -> Signature | None:
        """Return the arguments by the names of ``signature``; None where they do not fit it."""
        try:
            return signature(*self.arguments, **self.keywords)
        except TypeError:
            return None


class FusedOperator(DefersResults):
    """A family of operators that may run in place of PyTorch's, for all steps of one capture.

    A subclass is registered by its ``name``, by which policies ask for it. ``functions`` are those
    of PyTorch that it may replace.
    """

    name: ClassVar[str]
    functions: ClassVar[Collection[Callable[..., Any]]]
    context: OperatorContext

    def begin(self, context: OperatorContext) -> None:
        """Begin a step."""
        self.context = context

    def replacement(self, call: OperatorCall) -> Callable[[], Any] | None:
        """Return what runs in place of a call, or None: PyTorch's own (``table`` says why)."""
        raise NotImplementedError

    def observe(self, call: OperatorCall, result: Any) -> None:
        """Note that one of PyTorch's own functions, any of them, returned ``result``."""

    def finish(self) -> None:
        """Learn from the step, which is over."""
