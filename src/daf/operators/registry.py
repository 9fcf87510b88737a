"""The operators that policies can name, ours and others', and which runs in a function's place."""

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from daf.core.errors import UnknownNameError
from daf.operators.activation import ActivationOperator
from daf.operators.batch_norm.operator import BatchNormOperator
from daf.operators.chunked.products import ChunkedOperators
from daf.operators.linear_cross_entropy import LinearCrossEntropy
from daf.operators.operator_context import OperatorContext
from daf.operators.protocol import FusedOperator, OperatorCall
from daf.operators.row_norm import RowNormOperator
from daf.operators.stand_ins import METADATA, StandIns
from daf.torch_compat.operator_mode import Arguments, Keywords, OperatorMode
from daf.torch_compat.pytree import tensors_in_batch

# Asked in this order, where several may replace one function.
_OWN = (
    *(BatchNormOperator, RowNormOperator, ActivationOperator),
    *(LinearCrossEntropy, ChunkedOperators),
)
_kinds: dict[str, type[FusedOperator]] = {kind.name: kind for kind in _OWN}


def register_operator(kind: type[FusedOperator]) -> None:
    """Register an operator by its name; the same name again replaces it."""
    _kinds[kind.name] = kind


class OperatorFamilies:
    """The operators of one capture, which learn from step to step."""

    def __init__(self) -> None:
        self._made: dict[str, FusedOperator] = {}

    def named(self, names: Collection[str]) -> list[FusedOperator]:
        """Return a policy's operators, as registered; UnknownNameError if one of them is not."""
        if unknown := sorted(set(names) - _kinds.keys()):
            known = ", ".join(_kinds)
            raise UnknownNameError(f"asked for operator {unknown[0]!r}; registered: {known}")
        for name in set(names) - self._made.keys():
            self._made[name] = _kinds[name]()
        return [self._made[name] for name in _kinds if name in names]

    def all(self) -> list[FusedOperator]:
        """Return the operators that any step ran with, in the order of registration."""
        return [self._made[name] for name in _kinds if name in self._made]


class OperatorDispatch:
    """The fused operators of one step."""

    def __init__(self, operators: Sequence[FusedOperator], context: OperatorContext) -> None:
        self._operators, self._context = operators, context
        self._stand_ins: StandIns = context.stand_ins
        context.seen = self.mode = OperatorMode(self.run)
        self._replacing: dict[Any, list[FusedOperator]] = defaultdict(list)
        for operator in operators:
            operator.begin(context)
            for function in operator.functions:
                self._replacing[function].append(operator)

    def run(self, function: Callable[..., Any], arguments: Arguments, keywords: Keywords) -> Any:
        """Run one function, or what replaces it or its result."""
        if self._context.hooks.is_replaying:  # a replayed call does the same thing again
            return self._context.hooks.run(function, arguments, keywords)
        if function in METADATA:
            return function(*arguments, **keywords)
        call = OperatorCall(function, arguments, keywords)
        if self._stand_ins:
            if (followed := self._follow(call)) is not None:
                return followed
            real = partial(self._stand_ins.real, reader=call.name)
            call = OperatorCall(function, real(arguments), real(dict(keywords)))
        result = self._replacement(call)()
        for operator in self._operators:
            operator.observe(call, result)
        return result

    def _replacement(self, call: OperatorCall) -> Callable[[], Any]:
        for operator in self._replacing.get(call.function, ()):
            if (replacement := operator.replacement(call)) is not None:
                return replacement
        return partial(self._context.hooks.run, *call)

    def finish(self) -> None:
        """End the step: operators learn from it; FusionError if a stand-in still lives."""
        for operator in self._operators:
            operator.finish()
        self._stand_ins.finish()

    def _follow(self, call: OperatorCall) -> Any:
        found = map(self._stand_ins.find, tensors_in_batch((call.arguments, call.keywords)))
        operators = {deferred.operator: None for deferred in found if deferred is not None}
        followed = (operator.follow(call) for operator in operators)
        return next((each for each in followed if each is not None), None)
