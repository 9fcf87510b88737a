"""Chooses how a batch is cut: the first way that runs and is proven, else whole and why."""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import nn

from daf.core.errors import DafError
from daf.profiling.split_proof import LEAST_PROVEN, MOST_EXAMPLES, SplitProof
from daf.profiling.terse_saves import terse_bytes
from daf.saved_tensors.observation import Observation
from daf.step.batch_cut import WHOLE, BatchCut, uncut_rows
from daf.step.context import StepContext
from daf.step.loss_weights import Weighing
from daf.step.microbatch import split_refusal
from daf.step.splitting import NO_ROOM_TO_PROVE, NOT_PROVEN, SplitChoice
from daf.step.state_snapshot import StateSnapshot
from daf.torch_compat.modules import AnyBatchNorm

Proven = tuple[Weighing, str]

MOST_CUTS = 3  # ways that are tried
LEAST_TIMED = 16  # examples in a batch from which on all proofs take less than a step
EXAMPLES_FOR_EACH = 8  # then, of the batch, for each that a proof takes; else it takes all
LEAST_WITH_STATISTICS = 2  # examples, where layers take statistics over them
HOPELESS = 0.9  # of what a step is expected to take: a plan may need less than what was observed
LEADS_BEYOND = "its graph began before the step, so that only one backward pass goes through it"
NO_PART_RUNS = "no part of it runs by itself, or no dimension of its tensors is one of examples"


Expected = Callable[[Observation, int], float]  # a peak (bytes) in a step of so many examples


def bytes_to_prove(
    expected: Expected, found: Observation, examples: int, saved_bytes: int
) -> float:
    """Return what a pass needs that saves, for the examples observed, so many bytes."""
    return expected(found, examples) + saved_bytes * examples / found.examples


def examples_of(batch: int) -> int:
    """Return how many examples a proof takes of a batch of so many; all of few."""
    if batch < LEAST_TIMED:
        return batch
    return min(MOST_EXAMPLES, max(LEAST_PROVEN, batch // EXAMPLES_FOR_EACH))


@dataclass(eq=False)
class CutChooser:
    """Tries ways to cut a batch on the smallest step.

    Args:
        observe: runs a step of so many first examples under the tightest codes.
        expected: the process's peak (bytes) in a step of so many examples, from an observed one.
        recover: frees what a step that failed left.
        within: runs under a budget (bytes); returns None if memory was refused.
        begun: the state in which training begins, which a first pass may change.
        allow_statistics: the user allows parts to have batch statistics of their own.
        ample_bytes: where a proof fits that by a first step, whose bytes are too many as it reads
            code, no second one is measured.
    """

    model: nn.Module
    observe: Callable[[StepContext, int], Observation]
    expected: Expected
    recover: Callable[[], None]
    within: Callable[[float, Callable[[], Any]], Any]
    begun: StateSnapshot
    allow_statistics: bool
    ample_bytes: float = 0.0

    def __post_init__(self) -> None:
        self.proof_ms, self._is_warm = 0.0, False
        self._needed_bytes = partial(bytes_to_prove, self.expected)

    def run(self, context: StepContext, budget_bytes: float) -> Observation | None:
        """Make the context's choice; return the smallest step, or None where no part runs."""
        known = context.choice
        if known.refusal != NOT_PROVEN:
            found = self._smallest(context, known.cut)
            context.choose(known)
            return found
        best: tuple[SplitChoice, Observation] | None = None
        for cut in islice(context.splitting.cuts(context.batch), MOST_CUTS):
            if (found := self._smallest(context, cut)) is None:
                continue
            choice = self._judged(context, found, budget_bytes)
            is_told = context.splitting.split is True or context.splitting.batch_dim is not None
            if not (is_told or choice.refusal) and (uncut := uncut_rows(context.batch, cut)):
                choice = replace(choice, refusal=f"it holds {uncut} as examples, which is not cut")
            if best is None or not choice.refusal:
                best = choice, found
            if not choice.refusal:
                break
        if best is None:
            context.choose(SplitChoice(WHOLE, refusal=NO_PART_RUNS))
            return None
        choice, found = best
        context.choose(choice, is_final=choice.refusal != NOT_PROVEN)
        return found

    def _smallest(self, context: StepContext, cut: BatchCut) -> Observation | None:
        """Observe the smallest part that runs, of one or two examples; None if none does."""
        modules = self.model.modules()
        has_statistics = any(isinstance(each, AnyBatchNorm) and each.training for each in modules)
        for least in range(LEAST_WITH_STATISTICS if has_statistics else 1, 3):
            proposed = replace(cut, least=least)
            context.choose(SplitChoice(proposed, refusal=NOT_PROVEN), is_final=False)
            if least > context.info.examples:
                break
            try:
                if not self._is_warm:  # once unmeasured: libraries load in a first step
                    found, self._is_warm = self.observe(context, least), True
                    needed_bytes = self._needed_bytes(found, MOST_EXAMPLES, found.plain_bytes)
                    if needed_bytes < self.ample_bytes:
                        return found
                return self.observe(context, least)
            except (DafError, MemoryError, torch.OutOfMemoryError):
                raise
            except Exception:  # the user's own code may raise anything for a part
                self.recover()
        return None

    def _judged(self, context: StepContext, found: Observation, budget_bytes: float) -> SplitChoice:
        cut, splitting, size = context.choice.cut, context.splitting, context.info.examples
        if self.begun.others.leads_beyond:
            return SplitChoice(cut, refusal=LEADS_BEYOND)
        statistics = "" if self.allow_statistics else split_refusal(self.model)
        if splitting.split is False or statistics:
            forbidden = splitting.forbidden_because if splitting.split is False else ""
            return SplitChoice(cut, refusal=forbidden or statistics)
        bound_bytes = math.inf if self._is_hopeless(found, budget_bytes) else budget_bytes
        proven = max(2 * cut.least, examples_of(size))
        is_tight = self._needed_bytes(found, proven, found.plain_bytes) > budget_bytes
        if is_tight and 2 * cut.least <= size:  # two sizes show what does not grow
            with suppress(Exception):  # what the user's code raises, the proof will find
                self.within(bound_bytes, partial(self.observe, context, 2 * cut.least))
            self.recover()
        room_bytes = int(self._needed_bytes(found, 2 * cut.least, terse_bytes(found)))
        sizes = range(min(size, proven), 2 * cut.least - 1, -1)
        examples, is_terse = self._room(found, sizes, budget_bytes)
        if examples is None:
            if splitting.split is True:  # the user's word stands in for the proof
                return SplitChoice(cut)
            refusal = NO_ROOM_TO_PROVE if size >= 2 * cut.least else NOT_PROVEN
            return SplitChoice(cut, refusal=refusal, proof_bytes=room_bytes)
        start_s = time.perf_counter()
        self.begun.restore()
        proof = SplitProof(
            self.model, context.loss_fn, statistics=not self.allow_statistics, is_terse=is_terse
        )
        proof.others = self.begun.others
        weighing, refusal = self._proven(
            partial(proof.run, context.batch, cut, examples), bound_bytes
        )
        self.recover()
        self.proof_ms += 1000.0 * (time.perf_counter() - start_s)
        if splitting.split is True:
            return SplitChoice(cut, weighing)
        alike = cut.alike(context.batch) if cut.own is None else frozenset()
        functions = frozenset(proof.functions)
        return SplitChoice(cut, weighing, refusal, functions, room_bytes, alike)

    def _proven(self, run: Callable[[], Proven], bound_bytes: float) -> Proven:
        try:
            return self.within(bound_bytes, run) or (Weighing.EXAMPLES, NO_ROOM_TO_PROVE)
        except Exception as error:  # the user's own code may raise anything for a part
            return Weighing.EXAMPLES, f"a part of it fails: {type(error).__name__}: {error}"[:300]

    def _room(
        self, found: Observation, sizes: Sequence[int], budget_bytes: float
    ) -> tuple[int | None, bool]:
        for is_terse, saved_bytes in ((False, found.plain_bytes), (True, terse_bytes(found))):
            for examples in sizes:
                amply = examples + (examples != sizes[-1])
                if self._needed_bytes(found, amply, saved_bytes) <= budget_bytes:
                    return examples, is_terse
        is_hopeless = self._is_hopeless(found, budget_bytes)
        return (sizes[-1] if sizes and is_hopeless else None), True

    def _is_hopeless(self, found: Observation, budget_bytes: float) -> bool:
        """Whether no step fits, as far as one can tell by the smallest."""
        # Such a budget is refused; what the least would be is still found out, beyond it, on as few
        # examples as show anything.
        return HOPELESS * self.expected(found, found.examples) > budget_bytes
