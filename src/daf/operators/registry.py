"""The operators that policies can name: the library's own, and those registered from outside."""

from __future__ import annotations

from collections.abc import Collection

from daf.core.errors import UnknownNameError
from daf.operators.activation import ActivationOperator
from daf.operators.batch_norm.operator import BatchNormOperator
from daf.operators.chunked.operator import ChunkedOperators
from daf.operators.linear_cross_entropy import LinearCrossEntropy
from daf.operators.protocol import FusedOperator
from daf.operators.row_norm import RowNormOperator

# Asked in this order, where several may replace one function.
_kinds: dict[str, type[FusedOperator]] = {
    kind.name: kind
    for kind in (
        BatchNormOperator,
        RowNormOperator,
        ActivationOperator,
        LinearCrossEntropy,
        ChunkedOperators,
    )
}


def register_operator(kind: type[FusedOperator]) -> None:
    """Register an operator by its name; the same name again replaces it."""
    _kinds[kind.name] = kind


class OperatorFamilies:
    """The operators of one capture, which learn from step to step."""

    def __init__(self) -> None:
        self._made: dict[str, FusedOperator] = {}

    def named(self, names: Collection[str]) -> list[FusedOperator]:
        """Return a policy's operators, as registered; UnknownNameError if one of them is not."""
        unknown = sorted(set(names) - _kinds.keys())
        if unknown:
            known = ", ".join(_kinds)
            raise UnknownNameError(f"asked for operator {unknown[0]!r}; registered: {known}")
        for name in set(names) - self._made.keys():
            self._made[name] = _kinds[name]()
        return [self._made[name] for name in _kinds if name in names]

    def all(self) -> list[FusedOperator]:
        """Return the operators that any step ran with, in the order of registration."""
        return [self._made[name] for name in _kinds if name in self._made]
