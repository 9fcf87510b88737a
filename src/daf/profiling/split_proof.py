"""Shows on a few examples that a batch's parts add up to the whole, or why they do not.

The loss and gradient of a few examples at once are compared with the weighted sum over two unequal
parts of them, and the buffers that forward wrote with each other. Random operators are constant
meanwhile (``ConstantRandom``), so that what differs is the mathematics: examples that are coupled,
weights that are not the examples', or a dimension that is none of examples.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from daf.core.errors import SplitError
from daf.core.replaced import replaced
from daf.profiling.constant_random import ConstantRandom
from daf.profiling.gradient_sketches import GradientSketches
from daf.profiling.terse_saves import terse_saves
from daf.recompute.python_state import Surroundings
from daf.step.batch_cut import BatchCut
from daf.step.loss_weights import ONE_BY_ONE, LossWeights, PartWeights, Weighing, parameter_names
from daf.step.microbatch import LossFunction, WeightedLoss, read_loss, scale_gradients
from daf.step.other_leaves import OtherLeaves
from daf.step.state_snapshot import ParameterWrites, StateSnapshot
from daf.torch_compat.autograd_graph import without_torch_function
from daf.torch_compat.compiler import eagerly
from daf.torch_compat.modules import AnyBatchNorm

_Mode = AbstractContextManager[object]

MOST_EXAMPLES = 4
LEAST_PROVEN = 3  # two of them alike: what couples like ones shows in no two others
# Rounding, relative to a parameter's gradient and to the whole gradient, by the narrowest type
# that computes. Coupled examples differ by their own size.
_TOLERANCE = {torch.bfloat16: (6e-2, 2e-2), torch.float16: (2e-2, 5e-3)}
_FLOAT32_TOLERANCE = (3e-4, 5e-6)


class _Trial(NamedTuple):
    """Why parts weighed in one way do not add up to the whole, or ""."""

    refusal: str
    has_divisors: bool  # its mean divides by something that an operator told
    adds_up: bool = False  # the parts' losses are the whole's, without any weights
    tells_apart: bool = True  # this way from weighing by examples


_ORDERED = "it picks by value among examples (topk, sort, median), of which few show little"
_DRAWN = "it draws from a generator of its own, which its parts would do several times"
_SHOWS_NOTHING = "the gradient of a few examples is zero, which shows nothing"
_APART = "its parts do not add up to it"
_KEPT = "what forward keeps in Python changes its loss, and its parts would change it several times"
_WRITTEN = "forward writes parameters itself, which its parts would do several times"


class SplitProof:
    """Compares parts with the whole.

    Args:
        statistics: leave batch statistics out of it.
        is_terse: hold a byte for each saved number; the gradients compared are not the model's.

    What ``others`` reach is as it was once these are put back.
    """

    def __init__(
        self, model: nn.Module, loss_fn: LossFunction, *, statistics: bool, is_terse: bool = False
    ) -> None:
        self._model, self._loss_fn, self.others = model, loss_fn, OtherLeaves()
        self._statistics, self.is_terse = statistics, is_terse
        self._snapshot = StateSnapshot(Surroundings.of(model, loss_fn))
        self._dtypes: set[torch.dtype] = set()
        self._sketches = GradientSketches(model)
        self._may_draw = True
        self._is_low = self._has_filled = False  # random draws, which masks may be made of
        self.functions: set[str] = set()  # that ran in forward passes

    def run(self, batch: Any, cut: BatchCut, examples: int) -> tuple[Weighing, str]:
        """Return how parts are weighed, and "" or why they do not add up; restores the model.

        ``examples``: of the batch, 2 at least. The user's own code may raise anything for a part.
        """
        told = cut.telling(batch, max(examples, LEAST_PROVEN))
        groups = [told[:examples]]
        if len(told) > examples:  # no room for all: two alike by themselves
            groups.append(told[-examples:])
        groups += [each[::-1] for each in groups if self.is_terse]  # of which each shows less
        writes = ParameterWrites(self._model)
        try:
            with self._quietly(), writes:
                weighing = Weighing.EXAMPLES
                for group in groups:
                    found, refusal = self._sketched(cut.pick(batch, group), cut, examples)
                    weighing = weighing if found is Weighing.EXAMPLES else found
                    if refusal:
                        break
            if not refusal and self._snapshot.has_drawn():
                refusal = _DRAWN
            return weighing, _WRITTEN if writes.written else refusal
        finally:
            self._snapshot.restore()
            writes.restore()
            self._drop_gradients()

    def _sketched(self, batch: Any, cut: BatchCut, examples: int) -> tuple[Weighing, str]:
        if self._sketches.sketches:
            with suppress(Exception):  # what the user's own code does with weights may need more
                weighing, refusal = self._proven(batch, cut, examples)
                if not refusal:
                    return weighing, refusal
            self._snapshot.restore()
            self._sketches.give_up()
        return self._proven(batch, cut, examples)

    def _proven(self, batch: Any, cut: BatchCut, examples: int) -> tuple[Weighing, str]:
        weighing = Weighing.LOSS
        found = self._trial(batch, cut, examples, weighing)
        if not found.has_divisors:
            weighing = Weighing.EXAMPLES
        elif found.refusal:
            weighing = Weighing.EXAMPLES
            found = self._trial(batch, cut, examples, weighing)
        elif not found.tells_apart:
            weighing = Weighing.EXAMPLES
        if found.refusal and found.adds_up:
            summed = self._trial(batch, cut, examples, Weighing.SUM)
            if not summed.refusal and self._doubles(batch, cut, examples):
                return Weighing.SUM, ""
        if self._has_filled and not found.refusal:
            with suppress(Exception), replaced(self, _is_low=True):  # a mask may be the other way
                low = self._trial(batch, cut, examples, weighing).refusal
                return weighing, low if is_apart(low) else ""
        return weighing, found.refusal

    def _doubles(self, batch: Any, cut: BatchCut, examples: int) -> bool:
        """Return whether examples twice have twice the loss: a mean over what counts has not."""
        # Of few examples one alone may count, so that such a mean is their sum.
        if cut.own is not None:  # by which none can be taken twice
            return True
        found = set()
        for start in (0, examples - cut.least):
            twice = cut.pick(batch, 2 * [*range(start, start + cut.least)])
            found.add(self._trial(twice, cut, 2 * cut.least, Weighing.SUM).refusal)
        return "" in found and found <= {"", _SHOWS_NOTHING}

    def _trial(self, batch: Any, cut: BatchCut, examples: int, weighing: Weighing) -> _Trial:
        """Add up the parts' gradients and the whole's negative, in one: what is left differs."""
        middle = _middle(examples, cut.least)
        weights, has_divisors = PartWeights(weighing), False
        disturbed = middle if weighing is Weighing.LOSS else 0
        self._drop_gradients()
        self._snapshot.restore()
        joined = weight = unweighed = 0.0
        parts: list[LossWeights] = []
        for start, stop in ((0, middle), (middle, examples)):
            self._snapshot.restore_random()
            part, size = cut.take(batch, start, stop), stop - start
            with self._constantly() as (forward, backward):
                with forward:
                    loss, operators = self._forward(part, size, 0 if start else disturbed)
                parts.append(operators)
                has_divisors = has_divisors or bool(operators.divisors and not loss.is_sum)
                unweighed += 0.0 if loss.is_sum else loss.total.item()
                loss = weights.weighed(loss, operators)
                total = loss.total if loss.is_sum else loss.total * (float(loss.weight) / examples)
                with backward:
                    self.others.backward(total)
            joined, weight = joined + total.item(), weight + float(loss.weight)
        try:
            if has_divisors:
                weights.check()
        except SplitError as error:
            return _Trial(str(error), has_divisors)
        if not weight:
            return _Trial("its loss weighs nothing on a few examples", has_divisors)
        if loss.is_sum:  # as in a step: what hooks do may depend on the length of a gradient
            scale_gradients(self._weights(), 1.0 / weight)
            joined /= weight
        written, lengths = self._buffers(), self._lengths()
        self._snapshot.restore()
        with self._constantly() as (forward, backward):
            with forward:
                loss, operators = self._forward(batch, examples, disturbed)
            mean = loss.mean.item()
            share = 1.0 / (float(loss.weight) or math.nan) if loss.is_sum else 1.0
            total = loss.total * -share  # backward given a gradient imports SymPy: 35 MB
            with backward:
                self.others.backward(total)
        refusal = _different_buffer(self._buffers(), written)
        if self._snapshot.has_changed() and not refusal:
            left = StateSnapshot(Surroundings.of(self._model, self._loss_fn))
            with self._constantly() as (forward, _), forward:
                self._forward(batch, examples, disturbed)
            refusal = _KEPT if left.has_moved() else ""
        if not _orders_alike(*(each.ordered for each in (operators, *parts))):
            refusal = refusal or _ORDERED
        if len(operators.scalings) > max(len(each.scalings) for each in parts):
            self.functions.add(ONE_BY_ONE)
        refusal = refusal or self._apart(lengths, mean, joined, examples)
        adds_up = math.isclose(unweighed, mean, rel_tol=self._tolerance()[0])
        tells_apart = not (operators.has_too_few and weights.has_like_shares())
        return _Trial(refusal, has_divisors, adds_up, tells_apart)

    def _forward(
        self, batch: Any, examples: int, disturbed: int
    ) -> tuple[WeightedLoss, LossWeights]:
        names = parameter_names(self._model)
        weights = LossWeights(examples, disturbed=disturbed, names=names)
        with weights as operators, self._saves():
            result = self._loss_fn(self._model, batch)
            loss = read_loss(result, examples)
        operators.leave_out_beside(result)
        self.functions |= operators.functions
        return loss, operators

    def _saves(self) -> AbstractContextManager[None]:
        model = self._model
        stays = chain(model.parameters(), model.buffers())  # not the batch, which may be copied
        return terse_saves(stays) if self.is_terse else nullcontext()

    @contextmanager
    def _constantly(self) -> Iterator[tuple[_Mode, _Mode]]:
        """Run one pass inside; the modes yielded draw in its forward and its backward part.

        Scripts call operators past Python, also where a checkpoint runs them again. Where the first
        pass draws nothing, the others are not looked at: they take a third less.
        """
        random = ConstantRandom(is_low=self._is_low)
        is_scripted = any(isinstance(e, torch.jit.ScriptModule) for e in self._model.modules())
        modes = random, random if is_scripted else random.in_backward()
        with torch.enable_grad(), eagerly(), self._sketches.taken():
            yield modes if self._may_draw else (nullcontext(), nullcontext())
        self._dtypes |= random.dtypes
        self._may_draw = self._may_draw and random.has_drawn
        self._has_filled |= random.has_filled

    def _apart(self, lengths: Tensor, whole: float, joined: float, examples: int) -> str:
        """Return "" if what is left of the gradient is rounding, else what the parts differ in."""
        apart, length = self._lengths(), float(lengths.norm())
        if not math.isfinite(whole):
            return "its loss is not finite on a few examples"
        if length == 0.0 and not apart.any():
            return _SHOWS_NOTHING
        relative, overall = self._tolerance()
        within = bool((apart <= relative * lengths + overall * length).all())
        if within and abs(joined - whole) <= relative * max(abs(whole), 1e-6):
            return ""
        share = float(apart.norm()) / (length or float(apart.norm()))
        return (
            f"{_APART}: on {examples} examples their gradient differs by {share:.2g} of its "
            f"length, their loss is {joined:.4g} for {whole:.4g}; examples are coupled or weighed "
            "by the loss, or that dimension is none of examples"
        )

    def _weights(self) -> list[nn.Parameter]:
        return [*self._model.parameters(), *self._sketches.sketches]

    def _drop_gradients(self) -> None:
        for each in self._weights():
            each.grad = None

    def _lengths(self) -> Tensor:
        """Return the length of every parameter's gradient: (parameters,) float64."""
        with without_torch_function():
            return torch.stack([*map(_length, self._weights())]).cpu()

    def _tolerance(self) -> tuple[float, float]:
        narrow = [_TOLERANCE[each] for each in self._dtypes if each in _TOLERANCE]
        return max(narrow, default=_FLOAT32_TOLERANCE)

    def _buffers(self) -> dict[str, Tensor]:
        return {name: each.detach().clone() for name, each in self._model.named_buffers()}

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        """Let dropout keep everything, so that nothing need look for draws, and norms be as parts'.

        Where the user allows parts to have statistics of their own, running ones normalise.
        """
        training = [each for each in self._model.modules() if each.training]
        theirs = [each for each in training if type(each).__module__ == nn.Dropout.__module__]
        dropouts = [each for each in theirs if "forward" not in vars(each)]
        quiet = [*dropouts, *(each for each in training if type(each) is nn.MultiheadAttention)]
        if not self._statistics:
            norms = (each for each in training if isinstance(each, AnyBatchNorm))
            quiet += (each for each in norms if each.running_mean is not None)
        with ExitStack() as stack:
            for each in quiet:
                stack.enter_context(replaced(each, training=False))
            for each in dropouts:
                stack.enter_context(replaced(each, forward=partial(_copied, each.forward)))
            yield


def is_apart(refusal: str) -> bool:
    """True where the parts were seen to differ from the whole: a later proof has found more."""
    return refusal.startswith((_APART, _ORDERED, _KEPT))


def _copied(forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Run a dropout that keeps everything; in training too it does not return its argument."""
    found = forward(*args, **kwargs)
    with without_torch_function():
        return found.clone()


def _middle(examples: int, least: int) -> int:
    """Return where to cut: sizes without a common divisor, so that few labels keep proportion."""
    sizes = range(least, examples - least + 1)
    odd = [size for size in sizes if math.gcd(size, examples) == 1]
    return min(odd or sizes, key=lambda size: abs(3 * size - 2 * examples))


def _length(parameter: Tensor) -> Tensor:
    if (gradient := parameter.grad) is None:
        return torch.zeros((), dtype=torch.float64, device=parameter.device)
    dense = gradient if gradient.layout is torch.strided else gradient.coalesce().values()
    wide = torch.promote_types(dense.dtype, torch.float32)
    found: Tensor = torch.linalg.vector_norm(dense.detach(), dtype=wide)
    return found.double()


def _orders_alike(whole: list[int], one: list[int], other: list[int]) -> bool:
    """True if one part, or both, order among as many as the whole does, as often."""
    all_of, first, second = map(Counter, (whole, one, other))
    sizes = {*all_of, *first, *second}
    return all(max(first[s], second[s]) <= all_of[s] <= first[s] + second[s] for s in sizes)


def _different_buffer(whole: dict[str, Tensor], parts: dict[str, Tensor]) -> str:
    """Return why parts may not take the place of the whole if they leave another buffer."""
    for name in whole.keys() | parts.keys():
        one, other = whole.get(name), parts.get(name)
        is_same = one is not None and other is not None and one.shape == other.shape
        if not is_same or not torch.equal(one, other):  # type: ignore[arg-type]
            return f"forward writes the buffer {name!r}, and its parts leave another value there"
    return ""
