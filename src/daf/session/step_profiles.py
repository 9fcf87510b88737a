"""Measuring a session's small steps: with PyTorch's own operators, and with fused ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from daf.core.errors import DafError
from daf.core.profile import Profile
from daf.offload.spill import SpillOptions
from daf.planning import planner
from daf.profiling.profiler import Profiler
from daf.step.microbatch import LossFunction


class StepProfiles:
    """One session's profiles.

    Args:
        make_profiler: a profiler of the session's model.
        allow_split: may batches be cut whose statistics are the whole batch's?
        spill: where tensors may be spilled, or None.
    """

    def __init__(
        self,
        make_profiler: Callable[[], Profiler],
        *,
        allow_split: bool,
        spill: SpillOptions | None,
    ) -> None:
        self.fusion_refusal = ""
        self._make_profiler = make_profiler
        self._allow_split = allow_split
        self._spill = spill

    def profiles(
        self,
        batch: Any,
        loss_fn: LossFunction,
        budget_bytes: int,
        on_progress: Callable[[str], None],
        *,
        can_fuse: bool,
    ) -> tuple[Profile, Profile | None]:
        """Of PyTorch's own operators, and of fused ones where something is gained by them.

        What fits as it is keeps PyTorch's operators, and with them every bit. So does a step
        that does not go through with fused ones (second derivatives, say).
        """
        self.fusion_refusal = ""
        own = self._profile(batch, loss_fn, budget_bytes, on_progress)
        if not can_fuse or planner.kept_peak_bytes(own) <= budget_bytes:
            return own, None
        try:
            found = self._profile(batch, loss_fn, budget_bytes, on_progress, own=own)
        except (DafError, RuntimeError) as error:
            self.fusion_refusal = f"a small step failed with fused operators: {error}"
            return own, None
        return own, found if found.gains_by_fusing else None

    def _profile(
        self,
        batch: Any,
        loss_fn: LossFunction,
        budget_bytes: int,
        on_progress: Callable[[str], None],
        *,
        own: Profile | None = None,
    ) -> Profile:
        return self._make_profiler().profile(
            batch,
            loss_fn,
            budget_bytes,
            allow_split=self._allow_split,
            spill=self._spill,
            own=own,
            on_progress=on_progress,
        )
