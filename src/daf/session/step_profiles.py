"""Measures a session's small steps, with PyTorch's own operators and with fused ones.

What was measured serves larger batches too, as long as they are near it.
"""

import gc
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import nn

from daf.budget.limits import room_bytes
from daf.core.errors import BudgetError, DafError
from daf.core.garbage import newer_garbage_collected
from daf.core.notebook import Say
from daf.core.profile import Profile, Profiles
from daf.core.units import format_bytes
from daf.kernels.devices import can_code_on
from daf.memory.domain import MemoryDomain, device_of
from daf.planning import planner
from daf.planning.candidate import MARGIN_BYTES
from daf.profiling.growth import Growth, grown
from daf.profiling.model_memory import gradient_bytes
from daf.profiling.profiler import Profiler
from daf.step.context import BatchInfo, StepContext
from daf.step.splitting import NO_ROOM_TO_PROVE

# A measured small step needs the gradients and about as much again in workspaces and activations.
ROOM_TO_MEASURE = 4
# An example so much larger than any measured is measured anew: lengths 16 to 400 take 7 profiles.
MOST_RATIO = 1.6
# Plans are made for examples a little larger than the one at hand, so that few are made.
AHEAD = 1.1
MOST_LEFT_BYTES = 2**20  # by others as garbage, beside which a step was measured


@dataclass(eq=False)
class StepProfiles:
    """Measures one session's profiles; ``memory`` is what the budget bounds.

    ``may_fuse``: False where the user wants PyTorch's operators; ``proof_ms``: spent on proofs.
    """

    model: nn.Module
    memory: MemoryDomain
    make_profiler: Callable[[], Profiler]
    may_fuse: bool = True
    fusion_refusal: str = ""
    proof_ms: float = 0.0
    measured: int = 0  # how often

    def refuse_without_room(self, budget_bytes: int, resident_bytes: Callable[[], int]) -> None:
        """Refuse a hopeless budget where the machine has no room to measure what it would need.

        BudgetError: what is held with the gradients alone exceeds the budget.
        """
        gradients = gradient_bytes(self.model)
        enough = ROOM_TO_MEASURE * gradients
        if room_bytes(self.memory) >= enough:  # which is known sooner than what is held
            return
        held = resident_bytes()
        if (least := held + gradients) > budget_bytes:
            raise BudgetError(
                f"asked for a budget of {format_bytes(budget_bytes)}; {self.memory.name} with its "
                f"model and gradients alone takes {format_bytes(least)}, before any batch, and "
                "there is no room here to measure more; try a budget well above that, or a "
                "smaller model",
                held + enough + MARGIN_BYTES,
            )

    def measure(
        self, context: StepContext, budget_bytes: int, on_progress: Say, *, can_fuse: bool
    ) -> Profiles:
        """Return profiles of PyTorch's own operators, and of fused ones where they gain something.

        A step that fits as it is, whole or in micro-batches as fast, keeps PyTorch's operators, and
        with them every bit. So does a step that fails with fused ones (second derivatives, say).
        The batch's first examples are used.
        """
        own, self.fusion_refusal, self.measured = None, "", self.measured + 1
        # Fused operators read codes, which need kernels where the model is.
        can_fuse = can_fuse and self.may_fuse and can_code_on(device_of(self.model))
        profiled = partial(self.profile, context, budget_bytes, on_progress=on_progress)
        ways = (False, True) if can_fuse and budget_bytes else ()
        with newer_garbage_collected(), suppress(BudgetError):
            own = profiled(is_bounded=True) if ways else None
            if own is not None and planner.kept_parts_fit(own, budget_bytes):
                return Profiles(own)
        left_bytes = self._bytes_left_by_others()
        with newer_garbage_collected():
            if own is None or left_bytes > MOST_LEFT_BYTES:
                own = _own(profiled, ways[left_bytes <= MOST_LEFT_BYTES :])
            if own.is_fused or not can_fuse or planner.kept_parts_fit(own, budget_bytes):
                return Profiles(own)
            try:
                found = profiled(own)
            except (DafError, RuntimeError) as error:
                self.fusion_refusal = f"a small step failed with fused operators: {error}"
                return Profiles(own)
            return Profiles(own, found if found.gains_by_fusing else None)

    def _bytes_left_by_others(self) -> int:
        """Free all garbage, which takes a tenth of a second; return how many bytes it held."""
        before_bytes = self.memory.held_bytes()
        gc.collect()
        self.make_profiler().keeper.flush()
        return before_bytes - self.memory.held_bytes()

    def profile(self, *arguments: Any, **options: Any) -> Profile:
        """Return one profile; the arguments are those of ``Profiler.profile``."""
        profiler = self.make_profiler()
        found = profiler.profile(*arguments, **options)
        self.proof_ms += profiler.proof_ms
        return found

    def prove_cut(self, context: StepContext, budget_bytes: int | None) -> None:
        """Prove how a batch is cut: for a plan of the user's, or a step that computes otherwise."""
        profiler = self.make_profiler()
        try:
            profiler.prove_cut(context, math.inf if budget_bytes is None else budget_bytes)
        except BudgetError:  # not even the smallest step has room beside what is held
            context.choose(replace(context.choice, refusal=NO_ROOM_TO_PROVE), is_final=False)
        self.proof_ms += profiler.proof_ms


@dataclass(eq=False)
class ProfileGrowth:
    """The two largest examples measured: bytes of one, and the profiles of a batch of them."""

    _known: list[tuple[float, Profiles]] = field(default_factory=list)

    def note(self, info: BatchInfo, profiles: Profiles) -> None:
        """Keep the profiles of a measured batch."""
        found = [*self._known, (_bytes_each(info), profiles)]
        self._known = sorted(found, key=lambda each: each[0])[-2:]

    def reached(self, info: BatchInfo, ahead: float) -> Profiles | None:
        """Return profiles for a batch and ``ahead`` times as large; None: too far from measured."""
        if not self._known:
            return None
        nbytes, profiles = self._known[-1]
        ratio = _bytes_each(info) / nbytes
        if ratio > MOST_RATIO:
            return None
        before, step = None, 1.0
        if len(self._known) > 1:
            before, step = self._known[0][1], nbytes / self._known[0][0]

        def larger(profile: Profile, other: Profile | None) -> Profile:
            return grown(profile, info.examples, Growth(max(1.0, ratio * ahead), other, step))

        own, fused = larger(profiles.own, before.own if before else None), profiles.fused
        fused_before = before.fused if before else None
        return Profiles(own, None if fused is None else larger(fused, fused_before))


def _own(profiled: Callable[..., Profile], ways: tuple[bool, ...]) -> Profile:
    """Return the profile of PyTorch's own operators, or of fused ones where only these fit."""
    # Where neither do, the budget is hopeless: the least that would do is found out beyond it.
    for is_fused in ways:
        with suppress(BudgetError):
            return profiled(is_bounded=True, is_fused=is_fused)
    return profiled()


def _bytes_each(info: BatchInfo) -> float:
    return info.nbytes / max(1, info.examples)
