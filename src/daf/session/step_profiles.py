"""Measures a session's small steps, with PyTorch's own operators and with fused ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from daf.budget.limits import room_bytes
from daf.core.errors import BudgetError, DafError
from daf.core.profile import Profile, Profiles
from daf.core.units import format_bytes
from daf.kernels.devices import can_code_on
from daf.memory.domain import MemoryDomain, device_of
from daf.planning import planner
from daf.profiling.model_memory import gradient_bytes
from daf.profiling.profiler import Profiler
from daf.step.context import StepContext

# A measured small step needs the gradients and about as much again in workspaces and activations.
ROOM_TO_MEASURE = 4


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

    def refuse_without_room(self, budget_bytes: int) -> None:
        """Refuse a hopeless budget where the machine has no room to measure what it would need.

        Raises:
            BudgetError: what is held with the gradients alone exceeds the budget.
        """
        gradients = gradient_bytes(self.model)
        least, enough = self.memory.held_bytes() + gradients, ROOM_TO_MEASURE * gradients
        if least > budget_bytes and room_bytes(self.memory) < enough:
            raise BudgetError(
                f"asked for a budget of {format_bytes(budget_bytes)}; {self.memory.name} with its "
                f"model and gradients alone takes {format_bytes(least)}, before any batch, and "
                "there is no room here to measure more; try a budget well above that, or a "
                "smaller model",
                least,
            )

    def measure(
        self,
        context: StepContext,
        budget_bytes: int,
        on_progress: Callable[[str], None],
        *,
        can_fuse: bool,
    ) -> Profiles:
        """Return profiles of PyTorch's own operators, and of fused ones where they gain something.

        A step that fits as it is keeps PyTorch's operators, and with them every bit. So does a step
        that fails with fused ones (second derivatives, say). The batch's first examples are used.
        """
        self.fusion_refusal = ""
        # Fused operators read codes, which need kernels where the model is.
        can_fuse = can_fuse and self.may_fuse and can_code_on(device_of(self.model))
        own = self.profile(context, budget_bytes, on_progress)
        if not can_fuse or planner.kept_peak_bytes(own) <= budget_bytes:
            return Profiles(own)
        try:
            found = self.profile(context, budget_bytes, on_progress, own)
        except (DafError, RuntimeError) as error:
            self.fusion_refusal = f"a small step failed with fused operators: {error}"
            return Profiles(own)
        return Profiles(own, found if found.gains_by_fusing else None)

    def profile(
        self,
        context: StepContext,
        budget_bytes: int,
        on_progress: Callable[[str], None] = lambda _: None,
        own: Profile | None = None,
    ) -> Profile:
        """Return one profile; the arguments are those of ``Profiler.profile``."""
        profiler = self.make_profiler()
        found = profiler.profile(context, budget_bytes, own, on_progress)
        self.proof_ms += profiler.proof_ms
        return found
