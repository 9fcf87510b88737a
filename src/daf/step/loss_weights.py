"""What mean-reducing loss operators divide by, read while a micro-batch runs.

``F.cross_entropy`` and ``F.nll_loss`` take the mean over the labels that count: those that are not
``ignore_index``, each with its class's weight. Micro-batches whose means join with these weights
give the whole batch's mean. A user's own mean divides one scalar by another, or is ``mean`` or
another of PyTorch's losses over elements that the user selected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from daf.core.errors import OtherPathError, SplitError
from daf.operators.linear_cross_entropy import LossCall
from daf.step.microbatch import WeightedLoss
from daf.torch_compat.autograd_graph import without_torch_function

PARAMETER = "parameter "
_DIVISIONS = {"div", "div_", "divide", "divide_", "true_divide", "true_divide_"}
_RECIPROCALS = {"__rdiv__", "reciprocal", "reciprocal_"}
_PRODUCTS = {"mul", "mul_", "multiply", "multiply_"}
# Operators that order numbers by value: the place of their dimension, and its default.
_ORDERINGS: dict[str, tuple[int, int | None]] = {
    **dict.fromkeys(("argsort", "mode", "sort"), (1, -1)),
    **dict.fromkeys(("kthvalue", "topk"), (2, -1)),
    **dict.fromkeys(("median", "nanmedian"), (1, None)),
    **dict.fromkeys(("quantile", "nanquantile"), (2, None)),
}
_BOUNDS = {"clamp", "clamp_", "clamp_min", "clamp_min_", "clip", "max", "maximum", "where"}


class Weighing(StrEnum):
    """What a micro-batch's loss counts with: its examples, what its loss divides by, or 1."""

    EXAMPLES = "examples"
    LOSS = "loss"
    SUM = "sum"


def _takes_a_mean(call: LossCall) -> bool:
    return call.reduction == "mean" and call.size_average is call.reduce is None


def _divisor(call: LossCall) -> Tensor:
    """Return what the operator divides its sum by (scalar), without waiting for a device."""
    target = call.target
    if not isinstance(target, Tensor):
        return torch.zeros(())
    if target.is_floating_point():  # probabilities: one row each
        return torch.tensor(float(target.shape[0] if target.dim() > 1 else 1))
    counts = target != call.ignore_index
    if call.weight is None:
        counted: Tensor = counts.sum().float()
        return counted
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
        self,
        examples: int = 1,
        *,
        disturbed: int = 0,
        names: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        super().__init__()
        self._names = names
        self.means: list[Tensor] = []  # what operators divide by
        self.scalings: list[Tensor] = []  # what other scalars were divided by
        self._counts: list[Tensor] = []  # of these, what the user computed
        self._bounded: list[Tensor] = []
        self.functions: set[str] = set()  # whose results have gradients
        self.branches: list[bool] = []  # that tensors' values decided
        self.ordered: list[int] = []  # how many numbers each was ordered among, by value
        self.has_too_few = False
        self._examples = examples
        self._disturbed = disturbed

    @property
    def divisors(self) -> list[Tensor]:
        """What loss operators divide by; where there are none, the user's own last division."""
        return self.means or self._counts[-1:]

    def may_count_nothing(self) -> bool:
        """Return True if the user divides by 0, or a 1 in its place: by ``count.clamp(min=1)``."""
        own = () if self.means else self._counts[-1:]
        lowest = [1.0 if any(each is one for one in self._bounded) else 0.0 for each in own]
        return any(float(each) in (0.0, least) for each, least in zip(own, lowest, strict=True))

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one operator; PyTorch calls this."""
        found = self._called(func, args, kwargs or {})
        name = getattr(func, "__name__", "")
        if name in _ORDERINGS:
            self._note_order(name, args, kwargs or {})
        if isinstance(found, bool):
            self.branches.append(found)
        if _is_differentiable(found):
            self.functions.add(name)
            given = (*args, *(kwargs or {}).values())
            self.functions |= {self._names[id(each)] for each in given if id(each) in self._names}
        if isinstance(found, Tensor):
            if torch.is_grad_enabled() and not found.requires_grad:
                self._note_share(name, found, args, kwargs or {})
            elif found.numel() == 1:
                self._note_scalar(name, found, args, kwargs or {})
        return found

    def _note_order(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note among how many floats an operator orders; whole numbers are lengths, say."""
        if args and isinstance(args[0], Tensor) and args[0].is_floating_point() and args[0].dim():
            place, default = _ORDERINGS[name]
            dim = kwargs.get("dim", args[place] if len(args) > place else default)
            self.ordered.append(args[0].numel() if dim is None else args[0].shape[dim])

    def _note_share(
        self, name: str, found: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Note what weights that a loss is multiplied by were divided by, and bounds of counts."""
        if name in _BOUNDS and found.numel() == 1:
            self._bounded.append(found)
        elif name in _DIVISIONS or name in _RECIPROCALS:
            divisor = _divisor_in(name, args, kwargs)
            if isinstance(divisor, Tensor) and divisor.dim() == 0:
                self.scalings.append(divisor.detach())

    def _note_scalar(
        self, name: str, found: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Note what a loss is divided by."""
        if name in _DIVISIONS:
            divisor = _divisor_in(name, args, kwargs)
            if isinstance(divisor, Tensor) and not divisor.requires_grad:
                self._counts.append(divisor)
            self.scalings.append(torch.as_tensor(divisor).detach())
        elif name in _PRODUCTS and found.dim() == 0:  # by one over a count
            factors = [each for each in (*args, *kwargs.values()) if not _is_differentiable(each)]
            self.scalings += [torch.as_tensor(each).detach() for each in factors]
        elif args and name == "nanmean":
            self.scalings.append(args[0].detach().isnan().logical_not().sum())
        elif args and (name == "mean" or _is_loss(name)) and kwargs.get("reduction") != "sum":
            self.scalings.append(torch.tensor(float(args[0].numel())))

    def _called(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        if func not in (F.cross_entropy, F.nll_loss):
            return func(*args, **kwargs)
        call = LossCall(*args, **kwargs)
        if _takes_a_mean(call):
            if self._disturbed:
                call = call._replace(target=self._with_ignored(call))
                names = ("weight", "size_average", "ignore_index", "reduce", "reduction")
                args = (call.input, call.target)
                kwargs = {name: getattr(call, name) for name in names} | (
                    {"label_smoothing": call.label_smoothing} if func is F.cross_entropy else {}
                )
            with torch.no_grad():
                self.means.append(_divisor(call))
        return func(*args, **kwargs)

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


def _divisor_in(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    if name in _RECIPROCALS:
        return next(iter(args), None)
    return kwargs["other"] if "other" in kwargs else args[1]


def parameter_names(model: nn.Module) -> dict[int, str]:
    """Return how ``LossWeights`` calls each parameter, by identity."""
    return {id(each): PARAMETER + name for name, each in model.named_parameters()}


def _is_loss(name: str) -> bool:
    is_named = name.endswith(("_loss", "kl_div")) or name.startswith("binary_cross")
    return is_named and name != "nll_loss"


def _is_differentiable(found: Any) -> bool:
    """Return True for what a gradient goes through; what hooks look at has none."""
    values = found if isinstance(found, (tuple, list)) else (found,)
    with without_torch_function():
        return any(isinstance(each, Tensor) and each.requires_grad for each in values)


class PartWeights:
    """The weights of one step's micro-batches, and whether they still join to the whole mean.

    ``names``: those that ``LossWeights`` is given for each of them.
    """

    def __init__(self, weighing: Weighing, names: Mapping[int, str] = MappingProxyType({})) -> None:
        self._weighing = weighing
        self.names = names
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

    def check(self) -> None:
        """Look at the divisors of all parts, when their backward passes have been asked for.

        Raises:
            SplitError: the loss operators divide by what the proof did not know, or parts took
                branches to other parameters, of which the whole batch takes one.
        """
        if len(self._ways) > 1 and len(self._branches) > 1:
            raise SplitError("its parts take different ways through the model")
        if self._weighing is Weighing.LOSS:
            for part in self._parts:
                each = {float(divisor) for divisor in part.divisors}
                if len(each) != 1:
                    raise SplitError(
                        f"its loss operators divide by {[*map(float, part.divisors)]}, where one "
                        "weight was seen"
                    )
                if part.may_count_nothing():
                    raise SplitError("a part of it may have nothing to take the mean of")
        elif self._weighing is Weighing.EXAMPLES and not self.has_like_shares():
            raise SplitError(
                "its parts have different shares of labels that count, and the loss is no "
                "plain mean over these; return (sum, weight) from loss_fn"
            )

    def check_scalings(self) -> None:
        """Look at what else the parts' losses were divided by: one number, or as they weigh.

        Raises:
            OtherPathError: the parts weigh otherwise than the whole would.
        """
        by_loss = self._weighing is Weighing.LOSS
        weights = [
            float(part.divisors[0]) if by_loss and part.divisors else examples
            for examples, part in zip(self._examples, self._parts, strict=True)
        ]
        rows = [[*map(float, part.scalings)] for part in self._parts]
        if len({*map(len, rows)}) > 1:  # a loss of each example by itself, say
            rows = [row[-1:] for row in rows]
        columns = [column for column in zip(*rows, strict=False) if len({*column}) > 1]
        if not all(_is_in_step(each, weights) for each in columns):
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
    """True for numbers that are proportional to weights, or to one over them."""
    products = [one * weight for one, weight in zip(numbers, weights, strict=True)]
    is_inverse = all(math.isclose(each, products[0], rel_tol=1e-6) for each in products)
    return is_inverse or _is_proportional(numbers, weights)


def _is_proportional(numbers: Sequence[float], weights: Sequence[float]) -> bool:
    pairs = [*zip(numbers, weights, strict=True)]
    most, weight = max(pairs)
    return all(math.isclose(one * weight, most * other, rel_tol=1e-6) for one, other in pairs)
