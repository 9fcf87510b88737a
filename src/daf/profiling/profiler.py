"""Measures small steps into a Profile: bytes, moments and times as functions of the batch.

Each step runs the user's own model and loss on the first examples of the real batch. Bytes are
observed under the codes that hold least, so that measuring fits wherever the job does; times under
plain PyTorch, where that fits. Random states, buffers, gradients and training flags are restored.
"""

import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from daf.capture.capture import Capture
from daf.core.errors import BudgetError, DafError, SavedTensorError
from daf.core.notebook import Say
from daf.core.policy import Policy, plain_policy
from daf.core.profile import Affine, DeviceSpeeds, Profile
from daf.memory.domain import MemoryDomain, device_of
from daf.memory.keeper import Keeper
from daf.offload.spill import SpillOptions
from daf.operators.chunked.weight_gradient import chunk_bytes_on
from daf.planning import planner
from daf.planning.candidate import MARGIN_BYTES
from daf.profiling import model_memory
from daf.profiling.beside_memory import BesideMemory
from daf.profiling.device_speeds import calibrated, device_speeds
from daf.profiling.growth import PeakGrowth, beside_tensors
from daf.profiling.profile_assembly import build, with_recipes
from daf.profiling.replay_proof import ProofLimits, most_ms, prove_replays, refuse_replays
from daf.profiling.small_steps import (
    LONG_MS,
    RECOMPUTING,
    TIGHTEST,
    TIGHTEST_BITS,
    Expectation,
    SizeTimes,
    StepOperators,
    fastest_ms,
    halvings,
    probe_sizes,
    sizes_within,
    timed_ms,
    times_by_size,
)
from daf.profiling.split_choice import LEAST_WITH_STATISTICS, CutChooser, bytes_to_prove
from daf.profiling.step_observer import Observer
from daf.profiling.terse_saves import terse_bytes
from daf.saved_tensors.observation import Observation
from daf.step.batch_cut import WHOLE
from daf.step.context import StepContext
from daf.step.dry_run import EXAMPLES, dry_run
from daf.step.microbatch import read_loss
from daf.step.splitting import NOT_PROVEN, SplitChoice
from daf.step.state_snapshot import preserved_state

Found = TypeVar("Found")

SURE_SHARE = 0.8  # of the budget's room: a step that is foretold to take no more fits surely
# Code that a step is the first to read seems to grow with it; a whole batch's may seem so much.
MOST_READ_BYTES = 4 * 2**20
UPDATE_PASSES = 2  # reads and writes parameter, gradient and state


@dataclass(eq=False)
class Profiler:
    """Measures steps of one model on one batch; never steps the optimizer.

    Args:
        capture: the capture that training will use.
        memory: what the budget bounds.
        baseline_bytes: of that memory, before the model existed.
        allow_split: the user permits micro-batches in any case.
        spill: where tensors may be spilled; None: nowhere.
        begin_peak: resets the memory's high-water mark.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    capture: Capture
    memory: MemoryDomain
    keeper: Keeper
    baseline_bytes: int
    allow_split: bool
    spill: SpillOptions | None
    begin_peak: Callable[[], object]

    def __post_init__(self) -> None:
        self._choice = SplitChoice(WHOLE, refusal=NOT_PROVEN)
        self._operators, self._growth = StepOperators(), PeakGrowth()
        self._beside = BesideMemory(self.memory, self.keeper)
        self._smallest: Observation | None = None  # that runs by itself
        self._bound_bytes, self._grows_evenly, self.proof_ms = math.inf, False, 0.0
        self._ample_bytes = 0.0  # of a proof alone

    def profile(
        self,
        context: StepContext,
        budget_bytes: int,
        own: Profile | None = None,
        on_progress: Say = lambda _: None,
        *,
        is_bounded: bool = False,
        is_fused: bool = False,
    ) -> Profile:
        """Measure at the sizes of ``probe_sizes`` and, for times, at smaller ones; takes seconds.

        A step runs only if expected to fit the budget, except the smallest step that training may
        take. If that one does not fit, neither does the job, and it names the least budget. With
        ``own``, the profile of PyTorch's own operators, or ``is_fused``, fused and chunked ones are
        measured. Raises BudgetError if even the smallest step needs more than the budget and
        ``is_bounded``, and PoolFullError if the pool cannot hold that of the tightest policy.
        """
        # A refusal itself takes some: what unwinds it is read from PyTorch's files.
        self._bound_bytes = budget_bytes - MARGIN_BYTES if is_bounded else math.inf
        gc.collect()  # what measuring otherwise has left
        try:
            return self._measured(context, budget_bytes, own, on_progress, is_fused)
        except (DafError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # the user's own code may raise anything for a part
            if own is not None or context.choice.cut == WHOLE:
                raise
            self._recover()
            reason = f"a part of it fails: {type(error).__name__}: {error}"[:300]
            context.choose(SplitChoice(WHOLE, refusal=reason))
        return self._measured(context, budget_bytes, own, on_progress, is_fused)

    def _measured(
        self, context: StepContext, budget_bytes: int, own: Profile | None, say: Say, is_fused: bool
    ) -> Profile:
        device = device_of(self.model)
        self._operators = StepOperators()
        if own is None:  # what loading and other work has read
            self._beside.drop_code()
        with preserved_state(self.model, context.loss_fn, gradients=True) as self._begun:
            if is_fused:
                self._operators = StepOperators(context.info.examples, chunk_bytes_on(device))
                nothing_fits = partial(self._dry_run, context, lambda _: math.inf, budget_bytes)
                self._bounded(nothing_fits)  # so it takes the fewest examples
            say("the smallest step, and whether parts add up to the batch")
            self._smallest = None if own else self._choose_cut(context, budget_bytes)
            self._choice, examples = context.choice, context.info.examples
            least = self._choice.cut.least
            expected = self._expectation(context, own)
            if own is not None:
                say("fusions")
                self._operators = StepOperators(examples, chunk_bytes_on(device))
                self._dry_run(context, expected, budget_bytes)
            sizes = sizes_within(probe_sizes(examples), expected, budget_bytes, least)
            if self._smallest is None:
                # Once unmeasured: code pages, thread pools and kernels' own buffers stay loaded.
                say("a first small step")
                first = min(sizes[0], max(least, LEAST_WITH_STATISTICS)) if own else sizes[0]
                self._bounded(partial(self._observe, context, first, again=False))
            observations = self._observations(context, sizes, budget_bytes, say)
            observations += self._whole(context, own, observations[-1], budget_bytes, say)
            if own is None:  # what only first steps read; those that are timed read the rest again
                self._beside.drop_code()
            say("times")
            kept_ms, coded_ms = self._times(context, observations, budget_bytes)
            say("replays")
            refusals = own.replay_refusals if own else None
            if refusals is None:
                part = self._smallest or observations[0]
                refusals = self._replay_refusals(context, part, kept_ms, budget_bytes)
            refuse_replays(observations, refusals)
        self.keeper.code_returned()
        known, room_bytes = own.speeds if own else None, budget_bytes - self.memory.held_bytes()
        speeds = device_speeds(observations[-1], self.spill, known, device, room_bytes)
        found = self._profile(examples, observations, kept_ms, speeds)
        if coded_ms is not None:
            found = calibrated(found, kept_ms[-1][0], coded_ms)
        say("recomputation")
        return self._with_recipes(found, context, observations, budget_bytes)

    def prove_cut(self, context: StepContext, budget_bytes: float) -> None:
        """Make the context's choice of how its batch is cut, and measure nothing else."""
        with preserved_state(self.model, context.loss_fn, gradients=True) as self._begun:
            self._bound_bytes = self._ample_bytes = budget_bytes
            self._choose_cut(context, budget_bytes)

    def _choose_cut(self, context: StepContext, budget_bytes: float) -> Observation | None:
        chooser = CutChooser(
            self.model,
            lambda *asked: self._bounded(partial(self._observe, *asked)),
            self._expected,
            self._recover,
            self._within,
            self._begun,
            allow_statistics=self.allow_split,
            ample_bytes=self._ample_bytes,
        )
        smallest = chooser.run(context, budget_bytes)
        self.proof_ms += chooser.proof_ms
        return smallest

    def _expectation(self, context: StepContext, own: Profile | None) -> Expectation:
        """Return the expected peak of a step of few examples."""
        # A batch that is not cut needs none: a job without room for a few has none for all.
        if own is not None and not context.choice.refusal:
            level = partial(planner.level_peak_bytes, own, level=str(TIGHTEST_BITS))
            return lambda examples: level(examples=examples) + own.passing_bytes_at(examples)
        if context.choice.refusal or self._smallest is None:
            return lambda _: 0.0
        return partial(self._expected, self._smallest)

    def _dry_run(self, context: StepContext, expected: Expectation, budget_bytes: int) -> bool:
        """Find what may be fused; returns True, as None is what a refusal returns."""
        wanted, cut = (min(EXAMPLES, context.info.examples),), context.choice.cut
        examples = sizes_within(wanted, expected, budget_bytes, cut.least)[-1]
        policy = self._operators.of(TIGHTEST, examples)
        dry_run(self.capture, self.model, policy, context.batch, context.loss_fn, examples, cut)
        return True

    def _observations(
        self, context: StepContext, sizes: Sequence[int], budget_bytes: int, say: Say
    ) -> list[Observation]:
        """Observe the sizes that fit, the first in any case; if no other does, a smaller one."""
        # Of one size alone, what every step takes would seem to grow with the batch.
        seen = self._smallest
        found = [seen] if seen and seen.examples == sizes[0] else []
        for size in sizes[len(found) :]:
            if found and self._expected(found[-1], size) > budget_bytes:
                break
            say(f"bytes at {size}")
            observe = partial(self._observe, context, size)
            fits = found and self._expected(found[0], found[0].examples) <= budget_bytes
            bound_bytes = budget_bytes if fits else self._bound_bytes
            observed = self._within(bound_bytes, observe) if found else self._bounded(observe)
            if observed is None:
                break
            found.append(observed)
        smaller = max(self._choice.cut.least, sizes[0] // 2)
        if len(found) == 1 and smaller < sizes[0]:
            say(f"bytes at {smaller}")
            return [self._observe(context, smaller), *found]
        return self._growth.alike(found[0]) if len(found) == 1 else found

    def _whole(
        self, context: StepContext, own: Profile | None, largest: Observation, budget: int, say: Say
    ) -> list[Observation]:
        """Observe a batch that is not cut as it is, if it needs a plan and growth is a guess."""
        examples, now = context.info.examples, self._beside.resident_bytes()
        bound_bytes = min(self._bound_bytes, budget - MARGIN_BYTES)
        whole_bytes = self._kept_bytes(largest, examples)
        needs_plan = self._expected(largest, largest.examples) <= bound_bytes < whole_bytes
        if not (self._choice.refusal and needs_plan) or largest.examples == examples:
            return []
        is_even = self._growth.is_even(largest) if own is None else own.grows_evenly
        tight = self._expected(largest, examples) - now
        self._grows_evenly = is_even and tight <= SURE_SHARE * (bound_bytes - now)
        if self._grows_evenly:
            return []
        say(f"bytes at {examples}")
        found = self._within(bound_bytes, partial(self._observe, context, examples))
        return [] if found is None else [found]

    def _expected(self, found: Observation, examples: int) -> float:
        """Return the process's peak as observed steps grow, and a margin."""
        # Libraries add their own: matrix products of GPT-2's shape took 24 MB per example.
        gradients = model_memory.gradient_bytes(self.model)
        growing = self._growth.peak_bytes(found, examples, gradients)
        return self._beside.resident_bytes() + gradients + growing + MARGIN_BYTES

    def _kept_bytes(self, found: Observation, examples: int) -> float:
        return self._expected(found, examples) + found.plain_bytes * examples / found.examples

    def _bytes_to_prove(self, found: Observation) -> int:
        """Return the least budget with room to prove the cut, by all sizes observed; 0: none."""
        examples = 2 * self._choice.cut.least
        needed = bytes_to_prove(self._expected, found, examples, terse_bytes(found))
        return min(self._choice.proof_bytes, int(needed))

    def _observe(
        self, context: StepContext, examples: int, policy: Policy = TIGHTEST, *, again: bool = True
    ) -> Observation:
        mapped_bytes, policy = self.memory.mapped_bytes(), self._operators.of(policy, examples)
        found = self._observe_once(context, examples, policy)
        read_bytes = self.memory.mapped_bytes() - mapped_bytes
        if again and read_bytes * context.info.examples > MOST_READ_BYTES * examples:
            found = self._observe_once(context, examples, policy)
        if not policy.recomputes:
            self._growth.note(found, (context.choice.cut, self._operators))
        return found

    def _observe_once(self, context: StepContext, examples: int, policy: Policy) -> Observation:
        self._make_room()
        self.begin_peak()
        before_bytes = self.memory.held_bytes()
        observer, part = Observer(self.capture, examples, self.memory), context.first(examples)
        step = self.capture.step(policy, seed=0, step_index=0, batch=part, watcher=observer)
        with observer.watching():
            with step:
                loss = read_loss(context.loss_fn(self.model, part), examples)
            observer.begin_backward()
            self._begun.others.backward(loss.mean)
        observer.found.process_bytes = self.memory.peak_bytes() - before_bytes
        nn.Module.zero_grad(self.model)
        self._settle()
        observer.found.plain_bytes = self.capture.stats.plain_peak_bytes
        observer.found.chunk_bytes = policy.chunk_bytes or 0
        return observer.found

    def _times(
        self, context: StepContext, observations: list[Observation], budget_bytes: int
    ) -> tuple[SizeTimes, float | None]:
        """Return the times with everything kept, and of the largest of these sizes coded."""
        largest = observations[-1]
        fitting = self._fitting_kept(observations, budget_bytes)
        is_cut, is_long = fitting and not self._choice.refusal, largest.step_ms >= LONG_MS
        uncut = fitting[-1:] if is_long else fitting  # a long step's time grows with its examples
        sizes = [*halvings(fitting[-1], self._choice.cut.least)] if is_cut else uncut

        def fastest(policy: Policy, size: int) -> float:
            policy = self._operators.of(policy, size)
            others = self._begun.others  # observed steps have met them: no walk is timed
            back = others.backward if others.leads_beyond else Tensor.backward
            run = partial(timed_ms, self.capture, self.memory, context, policy, size, back)
            found_ms = fastest_ms(run)
            self._settle()
            return found_ms

        kept = times_by_size(
            sizes, lambda size: self._within(budget_bytes, partial(fastest, plain_policy(), size))
        )
        if not kept:
            return ((largest.examples, largest.step_ms),), None
        coded = {each.examples: each.coded_ms for each in observations}.get(kept[-1][0], 0.0)
        return kept, coded if coded >= LONG_MS else fastest(TIGHTEST, kept[-1][0])

    def _fitting_kept(self, observations: list[Observation], budget_bytes: int) -> list[int]:
        sizes = {each.examples: self._kept_bytes(each, each.examples) for each in observations}
        return [examples for examples, needed in sizes.items() if needed <= budget_bytes]

    def _with_recipes(
        self, found: Profile, context: StepContext, observations: list[Observation], budget: int
    ) -> Profile:
        """Add the recipes that a step finds which recomputes what it can, if they may be needed."""
        # That is the smallest if none has room: the least budget that is named has recipes, too.
        if found.is_fused or planner.kept_peak_bytes(found) <= budget:
            return found
        fitting = self._fitting_kept(observations, budget) or [observations[0].examples]
        room = self._bound_bytes if self._expected(observations[0], fitting[0]) > budget else budget
        # What is recomputed runs forward's code, and so reads none.
        size = fitting[0 if observations[0].step_ms >= LONG_MS else -1]
        observe = partial(self._observe, context, size, RECOMPUTING, again=False)
        with preserved_state(self.model, context.loss_fn, gradients=True) as self._begun:
            try:
                recomputing = self._within(room, observe)
            except SavedTensorError:  # the model does something else each time
                self._recover()
                return found
        return found if recomputing is None else with_recipes(found, recomputing)

    def _replay_refusals(
        self, context: StepContext, smallest: Observation, times: SizeTimes, budget_bytes: int
    ) -> dict[str, str]:
        """Prove on the smallest step which calls may be replayed, with what room there is."""
        examples, count = context.info.examples, smallest.examples
        part = context.first(count)
        expected = self._expected(smallest, count)  # neither codes nor gradients exist meanwhile
        bound_bytes = self._bound_bytes if expected > budget_bytes else budget_bytes
        room = bound_bytes - expected + smallest.held_bytes
        limits = ProofLimits(
            None if room >= 2 * smallest.plain_bytes else max(0, int(room)),
            most_ms(count, examples, Affine.through(times).at(examples)),
        )
        start_s = time.perf_counter()
        run = partial(context.loss_fn, self.model, part)
        found = prove_replays(self.model, smallest, lambda: read_loss(run(), count), limits)
        self.proof_ms += 1000.0 * (time.perf_counter() - start_s)
        self._make_room()
        return found

    def _profile(
        self, examples: int, observations: list[Observation], times: SizeTimes, speeds: DeviceSpeeds
    ) -> Profile:
        savings, calls, timeline = build(observations)
        self._make_room()
        state = model_memory.optimizer_bytes_to_come(self.optimizer)
        passing = model_memory.update_bytes(self.optimizer, self.memory)
        self._make_room()  # what the trials had
        self._beside.note()
        resident = self._beside.resident_bytes()
        parameters = model_memory.parameter_bytes(self.model)  # with code, less than loading took
        touched = model_memory.touched_bytes(self.model, self.optimizer)
        return Profile(
            floor_bytes=min(self.baseline_bytes, max(0, resident - parameters)),
            resident_bytes=resident,
            parameter_bytes=parameters,
            gradient_bytes=model_memory.gradient_bytes(self.model),
            optimizer_bytes=state,
            batch_size=examples,
            savings=savings,
            calls=calls,
            timeline=timeline,
            micro_batch_ms=times,
            update_ms=1000.0 * UPDATE_PASSES * (touched + state) / speeds.copy,
            speeds=speeds,
            weights={},
            update_bytes=passing,
            passing_bytes=beside_tensors(observations, self.memory),
            split_refusal=self._choice.refusal,
            grows_evenly=self._grows_evenly,
            proof_bytes=self._bytes_to_prove(observations[0]),
            least_micro_batch=self._choice.cut.least,
            recycles=self.keeper.recycles,
            chunk_bytes=self._operators.chunk_bytes,
            part_bytes=observations[-1].norm_part_bytes,
            fusions=self.capture.fusions() if self._operators.chunk_bytes else (),
        )

    def _within(self, budget_bytes: float, run: Callable[[], Found]) -> Found | None:
        if (found := self.keeper.within(budget_bytes, run)) is None:
            self._recover()
        return found

    def _bounded(self, run: Callable[[], Found]) -> Found:
        if (found := self._within(self._bound_bytes, run)) is None:
            raise BudgetError("the smallest step needs more than the budget")
        return found

    def _make_room(self) -> None:
        self.capture.release_scratch()
        self.keeper.flush()

    def _recover(self) -> None:
        nn.Module.zero_grad(self.model)
        gc.collect(1)  # young frames and graphs of what failed or was proven can be cycles
        self._make_room()

    def _settle(self) -> None:
        self._make_room()
        self._beside.note()
