"""What mean-reducing loss operators divide by, and scalers multiply, read while a part runs.

``F.cross_entropy`` and ``F.nll_loss`` take the mean over the labels that count: those that are not
``ignore_index``, each with its class's weight. Micro-batches whose means join with these weights
give the whole batch's mean. A user's own mean divides one scalar by another, or is ``mean`` or
another of PyTorch's losses over elements that the user selected.
"""

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import wraps
from itertools import chain
from threading import get_ident
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.overrides import TorchFunctionMode

from daf.core.errors import OtherPathError, SplitError
from daf.core.replaced import Replaced
from daf.kernels.devices import is_read_freely
from daf.operators.linear_cross_entropy import LossCall
from daf.saved_tensors.backward_rules import tensors_in
from daf.step.microbatch import WeightedLoss
from daf.torch_compat.autograd_graph import sequence_number_of, without_torch_function
from daf.torch_compat.parameter_reads import graph_nodes
from daf.torch_compat.pytree import tensors_in_batch

PARAMETER = "parameter "
ANY_COUNT = "any number of calls"  # beside what was proven: in this step's parts all is
ONE_BY_ONE = "a loss of each example by itself"  # beside the functions that were proven
_DIVISIONS = {"div", "div_", "divide", "divide_", "true_divide", "true_divide_"}
_RECIPROCALS = {"__rdiv__", "reciprocal", "reciprocal_"}
_PRODUCTS = {"mul", "mul_", "multiply", "multiply_"}
# Operators that order numbers by value: the place of their dimension, and its default.
_ORDERINGS: dict[str, tuple[int, int | None]] = {
    **dict.fromkeys(("argsort", "mode", "sort"), (1, -1)),
    **dict.fromkeys(("kthvalue", "topk"), (2, -1)),
    **dict.fromkeys(("median", "nanmedian"), (1, None)),
    **dict.fromkeys(("quantile", "nanquantile"), (2, None)),
    "msort": (1, 0),
}
_MEANS = {"mean", "nanmean", "kl_div", "binary_cross_entropy", "binary_cross_entropy_with_logits"}
_READS = {"item", "__int__", "__float__", "__index__"}  # by Python
_NOTED = {*_DIVISIONS, *_RECIPROCALS, *_PRODUCTS, *_ORDERINGS, *_MEANS}
_OTHERS_MEANS = {"ctc_loss", "nll_loss"}  # by lengths, and by what is read already
_MOST_COUNTED = 64  # calls of a function in a part
_Note = tuple[bool, Any]  # among how many is ordered; else a divisor, factor or count
_NO_NAMES: Mapping[int, str] = MappingProxyType({})
_BOUNDS = {"clamp", "clamp_", "clamp_min", "clamp_min_", "clip", "max", "maximum", "where"}


class Weighing(StrEnum):
    """What a micro-batch's loss counts with: its examples, what its loss divides by, or 1."""

    EXAMPLES = "examples"
    LOSS = "loss"
    SUM = "sum"


class _Kind(StrEnum):
    """What a noted number is."""

    MEAN = "what an operator divides by"
    SCALING = "what another scalar was divided by"
    COUNT = "of these, what the user computed"
    ORDERED = "among how many numbers one was ordered, by value"


@dataclass(eq=False, slots=True)
class _Noted:
    """A number, the node of its operator's result (None: it has none), and if that was read."""

    kind: _Kind
    number: Any
    node: int | None
    is_read: bool = False


def _divisor(call: LossCall) -> Tensor:
    """Return what the operator divides its sum by (scalar), without waiting for a device."""
    target = call.target
    if not isinstance(target, Tensor):
        return torch.zeros(())
    if target.is_floating_point():  # probabilities: one row each
        return torch.tensor(float(target.shape[0] if target.dim() > 1 else 1))
    counts = target != call.ignore_index
    if call.weight is None:
        return torch.as_tensor(counts.sum().float())
    return torch.where(counts, call.weight.detach()[target * counts], 0.0).sum()


class LossWeights(TorchFunctionMode):
    """Notes what every mean-reducing loss operator inside divides by, and which functions run.

    ``names``: of parameters, by identity; those that run with a function are noted too.
    ``disturbed``: first ignore half of the first example's labels, of ``examples``: a proof with
    these labels shows what the loss is a mean over, where no label happens to be ignored. It is
    how many examples a part has that begins there: where these have one label, none is ignored
    (``has_too_few``).
    """

    def __init__(
        self, examples: int = 1, *, disturbed: int = 0, names: Mapping[int, str] = _NO_NAMES
    ) -> None:
        super().__init__()
        self._names = names
        self._deciding: list[_Noted] = []
        self._unread: dict[int, tuple[Any, list[_Noted]]] = {}  # by what no operator was given yet
        self._bounded: list[tuple[Tensor, list[Tensor]]] = []  # and of what
        self._means_nothing = self._reads_zero = self._divides_by_one = False  # both by Python
        self.has_too_few = False
        # Whose results have gradients, numbered where they run again, and factors that are not 0.
        self.functions: set[str] = set()
        self._calls = Counter[str]()
        self.branches: list[bool] = []  # that tensors' values decided
        self._reads_all = not torch.is_grad_enabled()  # where results are all there is
        self._noted: dict[int, tuple[weakref.ref[Tensor], list[_Note]]] = {}
        self._examples, self._disturbed = examples, disturbed

    means = property(lambda self: self._numbers(_Kind.MEAN))
    scalings = property(lambda self: self._numbers(_Kind.SCALING))
    ordered = property(lambda self: self._numbers(_Kind.ORDERED))
    _counts = property(lambda self: self._numbers(_Kind.COUNT))
    # What loss operators divide by; where there are none, the user's own last division.
    divisors = property(lambda self: self.means or self._counts[-1:])
    # Whether a mean is of no numbers, or a count read by Python is 0, and perhaps made 1.
    reads_nothing = property(lambda e: e._means_nothing or (e._reads_zero and e._divides_by_one))

    def _numbers(self, kind: _Kind) -> list[Any]:
        return [each.number for each in self._deciding if each.kind is kind]

    def leave_out_beside(self, losses: Any) -> None:
        """Forget the numbers of results that nobody read, such as a model's own unused loss.

        ``losses``: what the user returned; nothing in its graph is forgotten.
        """
        roots = {each.grad_fn for each in tensors_in_batch(losses)} - {None}
        ends = {None, *map(sequence_number_of, roots)}
        if all(each.is_read or each.node in ends for each in self._deciding):
            return
        ends.update(sequence_number_of(node) for root in roots for node in graph_nodes(root))
        self._deciding = [each for each in self._deciding if each.is_read or each.node in ends]

    def _note(self, kind: _Kind, numbers: Iterable[Any], found: Any) -> None:
        node = found.grad_fn if isinstance(found, Tensor) else None  # several: one may be read
        place = None if node is None else sequence_number_of(node)
        noted = [_Noted(kind, each, place) for each in numbers]
        self._deciding += noted
        if noted and isinstance(found, Tensor):
            reference, known = self._unread.get(id(found), (lambda: None, []))
            self._unread[id(found)] = weakref.ref(found), known * (reference() is found) + noted

    def _mark_read(self, given: Iterable[Any]) -> None:
        for tensor in _tensors_in(given) if self._unread else ():
            reference, noted = self._unread.get(id(tensor), (lambda: None, ()))
            for each in noted if reference() is tensor else ():  # another may have its place now
                each.is_read = True

    def may_count_nothing(self) -> bool:
        """Return True if the user divides by 0, or by more in its place: ``count.clamp(min=1)``."""
        own = () if self.means else self._counts[-1:]
        sources = chain(*(given for each in own for found, given in self._bounded if found is each))
        return any(float(each) == 0.0 for each in (*own, *sources))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator; PyTorch calls this."""
        kwargs = kwargs or {}
        given = (*args, *kwargs.values())
        self._mark_read(given)
        found, name = self._called(func, args, kwargs), getattr(func, "__name__", "")
        if isinstance(found, bool):
            self.branches.append(found)
        self._reads_zero |= name in _READS and found == 0
        if not (self._reads_all or isinstance(found, (Tensor, tuple, list))):
            return found  # a shape, a flag or a module's setting: nothing to follow
        if is_read := self._reads_all or _is_differentiable(found):
            self._count(name)
            self.functions |= {self._names[id(each)] for each in given if id(each) in self._names}
        self._follow(name, given, kwargs, found, is_read)
        return found

    def _count(self, name: str) -> None:
        count = self._calls[name] = min(self._calls[name] + 1, _MOST_COUNTED)
        self.functions.add(name if count == 1 else f"{name} {count}")

    def _follow(
        self, name: str, given: tuple[Any, ...], named: Mapping[str, Any], found: Any, is_read: bool
    ) -> None:
        """Keep what decides over a loss; what is computed beside it (a metric) decides nothing."""
        is_mean = is_read and (name in _MEANS or name.endswith("_loss"))
        if is_mean and any(not each.numel() for each in _tensors_in(given)):
            self._means_nothing |= bool(found.isnan().any())
        notes = _notes(name, given, named, found, is_read)
        for each in _tensors_in(given) if self._noted else ():
            reference, known = self._noted.get(id(each), (lambda: None, []))
            notes += known if reference() is each else ()
        if notes:
            self._keep([*{id(each): each for each in notes}.values()], found, is_read)  # each once
        is_division = is_read and name in _DIVISIONS
        if (is_division or name in _BOUNDS) and isinstance(found, Tensor) and found.numel() == 1:
            if is_division:
                numbers = (each for each in given[1:] if type(each) in (int, float))
                self._divides_by_one |= 1 in numbers
                counts = [each for each in _tensors_in(given[1:]) if not _is_differentiable(each)]
                self._note(_Kind.COUNT, counts, found)
            elif not is_read:
                counts = [each for each in _tensors_in(given) if each.dtype is not torch.bool]
                self._bounded.append((found, [each for each in counts if each.numel() == 1]))

    def _keep(self, notes: list[_Note], found: Any, is_read: bool) -> None:
        if is_read:
            for is_order, number in notes:  # what is multiplied by 0 shows nothing
                is_here = not isinstance(number, Tensor) or is_read_freely(number)
                if not (is_order or (is_here and number == 0)):
                    self._count("factor")
            self._note(_Kind.ORDERED, (size for is_order, size in notes if is_order), found)
            self._note(_Kind.SCALING, (number for is_order, number in notes if not is_order), found)
            return
        for each in tensors_in(found):
            self._noted[id(each)] = weakref.ref(each), notes

    def _called(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        if func not in (F.cross_entropy, F.nll_loss):
            return func(*args, **kwargs)
        call = LossCall(*args, **kwargs)
        if call.reduction != "mean" or (call.size_average, call.reduce) != (None, None):
            return func(*args, **kwargs)
        if self._disturbed:
            call = call._replace(target=self._with_ignored(call))
            args = call if func is F.cross_entropy else call[:-1]  # ``nll_loss`` smooths nothing
            kwargs = {}
        with torch.no_grad():
            divisor = _divisor(call)
        found = func(*args, **kwargs)
        self._note(_Kind.MEAN, [divisor], found)
        return found

    def _with_ignored(self, call: LossCall) -> Any:
        target = call.target
        if not isinstance(target, Tensor) or target.is_floating_point() or target.dim() == 0:
            return target
        rows = target.numel() // self._examples
        if rows * self._examples != target.numel():
            return target
        if rows * self._disturbed < 2:
            self.has_too_few = True
            return target
        changed = target.clone()
        changed.view(-1)[: max(1, rows // 2)] = call.ignore_index
        return changed


def _notes(
    name: str, given: tuple[Any, ...], named: Mapping[str, Any], found: Any, is_read: bool
) -> list[_Note]:
    first = given[0] if given else None
    is_loss = name.endswith("_loss") and name not in _OTHERS_MEANS
    if not (name in _NOTED or is_loss) or not isinstance(first, Tensor) or first.is_sparse:
        return []
    if name in _ORDERINGS:
        if not first.is_floating_point() or not first.dim():  # whole numbers are lengths, say
            return []
        place, default = _ORDERINGS[name]
        dim = named.get("dim", given[place] if len(given) - len(named) > place else default)
        return [(True, first.numel() if dim is None else first.shape[dim])]
    if name in _RECIPROCALS:
        return [(False, first)] if _is_count(first) else []
    if name in _DIVISIONS or name in _PRODUCTS:
        factors = [each for each in given if _is_count(each)]
        if not is_read:  # weights that sum to one, say; pixels over 255 are none
            factors = [each for each in factors if name in _DIVISIONS and isinstance(each, Tensor)]
        return [(False, each) for each in factors]
    if not is_read or not isinstance(found, Tensor) or (is_loss and found.dim()):
        return []
    count = first.numel() if name != "nanmean" else first.detach().isnan().logical_not().sum()
    is_of_rows = named.get("reduction") == "batchmean"
    return [(False, len(first) if is_of_rows else count / max(1, found.numel()))]


def _is_count(value: Any) -> bool:
    if not isinstance(value, Tensor):
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return not (value.dim() or value.is_complex() or _is_differentiable(value))


def _tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    return chain.from_iterable(map(tensors_in, values))


def parameter_names(model: nn.Module) -> dict[int, str]:
    """Return how ``LossWeights`` calls each parameter, by identity."""
    return {id(each): PARAMETER + name for name, each in model.named_parameters()}


def _is_differentiable(found: Any) -> bool:
    """Return True for what a gradient goes through; what hooks look at has none."""
    if type(found) is Tensor:
        return found.requires_grad
    with without_torch_function():
        return any(each.requires_grad for each in tensors_in(found))


class PartWeights:
    """The weights of one step's micro-batches, and whether they still join to the whole mean.

    ``names``: those that ``LossWeights`` is given for each of them.
    """

    def __init__(self, weighing: Weighing, names: Mapping[int, str] = _NO_NAMES) -> None:
        self._weighing, self.names = weighing, names
        self._examples: list[float] = []
        self._parts: list[LossWeights] = []
        self._ways: set[frozenset[str]] = set()
        self._branches: set[tuple[bool, ...]] = set()

    def note_way(self, operators: LossWeights) -> None:
        """Note which parameters a part ran with, and which branches it took."""
        used = (each for each in operators.functions if each.startswith(PARAMETER))
        self._ways.add(frozenset(used))
        self._branches.add(tuple(operators.branches))

    def weighed(self, loss: WeightedLoss, operators: LossWeights) -> WeightedLoss:
        """Return a micro-batch's loss with its weight, which is 0 if none of its labels counts."""
        if loss.is_sum:
            return loss
        self._examples.append(float(loss.weight))
        self._parts.append(operators)
        if self._weighing is Weighing.SUM:  # of all parts together the weight is 1
            return replace(loss, weight=float(len(self._parts) == 1), is_sum=True)
        if self._weighing is Weighing.EXAMPLES or not operators.divisors:
            return loss
        weight = operators.divisors[0].to(loss.total.device)
        total = torch.where(weight > 0, loss.total, 0.0) * weight
        return replace(loss, total=total, weight=weight, is_sum=True)

    def check(self, *, is_nan: bool = False) -> None:
        """Look at the divisors of all parts, when their backward passes have been asked for.

        ``is_nan``: the last one's loss is not finite, which the whole batch's may be.

        SplitError: the loss operators divide by what the proof did not know, or parts took branches
        to other parameters, of which the whole batch takes one.
        """
        if len(self._ways) > 1 and len(self._branches) > 1:
            raise SplitError("its parts take different ways through the model")
        nothing = [each.reads_nothing for each in self._parts]
        is_apart = any(nothing) and (is_nan or not all(nothing))
        if is_apart or any(each.may_count_nothing() for each in self._parts):
            raise SplitError("a part of it may have nothing to take the mean of")
        if self._weighing is Weighing.LOSS:
            for part in self._parts:
                each = {float(divisor) for divisor in part.divisors}
                if len(each) != 1:
                    raise SplitError(
                        f"its loss operators divide by {[*map(float, part.divisors)]}, where one "
                        "weight was seen"
                    )
        elif self._weighing is Weighing.EXAMPLES and not self.has_like_shares():
            raise SplitError(
                "its parts have different shares of labels that count, and the loss is no "
                "plain mean over these; return (sum, weight) from loss_fn"
            )

    def check_scalings(self, proven: Iterable[str] = ()) -> None:
        """Look at what else the parts' losses were divided by: one number, or as they weigh.

        ``proven``: functions; with ``ONE_BY_ONE`` only the last number is of a whole part. Raises
        OtherPathError if the parts weigh otherwise than the whole would.
        """
        by_loss = self._weighing is Weighing.LOSS
        weights = [
            float(part.divisors[0]) if by_loss and part.divisors else examples
            for examples, part in zip(self._examples, self._parts, strict=True)
        ]
        rows = [[*map(float, part.scalings)] for part in self._parts]
        if ONE_BY_ONE in proven:
            rows = [row[-1:] for row in rows]
        is_even = len({*map(len, rows)}) <= 1  # else a part left a term out
        columns = [column for column in zip(*rows, strict=False) if len({*column}) > 1]
        is_sum = self._weighing is Weighing.SUM  # which only one number throughout divides
        if not is_even or not all(not is_sum and _is_in_step(each, weights) for each in columns):
            raise OtherPathError(
                "its parts have other shares of what their loss is divided by than of its weights",
                set(),
            )

    def has_like_shares(self) -> bool:
        """True if the loss operators of all parts divide by as much for each example."""
        rows = [[*map(float, part.means)] for part in self._parts]
        return len({*map(len, rows)}) <= 1 and all(
            all(column) and _is_proportional(column, self._examples)
            for column in zip(*rows, strict=True)
        )


def _is_in_step(numbers: Sequence[float], weights: Sequence[float]) -> bool:
    products = [one * weight for one, weight in zip(numbers, weights, strict=True)]
    is_inverse = all(math.isclose(each, products[0], rel_tol=1e-6) for each in products)
    return is_inverse or _is_proportional(numbers, weights)


def _is_proportional(numbers: Sequence[float], weights: Sequence[float]) -> bool:
    pairs = [*zip(numbers, weights, strict=True)]
    most, weight = max(pairs)
    return all(math.isclose(one * weight, most * other, rel_tol=1e-6) for one, other in pairs)


class ScaleWatch:
    """The last factor of ``GradScaler.scale``, a tensor of one element on the scaler's device, not
    waited for; None: no loss was scaled.
    """

    def __init__(self) -> None:
        self.factor: Tensor | None = None
        self.thread = get_ident()


@contextmanager
def scale_watched() -> Iterator[ScaleWatch]:
    """Note factors of this thread inside; of several watches the innermost notes them.

    With all left, nobody's class stays changed.
    """
    watch = ScaleWatch()
    with _scale.told(watch):
        yield watch


@wraps(GradScaler.scale)
def _noting(self: GradScaler, outputs: Any) -> Any:
    scaled = _scale.original(self, outputs)
    ours = [each for each in _scale.listeners if each.thread == get_ident()]
    if ours and self.is_enabled() and self._scale is not None:
        ours[-1].factor = self._scale.detach().clone()
    return scaled


_scale: Replaced[ScaleWatch] = Replaced(GradScaler, "scale", _noting)
