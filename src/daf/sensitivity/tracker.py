"""A session's sensitivity, measured beside training within its budget and a share of its time.

A measurement runs over the first examples of a batch (``sensitivity.estimate``), as many as are
predicted to fit; after refused memory the next takes half as many. The model and random states are
restored, and failures do not stop the training.
"""

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import InitVar, dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn

from daf.capture.capture import Capture
from daf.core.errors import DataError, NonFiniteLossError, PoolFullError
from daf.core.garbage import newer_garbage_collected
from daf.core.json_dataclasses import Resumable
from daf.core.policy import LEAST_SCORE_BITS, Policy, Site, coded_policy, with_chunked_operators
from daf.core.profile import Profile
from daf.memory.keeper import Keeper
from daf.planning import planner
from daf.pool.paged_pool import make_store
from daf.profiling.optimizer_probe import divides_by_gradients
from daf.recompute.python_state import Surroundings
from daf.sensitivity.estimate import Effort, measure_sensitivity
from daf.sensitivity.result import Sensitivity
from daf.step.context import StepContext
from daf.step.state_snapshot import StepSnapshot

OVERHEAD = 0.02


@dataclass(slots=True)
class Schedule:
    """Keeps measuring, and planning by its results, within ``overhead`` of the training time (ms).

    The first measurement must be earned too; until then the prior, which costs one pass, has to do.
    """

    overhead: float = OVERHEAD
    trained_ms: float = 0.0
    measured_ms: float = 0.0
    planned_ms: float = 0.0  # making plans by new numbers, and searching better ones beside steps
    plans: int = 0

    def allows(self, expected_ms: float) -> bool:
        """True if a measurement that will take ``expected_ms`` may begin now."""
        spent_ms = self.measured_ms + self.planned_ms
        return spent_ms + expected_ms <= self.overhead * self.trained_ms


MEASURED_BITS = 2  # of the codes measured: coarse enough for their noise to stand out
MEASURED_UNDER = coded_policy(MEASURED_BITS, score_bits=LEAST_SCORE_BITS)
PART, FIRST_PART = 4, 8  # a measurement takes this part of a batch, the first one's of large ones
SMALLEST_PART = 4  # examples
_EFFORT = Effort()
# Before the first step. A product's formula is whole; a normalisation's leaves out what passes on.
_FIRST_EFFORT = Effort(local=0, others=2)
# The base pass, redraws, all micro-batches, redraws of one.
PASSES = 1 + _EFFORT.local + _EFFORT.others + 2
_BYTES_PER_NUMBER = 8
# Of the base pass, micro-batches and the passes that are compared; those stacked; differences.
_SKETCHES = 1 + _EFFORT.micro_batches + 2 * max(1 + _EFFORT.local, _EFFORT.bias) + 2


def _effort(examples: int, usual: Effort = _EFFORT) -> Effort:
    return replace(usual, micro_batches=min(usual.micro_batches, examples // 2))


class Room(NamedTuple):
    """A measurement's budget, in the profile's own measure (bytes)."""

    profile: Profile  # of PyTorch's own operators, which hold most
    planned: Profile  # of those that plans run
    budget_bytes: int


def measured_under(room: Room | None, examples: int) -> Policy:
    """Return the codes under which sites are measured, each one's own, to plan with.

    Where plans' operators save at other sites than PyTorch's own (recomputed attention), they are
    measured, in as many chunks for ``examples`` as for a whole batch.
    """
    if room is None or room.planned.lossy_sites <= room.profile.lossy_sites:
        return MEASURED_UNDER
    chunk_bytes = max(1, room.planned.chunk_bytes * examples // room.planned.batch_size)
    return with_chunked_operators(MEASURED_UNDER, chunk_bytes)


@dataclass(eq=False)
class SensitivityTracker(Resumable):
    """Measures when it is time, and keeps the result; errors count in the optimizer's steps.

    ``known``: what an earlier run of the same model found; True: nothing; False: never measure.
    """

    KEPT = ("sensitivity", "measurements", "schedule", "last_ms")

    model: nn.Module
    optimizer: torch.optim.Optimizer
    keeper: Keeper
    known: InitVar[Sensitivity | bool] = True
    schedule: Schedule = field(default_factory=Schedule)
    measurements: int = 0
    is_measuring: bool = False
    refusal: str = ""
    last_ms: float | None = None
    sensitivity: Sensitivity | None = field(init=False)

    def __post_init__(self, known: Sensitivity | bool) -> None:
        self.sensitivity = self._usable(None if isinstance(known, bool) else known)
        self.was_known = self.sensitivity is not None
        self._is_on = bool(known)
        self._most_examples: int | None = None

    @cached_property
    def is_relative(self) -> bool:
        """True if errors count beside each parameter's own gradient."""
        return divides_by_gradients(self.optimizer)

    def _usable(self, known: Sensitivity | None) -> Sensitivity | None:
        """Return what is known, or None if it was measured for another kind of optimizer."""
        if known is None or known.relative is self.is_relative:
            return known
        logging.getLogger("daf").warning(
            "sensitivities that were measured for an optimizer of another kind (one divides by its "
            "gradients, the other does not) are left out; they are measured anew"
        )
        return None

    def is_due(self, batch_size: int, step_ms: float) -> bool:
        """True if training has lasted long enough for another measurement."""
        if not self._is_on or self.refusal:
            return False
        share = self._examples(batch_size) / max(1, batch_size)
        expected_ms = self.last_ms if self.last_ms is not None else PASSES * share * step_ms
        plan_ms = self.schedule.planned_ms / max(1, self.schedule.plans)  # mean, searches included
        return self.schedule.allows(expected_ms + plan_ms)

    def measure(
        self,
        context: StepContext,
        room: Room | None,
        running: Policy,
        *,
        policy: Policy | None = None,
        pool_bytes: int | None = None,
    ) -> bool:
        """Measure now, if it fits ``room`` (None: no budget); True if there are new numbers.

        ``policy`` is measured as it runs, a code serving several sites; None: every site by itself.
        ``running``: whose bias is measured.
        """
        if not self._is_on or self.refusal:
            return False
        if (examples := self._examples_that_fit(context.info.examples, room)) is None:
            return False
        if room is not None:
            self.keeper.expect(self._predicted_bytes(room.profile, examples))
        start_s = time.perf_counter()
        self.is_measuring = True
        try:
            with newer_garbage_collected():  # passes' frames and graphs can be parts of cycles
                found = self._guarded(context, room, examples, running, policy, pool_bytes)
            self.keeper.flush()
        finally:
            self.is_measuring = False
            took_ms = 1000.0 * (time.perf_counter() - start_s)
            self.last_ms = took_ms if self.schedule.trained_ms else None  # the first's are fewer
            self.schedule.measured_ms += took_ms
        if found is None or not found.sites or not found.is_finite:
            return False
        self.measurements += 1
        self.sensitivity = self.sensitivity.refreshed(found) if self.sensitivity else found
        return True

    def weighed(self, profile: Profile) -> Profile:
        """Return the profile with the known sensitivities of its sites."""
        if (found := self.sensitivity) is None:
            return profile
        return replace(profile, weights=found.weights(), noise_per_weight=found.noise_per_weight)

    def check(self, profiles: Iterable[Profile]) -> None:
        """Raise DataError if sensitivities are known, but none of a site of this model."""
        lossy = frozenset[Site]().union(*(each.lossy_sites for each in profiles))
        found = self.sensitivity
        if found is not None and lossy and not lossy & found.sites.keys():
            raise DataError(
                f"asked to plan with sensitivities of {len(found.sites)} sites, none of which is "
                f"one of this model's {len(lossy)}; leave them out, so that they are measured"
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.sensitivity = self._usable(self.sensitivity)

    def _guarded(
        self,
        context: StepContext,
        room: Room | None,
        examples: int,
        running: Policy,
        policy: Policy | None,
        pool_bytes: int | None,
    ) -> Sensitivity | None:
        """Measure; None if memory was refused, codes were evicted, or the loss is not finite."""
        refusals = self.keeper.refusals()
        snapshot = StepSnapshot(Surroundings.of(self.model, context.loss_fn))
        capture = Capture(self.model, make_store(pool_bytes))
        found: Sensitivity | None = None
        try:
            found = measure_sensitivity(
                self.model,
                context.loss_fn,
                context.first(examples),
                policy or measured_under(room, examples),
                effort=_effort(examples, _EFFORT if self.schedule.trained_ms else _FIRST_EFFORT),
                seed=context.seed,
                step_index=context.index,
                separate_codes=policy is None,
                capture=capture,
                relative=self.is_relative,
                cut=context.choice.cut,
                running=running,
            )
        except NonFiniteLossError:
            pass
        except Exception as error:  # the user's own code may raise anything: training goes on
            is_full = isinstance(error, PoolFullError)
            if not is_full and not self.keeper.has_refused(error, refusals):
                self.refusal = f"sensitivities cannot be measured here: {error}"
            self._most_examples = examples // 2
            error.__cause__ = error.__context__ = None
            error.__traceback__ = None  # its frames hold the pass's tensors
            snapshot.forget_backward()
        if capture.stats.evicted_bytes:
            self._most_examples, found = examples // 2, None
        capture.release_scratch()
        return found

    def _examples(self, batch_size: int) -> int:
        first = 0 if self.schedule.trained_ms else max(2 * SMALLEST_PART, batch_size // FIRST_PART)
        wanted = min(first or batch_size, -(-batch_size // PART))
        wanted = min(batch_size, max(SMALLEST_PART, wanted))
        return wanted if self._most_examples is None else min(wanted, self._most_examples)

    def _examples_that_fit(self, batch_size: int, room: Room | None) -> int | None:
        examples = self._examples(batch_size)
        while examples >= min(batch_size, SMALLEST_PART):
            if room is None or self._predicted_bytes(room.profile, examples) <= room.budget_bytes:
                return examples
            examples //= 2
        return None

    def _predicted_bytes(self, profile: Profile, examples: int) -> int:
        micro_batch = -(-examples // max(1, _effort(examples).micro_batches))
        widest = planner.level_peak_bytes(profile, examples, str(MEASURED_BITS))
        peak = max(widest, planner.level_peak_bytes(profile, micro_batch, "exact"))
        peak += profile.passing_bytes_at(examples)
        trained = sum(1 for each in self.model.parameters() if each.requires_grad)
        return peak + _SKETCHES * trained * _EFFORT.buckets * _BYTES_PER_NUMBER
