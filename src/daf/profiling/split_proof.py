"""Shows on a few examples that a batch's parts add up to the whole, or why they do not.

The loss and gradient of a few examples at once are compared with the weighted sum over two unequal
parts of them, and the buffers that forward wrote with each other. Random operators are constant
meanwhile (``ConstantRandom``), so that what differs is the mathematics: examples that are coupled,
weights that are not the examples', or a dimension that is none of examples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from daf.profiling.constant_random import ConstantRandom
from daf.step.batch_cut import BatchCut
from daf.step.gradient_sketch import GradientSketcher
from daf.step.loss_weights import LossWeights, Weighing
from daf.step.microbatch import LossFunction, read_loss
from daf.step.state_snapshot import StateSnapshot
from daf.torch_compat.compiler_stance import eagerly
from daf.torch_compat.modules import AnyBatchNorm

MOST_EXAMPLES = 4
# Rounding, relative to a parameter's gradient and to the whole gradient, by the narrowest type
# that computes. Coupled examples differ by their own size; kinks (ReLU, max-pooling) that another
# order of sums crosses by some 1e-4 of a parameter's gradient.
_TOLERANCE = {torch.bfloat16: (6e-2, 2e-2), torch.float16: (2e-2, 5e-3)}
_FLOAT32_TOLERANCE = (2e-3, 2e-5)


@dataclass(frozen=True, slots=True)
class _Gradient:
    """One pass: the loss, (parameters, buckets) of its gradient, and what both are weighed with.

    ``total`` and ``sketch`` belong to the sum where ``is_sum``, else to the mean.
    """

    total: float
    sketch: Tensor
    weight: float
    is_sum: bool
    divisors: tuple[float, ...]
    examples: int

    def weight_by(self, weighing: Weighing) -> float:
        return self.weight if weighing is Weighing.EXAMPLES else self.divisors[0]


class SplitProof:
    """Compares parts with the whole; ``statistics``: leave batch statistics out of it."""

    def __init__(self, model: nn.Module, loss_fn: LossFunction, *, statistics: bool) -> None:
        self._model = model
        self._loss_fn = loss_fn
        self._statistics = statistics
        trained = {id(each): each for each in model.parameters() if each.requires_grad}
        self._sketcher = GradientSketcher(tuple(trained.values()))
        self._snapshot = StateSnapshot(model)
        self._dtypes: set[torch.dtype] = set()

    def run(self, batch: Any, cut: BatchCut, examples: int) -> tuple[Weighing, str]:
        """Return how parts are weighed, and "" or why they do not add up; restores the model.

        ``examples``: how many to take of the batch, 2 to ``MOST_EXAMPLES``.
        """
        size = cut.size(batch)
        ends = range(size - examples // 2, size)
        some = cut.pick(batch, [*range(examples - len(ends)), *ends])
        try:
            with self._without_statistics():
                return self._proven(some, cut, examples)
        except Exception as error:  # the user's own code may raise anything for a part
            return Weighing.EXAMPLES, f"a part of it fails: {type(error).__name__}: {error}"[:300]
        finally:
            self._snapshot.restore()
            self._drop_gradients()

    def _proven(self, batch: Any, cut: BatchCut, examples: int) -> tuple[Weighing, str]:
        whole, parts, refusal = self._compared(batch, cut, examples, disturbed=True)
        passes = (whole, *parts)
        if refusal:
            return Weighing.EXAMPLES, refusal
        if any(each.divisors for each in passes) and not whole.is_sum:
            if all(len(set(each.divisors)) == 1 for each in passes) and not self._difference(
                whole, parts, Weighing.LOSS
            ):
                return Weighing.LOSS, ""
            whole, parts, refusal = self._compared(batch, cut, examples, disturbed=False)
        refusal = refusal or self._difference(whole, parts, Weighing.EXAMPLES)
        return Weighing.EXAMPLES, refusal

    def _compared(
        self, batch: Any, cut: BatchCut, examples: int, *, disturbed: bool
    ) -> tuple[_Gradient, list[_Gradient], str]:
        """Return the passes of the whole and of its parts; and why not, if buffers differ."""
        self._snapshot.restore()
        whole = self._pass(batch, examples, disturbed=disturbed)
        written = self._buffers()
        self._snapshot.restore()
        parts = []
        for start, stop in pairwise((0, examples - cut.least, examples)):
            self._snapshot.restore_random()
            part = cut.take(batch, start, stop)
            parts.append(self._pass(part, stop - start, disturbed=disturbed and start == 0))
        return whole, parts, _different_buffer(written, self._buffers())

    def _pass(self, batch: Any, examples: int, *, disturbed: bool) -> _Gradient:
        operators = LossWeights(examples, disturbed=disturbed)
        with torch.enable_grad(), eagerly(), ConstantRandom() as random:
            with operators:
                loss = read_loss(self._loss_fn(self._model, batch), examples)
            loss.total.backward()  # type: ignore[no-untyped-call]
        self._dtypes |= random.dtypes
        sketch = self._sketcher.empty()
        for index, parameter in enumerate(self._sketcher.parameters):
            if parameter.grad is not None:
                sketch[index] = self._sketcher.fold(index, parameter.grad)
        self._drop_gradients()
        weight, divisors = float(loss.weight), tuple(map(float, operators.divisors))
        return _Gradient(loss.total.item(), sketch, weight, loss.is_sum, divisors, examples)

    def _difference(self, whole: _Gradient, parts: Sequence[_Gradient], weighing: Weighing) -> str:
        """Return "" if the parts add up to the whole, else what they differ in."""
        weights = [each.weight_by(weighing) for each in parts]
        if not sum(weights) or not math.isfinite(whole.total):
            return "its loss is not finite on a few examples"
        counted = [(each, w) for each, w in zip(parts, weights, strict=True) if w]
        shares = [(each, (1.0 if each.is_sum else w) / sum(weights)) for each, w in counted]
        own = 1.0 / (whole.weight if whole.is_sum else 1.0)
        expected, loss = own * whole.sketch, own * whole.total
        joined = sum((share * each.sketch for each, share in shares), torch.zeros_like(expected))
        joined_loss = sum(share * each.total for each, share in shares)
        lengths, apart = expected.norm(dim=1), (joined - expected).norm(dim=1)
        length = float(expected.norm())
        if length == 0.0:
            return "the gradient of a few examples is zero, which shows nothing"
        relative, overall = self._tolerance()
        within = bool((apart <= relative * lengths + overall * length).all())
        if within and abs(joined_loss - loss) <= relative * max(abs(loss), 1e-6):
            return ""
        share = float((joined - expected).norm()) / length
        return (
            f"its parts do not add up to it: on {whole.examples} examples their gradient differs "
            f"by {share:.2g} of its length, their loss is {joined_loss:.4g} for {loss:.4g}; "
            "examples are coupled or weighed by the loss, or that dimension is none of examples"
        )

    def _tolerance(self) -> tuple[float, float]:
        narrow = [_TOLERANCE[each] for each in self._dtypes if each in _TOLERANCE]
        return max(narrow, default=_FLOAT32_TOLERANCE)

    def _buffers(self) -> dict[str, Tensor]:
        return {name: each.detach().clone() for name, each in self._model.named_buffers()}

    def _drop_gradients(self) -> None:
        for parameter in self._model.parameters():
            parameter.grad = None

    @contextmanager
    def _without_statistics(self) -> Iterator[None]:
        """Normalise by running statistics inside, where the user allows parts to have their own."""
        norms = [
            each
            for each in self._model.modules()
            if isinstance(each, AnyBatchNorm) and each.training and each.running_mean is not None
        ]
        if self._statistics:
            norms = []
        try:
            for each in norms:
                each.training = False
            yield
        finally:
            for each in norms:
                each.training = True


def _different_buffer(whole: dict[str, Tensor], parts: dict[str, Tensor]) -> str:
    """Return why parts may not take the place of the whole if they leave another buffer."""
    for name in whole.keys() | parts.keys():
        one, other = whole.get(name), parts.get(name)
        is_same = one is not None and other is not None and one.shape == other.shape
        if not is_same or not torch.equal(one, other):  # type: ignore[arg-type]
            return f"forward writes the buffer {name!r}, and its parts leave another value there"
    return ""
