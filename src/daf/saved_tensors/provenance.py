"""Provenance: which results can be computed from codes that are held anyway.

A recipe is known per node (by sequence number and output), which never changes: "gamma times that
code plus beta", "that, masked". Sums are followed through the graph on demand. References are
weak: a code lives as long as some saved tensor needs it. Also known: functions of an input that an
operator could keep. A result changed in place behind autograd's back is recognised by its version.
"""

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from daf.codecs.codes import ElementsCode
from daf.codecs.layout import is_dense
from daf.core.policy import Method
from daf.saved_tensors.backward_rules import ALIASES
from daf.saved_tensors.packed_tensor import Derivation, PackedTensor, Recipe, Stored, Term
from daf.torch_compat.autograd_graph import (
    is_strided,
    result_shape,
    saved_value,
    sequence_number_of,
)

MOST_TERMS = 4  # decoding a recipe costs one pass for each term
_MOST_ADDITIONS = 3

ADDITIONS = frozenset(
    {torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__}
)
RELUS = frozenset({F.relu, F.relu_, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_})
FOLLOWED = ADDITIONS | RELUS


class _Value(NamedTuple):
    """One output of the autograd node with this sequence number."""

    sequence_number: int
    output: int


class _Known(NamedTuple):
    """A node's result: its version when made, and what holds its recipe (None: a sum)."""

    version: int
    held: weakref.ref[PackedTensor] | None


class Operands(NamedTuple):
    """The operands of an addition or ReLU; ``trusted`` is True if none was changed unnoticed."""

    stride: tuple[int, ...]
    trusted: bool


class Provenance:
    """The recipes of one forward pass's results."""

    def __init__(self) -> None:
        self._known: dict[_Value, _Known] = {}
        # Functions of an operator's input that results are, with the results' versions when made.
        self._functions: dict[tuple[_Value, int], Derivation] = {}

    def clear(self) -> None:
        """Forget everything, at the end of the forward pass."""
        self._known.clear()
        self._functions.clear()

    def learn(self, result: Tensor, held: PackedTensor) -> None:
        """Note that ``held.recipe`` computes ``result``."""
        if (value := _value_of(result.grad_fn, result.output_nr)) is not None:
            self._known[value] = _Known(result._version, weakref.ref(held))

    def learn_made(self, node: Any, version: int, held: PackedTensor) -> None:
        """Note that ``held.recipe`` computes what ``node`` made."""
        self._known[_Value(sequence_number_of(node), 0)] = _Known(version, weakref.ref(held))

    def made_within(self, node: Any, arguments: Iterable[Any]) -> PackedTensor | None:
        """Return what is held for the first input of ``node``, or None.

        The operator with these arguments must have made it: then nobody can have changed it since.
        """
        made = _value_of(*node.next_functions[0])
        tensors = (each for each in arguments if isinstance(each, Tensor))
        if made is None or made in [_value_of(each.grad_fn, each.output_nr) for each in tensors]:
            return None
        known = self._known.get(made)
        return known.held() if known is not None and known.held is not None else None

    def learn_function(self, result: Tensor, function: Derivation) -> None:
        """Note that ``result`` is ``function`` of what an operator keeps, or could keep."""
        if (value := _value_of(result.grad_fn, result.output_nr)) is not None:
            self._functions[value, result._version] = function

    def function_of(self, tensor: Tensor, version: int) -> Derivation | None:
        """Return the function of another operator's input that a saved tensor is, or None."""
        value = _value_of(tensor.grad_fn, tensor.output_nr)
        return None if value is None else self._functions.get((value, version))

    def operands(self, arguments: Sequence[Any]) -> Operands:
        """Return the operands of an addition or ReLU that is about to run."""
        tensors = [argument for argument in arguments[:2] if isinstance(argument, Tensor)]
        first = tensors[0]
        if not all(map(is_strided, tensors)):
            return Operands((), trusted=False)
        trusted = is_dense(first) and all(
            other.stride() == first.stride() and other.shape == first.shape for other in tensors
        )
        return Operands(first.stride(), trusted and all(map(self._is_unchanged, tensors)))

    def learn_sum(self, arguments: Sequence[Any], result: Tensor, operands: Operands) -> None:
        """Note that ``result`` is a sum, if it is one of two tensors of one geometry."""
        node: Any = result.grad_fn
        if (
            operands.trusted
            and node is not None
            and node.name() == "AddBackward0"
            and saved_value(node, "alpha") == 1
            and len(arguments) == 2
            and isinstance(arguments[1], Tensor)
            and result.stride() == operands.stride
        ):
            self._known[_Value(sequence_number_of(node), 0)] = _Known(result._version, None)

    def recipe(self, tensor: Tensor, version: int) -> Recipe | None:
        """Return how to compute a saved tensor from codes, or None."""
        known = self._find(tensor.grad_fn, tensor.output_nr)
        if known is None or known.version != version:
            return None
        found = self._resolve((tensor.grad_fn, tensor.output_nr), _MOST_ADDITIONS)
        count = tensor.numel()
        if found is None or any(term.code.content.count != count for term in found):
            return None
        return found

    def masked(self, node: Any, operands: Operands, mask: Stored[ElementsCode]) -> Recipe | None:
        """Return the recipe of a ReLU's result, if that of its input is known."""
        if not operands.trusted:
            return None
        found = self._resolve(node.next_functions[0], _MOST_ADDITIONS)
        return None if found is None or found[0].derivation is not None else _masked(found, mask)

    def added(
        self, addend: Tensor | None, term: Term, mask: Stored[ElementsCode] | None
    ) -> Recipe | None:
        """Return the recipe of ``addend`` plus one more term, then zeroed by ``mask``; or None."""
        found: Recipe | None = (term,)
        if addend is not None:
            before = self.recipe(addend, addend._version)
            found = _sum(before, (term,)) if before is not None else None
        return found if found is None or mask is None else _masked(found, mask)

    def _is_unchanged(self, tensor: Tensor) -> bool:
        known = self._find(tensor.grad_fn, tensor.output_nr)
        return known is None or known.version == tensor._version

    def _find(self, node: Any, output: int) -> _Known | None:
        value = _value_of(node, output)
        return None if value is None else self._known.get(value)

    def _resolve(self, edge: tuple[Any, int], additions: int) -> Recipe | None:
        if (known := self._find(*edge)) is None:
            return None
        if known.held is not None:
            held = known.held()
            return held.recipe if held is not None else None
        if additions == 0:
            return None
        terms = _maker(*edge)[0].next_functions[:2]
        first, second = (self._resolve(below, additions - 1) for below in terms)
        return _sum(first, second) if first and second else None


def is_made_by(result: Tensor, node: Any) -> bool:
    """True if this node made ``result``, perhaps in another shape."""
    made = _value_of(result.grad_fn, result.output_nr)
    return made is not None and made.sequence_number == sequence_number_of(node)


def _value_of(node: Any, output: int) -> _Value | None:
    maker, output = _maker(node, output)
    return None if maker is None else _Value(sequence_number_of(maker), output)


def _maker(node: Any, output: int) -> tuple[Any, int]:
    while node is not None and (node.name() in ALIASES or _is_idle(node)):
        node, output = node.next_functions[0]
    return node, output


def _is_idle(node: Any) -> bool:
    """True if an expansion repeats nothing, as in every batched product."""
    if node.name() != "ExpandBackward0":
        return False
    return tuple(saved_value(node, "self_sym_sizes")) == result_shape(node)


def _masked(recipe: Recipe, mask: Stored[ElementsCode]) -> Recipe | None:
    """Zero a sum by ``mask``; None where its last term has a mask already."""
    last = recipe[-1]
    return (*recipe[:-1], last._replace(mask=mask)) if last.mask is None else None


def _sum(first: Recipe, second: Recipe) -> Recipe | None:
    """Chain two recipes; the appended one must have no mask, which would zero both."""
    # Exact sums need the program's order of additions, so only one term may be appended to them.
    if len(first) + len(second) > MOST_TERMS or any(term.derivation for term in first + second):
        return None
    is_exact = any(term.code.content.treatment.method is Method.KEEP for term in first + second)
    for chain, appended in ((first, second), (second, first)):
        in_order = len(appended) == 1 or not is_exact
        if in_order and all(term.mask is None for term in appended):
            return chain + appended
    return None
