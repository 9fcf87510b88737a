"""What mean-reducing loss operators divide by, read while a micro-batch runs.

``F.cross_entropy`` and ``F.nll_loss`` take the mean over the labels that count: those that are not
``ignore_index``, each with its class's weight. Micro-batches whose means join with these weights
give the whole batch's mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from daf.core.errors import SplitError
from daf.operators.linear_cross_entropy import LossCall
from daf.step.microbatch import WeightedLoss
from daf.torch_compat.autograd_graph import without_torch_function

PARAMETER = "parameter "


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
        self.divisors: list[Tensor] = []
        self.functions: set[str] = set()  # whose results have gradients
        self.branches: list[bool] = []  # that tensors' values decided
        self.has_too_few = False
        self._examples = examples
        self._disturbed = disturbed

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one operator; PyTorch calls this."""
        found = self._called(func, args, kwargs or {})
        if isinstance(found, bool):
            self.branches.append(found)
        if _is_differentiable(found):
            self.functions.add(getattr(func, "__name__", ""))
            given = (*args, *(kwargs or {}).values())
            self.functions |= {self._names[id(each)] for each in given if id(each) in self._names}
        return found

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
                self.divisors.append(_divisor(call))
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


def parameter_names(model: nn.Module) -> dict[int, str]:
    """Return how ``LossWeights`` calls each parameter, by identity."""
    return {id(each): PARAMETER + name for name, each in model.named_parameters()}


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
        self._divisors: list[tuple[float, list[Tensor]]] = []
        self._ways: set[frozenset[str]] = set()
        self._branches: set[tuple[bool, ...]] = set()

    def note_way(self, operators: LossWeights) -> None:
        """Note which parameters a part ran with, and which branches it took."""
        used = (each for each in operators.functions if each.startswith(PARAMETER))
        self._ways.add(frozenset(used))
        self._branches.add(tuple(operators.branches))

    def weighed(self, loss: WeightedLoss, divisors: list[Tensor]) -> WeightedLoss:
        """Return a micro-batch's loss with its weight, which is 0 if none of its labels counts."""
        if loss.is_sum:
            return loss
        self._divisors.append((float(loss.weight), divisors))
        if self._weighing is Weighing.SUM:  # of all parts together the weight is 1
            return replace(loss, weight=float(len(self._divisors) == 1), is_sum=True)
        if self._weighing is Weighing.EXAMPLES or not divisors:
            return loss
        weight = divisors[0].to(loss.total.device)
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
            for _, divisors in self._divisors:
                each = {float(divisor) for divisor in divisors}
                if len(each) != 1:
                    raise SplitError(
                        f"its loss operators divide by {[*map(float, divisors)]}, where one weight "
                        "was seen"
                    )
        elif self._weighing is Weighing.EXAMPLES and not self.has_like_shares():
            raise SplitError(
                "its parts have different shares of labels that count, and the loss is no "
                "plain mean over these; return (sum, weight) from loss_fn"
            )

    def has_like_shares(self) -> bool:
        """True if the loss operators of all parts divide by as much for each example."""
        shares = [
            tuple(float(divisor) / examples for divisor in divisors)
            for examples, divisors in self._divisors
        ]
        return all(all(each) and _are_alike(each, shares[0]) for each in shares)


def _are_alike(shares: tuple[float, ...], first: tuple[float, ...]) -> bool:
    """Means join by numbers of examples only if operators divide by as much for each."""
    return len(shares) == len(first) and all(
        abs(one - other) <= 1e-6 * abs(one) for one, other in zip(shares, first, strict=True)
    )
