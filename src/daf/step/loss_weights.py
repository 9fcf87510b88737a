"""What mean-reducing loss operators divide by, read while a micro-batch runs.

``F.cross_entropy`` and ``F.nll_loss`` take the mean over the labels that count: those that are not
``ignore_index``, each with its class's weight. Micro-batches whose means join with these weights
give the whole batch's mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from enum import StrEnum
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from daf.core.errors import SplitError
from daf.step.microbatch import WeightedLoss


class Weighing(StrEnum):
    """What a micro-batch's mean loss counts with: its examples, or what its loss divides by."""

    EXAMPLES = "examples"
    LOSS = "loss"


class _Call(NamedTuple):
    """The arguments of both operators, in their order."""

    input: Any
    target: Any
    weight: Any = None
    size_average: Any = None
    ignore_index: int = -100
    reduce: Any = None
    reduction: str = "mean"
    label_smoothing: float = 0.0

    @property
    def takes_a_mean(self) -> bool:
        return self.reduction == "mean" and self.size_average is self.reduce is None

    def divisor(self) -> float:
        """Return what the operator divides its sum by."""
        if not isinstance(self.target, Tensor):
            return 0.0
        if self.target.is_floating_point():  # probabilities: one row each
            return float(self.target.shape[0] if self.target.dim() > 1 else 1)
        counts = self.target != self.ignore_index
        if self.weight is None:
            return float(counts.sum())
        return float(self.weight.detach()[self.target[counts]].sum())


class LossWeights(TorchFunctionMode):
    """Notes what every mean-reducing loss operator inside divides by.

    ``disturbed``: first ignore half of the first example's labels, of ``examples``: a proof with
    these labels shows what the loss is a mean over, where no label happens to be ignored.
    """

    def __init__(self, examples: int = 1, *, disturbed: bool = False) -> None:
        super().__init__()
        self.divisors: list[float] = []
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
        if func not in (F.cross_entropy, F.nll_loss):
            return func(*args, **(kwargs or {}))
        call = _Call(*args, **(kwargs or {}))
        if call.takes_a_mean:
            if self._disturbed:
                call = call._replace(target=self._with_ignored(call))
                names = ("weight", "size_average", "ignore_index", "reduce", "reduction")
                args = (call.input, call.target)
                kwargs = {name: getattr(call, name) for name in names} | (
                    {"label_smoothing": call.label_smoothing} if func is F.cross_entropy else {}
                )
            with torch.no_grad():
                self.divisors.append(call.divisor())
        return func(*args, **(kwargs or {}))

    def _with_ignored(self, call: _Call) -> Any:
        target = call.target
        if not isinstance(target, Tensor) or target.is_floating_point() or target.dim() == 0:
            return target
        rows = target.numel() // self._examples
        if rows * self._examples != target.numel() or target.numel() < 2:
            return target
        changed = target.clone()
        changed.view(-1)[: max(1, rows // 2)] = call.ignore_index
        return changed


class PartWeights:
    """The weights of one step's micro-batches, and whether they still join to the whole mean."""

    def __init__(self, weighing: Weighing) -> None:
        self._weighing = weighing
        self._first: tuple[float, ...] | None = None

    def weighed(self, loss: WeightedLoss, divisors: list[float]) -> WeightedLoss | None:
        """Return a micro-batch's loss with its weight; None if none of its labels counts.

        Raises:
            SplitError: its loss operators divide by what the proof did not know.
        """
        if loss.is_sum:
            return loss
        if self._weighing is Weighing.EXAMPLES:
            self._check_proportion(divisors, float(loss.weight))
            return loss
        weight = divisors[0] if divisors else None
        if weight is None or any(each != weight for each in divisors):
            raise SplitError(f"its loss operators divide by {divisors}, where one weight was seen")
        if weight == 0.0:
            return None
        return replace(loss, total=loss.total * weight, weight=weight, is_sum=True)

    def _check_proportion(self, divisors: list[float], examples: float) -> None:
        """Means join by numbers of examples only if operators divide by as much for each."""
        each = tuple(divisor / examples for divisor in divisors)
        self._first = self._first or each
        is_alike = len(each) == len(self._first) and all(
            abs(one - other) <= 1e-6 * abs(one)
            for one, other in zip(each, self._first, strict=True)
        )
        if not is_alike:
            raise SplitError(
                "its parts have different shares of labels that count, and the loss is no plain "
                "mean over these; return (sum, weight) from loss_fn"
            )
