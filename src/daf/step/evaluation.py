"""A function of a model and a batch without gradients: whole where it fits, else in parts.

Parts are used only where a few examples have shown that their results join to the whole's.
"""

import gc
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from daf.core.errors import BudgetError, SplitError
from daf.core.units import format_bytes
from daf.memory.keeper import Keeper
from daf.recompute.python_state import Surroundings
from daf.step.batch_cut import WHOLE, BatchCut
from daf.step.loss_weights import LossWeights, PartWeights, Weighing
from daf.step.microbatch import LossFunction, WeightedLoss
from daf.step.splitting import Splitting, kind_of
from daf.step.state_snapshot import StateSnapshot
from daf.torch_compat.pytree import map_nest, tensors_in_batch

_MOST_CUTS = 3  # ways that are tried
_PROOF_EXAMPLES = 4
_TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 5e-3}
_FLOAT_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class _Way:
    """How batches of one kind run: in parts of so many examples, or whole, and why."""

    cut: BatchCut
    examples: int
    refusal: str = ""


@dataclass(eq=False)
class Evaluation:
    """Evaluates one session's model under its budget."""

    model: nn.Module
    splitting: Splitting
    keeper: Keeper
    _ways: dict[Hashable, _Way] = field(default_factory=dict)

    def run(self, batch: Any, fn: LossFunction, budget_bytes: int | None) -> Any:
        """Return ``fn(model, batch)``; ``Session.evaluate`` says more, and what this raises."""
        kind = "evaluation", kind_of(self.model, batch, fn)
        way = self._ways.get(kind) or _Way(WHOLE, 1)
        snapshot = StateSnapshot(Surroundings.of(self.model, fn), holds_tensors=False)
        with torch.no_grad():
            while True:
                refusals = self.keeper.refusals()
                try:
                    return _in_parts(self.model, batch, fn, way)
                except (RuntimeError, MemoryError) as error:
                    if not self.keeper.has_refused(error, refusals):
                        raise
                    refused = error.with_traceback(None)  # whose frames hold tensors
                snapshot.restore()
                gc.collect()
                self.keeper.flush()
                way = self._smaller(way, batch, fn, snapshot)
                if way.refusal:
                    raise self._error(way, budget_bytes) from refused
                self._ways[kind] = way

    def _smaller(self, way: _Way, batch: Any, fn: LossFunction, snapshot: StateSnapshot) -> _Way:
        if way.cut == WHOLE:
            try:
                way = self._proven(batch, fn)
            finally:
                snapshot.restore()
        half = way.examples // 2
        if not way.refusal and half < way.cut.least:
            return replace(way, refusal=f"it runs {way.examples} examples at a time already")
        return replace(way, examples=half)

    def _proven(self, batch: Any, fn: LossFunction) -> _Way:
        """Return the first cut whose parts join to the whole on a few examples; else why none."""
        refusal = "no dimension of its tensors is one of examples"
        for cut in islice(self.splitting.cuts(batch), _MOST_CUTS):
            size = cut.size(batch)
            examples = min(size, max(_PROOF_EXAMPLES, 3 * cut.least))
            if self.splitting.split is False or examples < 2 * cut.least:
                continue
            try:
                some = cut.pick(batch, cut.telling(batch, examples))
                whole = fn(self.model, some)
                parts = _in_parts(self.model, some, fn, _Way(cut, examples - cut.least))
            except Exception as error:  # the user's own code may raise anything for a part
                refusal = f"a part of it fails: {type(error).__name__}: {error}"[:300]
                continue
            if _are_alike(whole, parts):
                return _Way(cut, size)
            refusal = "on a few examples its parts' results do not join to the whole's"
        return _Way(WHOLE, 1, refusal)

    def _error(self, way: _Way, budget_bytes: int | None) -> BudgetError:
        missing = self.keeper.missing_bytes
        least = None if budget_bytes is None else budget_bytes + missing
        budget = "its" if budget_bytes is None else format_bytes(budget_bytes)
        return BudgetError(
            f"asked to evaluate a batch within a budget of {budget}; at its smallest part "
            f"{format_bytes(missing)} were missing, and it is not cut further because "
            f"{way.refusal}; try a smaller batch, or session.budget = {least}",
            least,
        )


def _in_parts(model: nn.Module, batch: Any, fn: LossFunction, way: _Way) -> Any:
    parts = way.cut.parts(batch, way.examples) if way.cut != WHOLE else [batch]
    if len(parts) == 1:
        return fn(model, batch)
    weights, results = PartWeights(Weighing.EXAMPLES), []
    for part in parts:
        size = way.cut.size(part)
        with LossWeights() as operators:
            found = fn(model, part)
        if _is_scalar(found):
            mean = WeightedLoss(torch.as_tensor(found), float(size), is_sum=False)
            weights.weighed(mean, operators)
        results.append((found, size))
    if _is_scalar(results[0][0]):
        weights.check()
        weights.check_scalings()
    return _joined(results)


def _joined(results: list[tuple[Any, int]]) -> Any:
    """Return the whole's result from each part's, which has so many examples."""
    # A scalar is a mean, two scalars are (sum, weight), other tensors have a row for each example;
    # raises SplitError for anything else.
    first = results[0][0]
    if _is_scalar(first):
        examples = sum(size for _, size in results)
        return sum(found * (size / examples) for found, size in results)
    if isinstance(first, tuple) and len(first) == 2 and all(map(_is_scalar, first)):
        return tuple(sum(found[place] for found, _ in results) for place in range(2))
    rows = [tensors_in_batch(found) for found, _ in results]
    sizes = [size for _, size in results]
    if not rows[0] or any(
        each.dim() == 0 or each.shape[0] != size
        for found, size in zip(rows, sizes, strict=True)
        for each in found
    ):
        raise SplitError("its parts return neither a mean, (sum, weight), nor rows of examples")
    columns: Iterator[tuple[Tensor, ...]] = zip(*rows, strict=True)
    return map_nest(Tensor, lambda _: torch.cat(next(columns)), first)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.dim() == 0)


def _are_alike(one: Any, other: Any) -> bool:
    """True if two results of one structure differ by rounding only."""
    pairs = zip(_leaves(one), _leaves(other), strict=True)
    return all(_differ_by_rounding(torch.as_tensor(a), torch.as_tensor(b)) for a, b in pairs)


def _differ_by_rounding(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    tolerance = _TOLERANCE.get(one.dtype, _FLOAT_TOLERANCE)
    wide = torch.promote_types(one.dtype, torch.float64)
    size = float(torch.nan_to_num(one.to(wide).abs(), posinf=0.0).mean())
    return torch.allclose(
        one.to(wide), other.to(wide), rtol=tolerance, atol=tolerance * size, equal_nan=True
    )


def _leaves(value: Any) -> list[Any]:
    if _is_scalar(value):
        return [value]
    if isinstance(value, tuple) and all(map(_is_scalar, value)):
        return list(value)
    return tensors_in_batch(value)
