"""What recording the graph of values takes of a pass: its own clocks, and entering it at each call.

Whole passes differ by more from one to the next, on most machines, than recording takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

import daf
from daf.capture import saved_tensor_hooks
from daf.core.replaced import replaced
from daf.recompute.recipe import RecipeMaker
from daf.recompute.values import ValueRecorder
from daf.torch_compat.operator_mode import DispatchMode

PASSES = 3  # recipes are proven in the first two
CALLS, ROUNDS = 2000, 7
UNRECORDED_BITS = 4  # codes alone: nothing is computed again


@dataclass(eq=False)
class RecordingTimes:
    """What recorders and look-ups took since ``begin`` (ms); how many there were, their calls."""

    calls: int = 0
    look_up_ms: float = 0.0
    _made: list[Any] = field(default_factory=list)

    def counting(self) -> AbstractContextManager[None]:
        """The context in which recording is timed."""
        return replaced(
            saved_tensor_hooks, ValueRecorder=self._recorder, RecipeMaker=self._recipe_maker
        )

    def begin(self) -> None:
        """Forget what was timed."""
        self.calls, self.look_up_ms = 0, 0.0
        self._made.clear()

    @property
    def recorders(self) -> int:
        """How many were made."""
        return len(self._made)

    @property
    def recording_ms(self) -> float:
        """What recorders took by their own clocks."""
        return sum(each.own_ms for each in self._made)

    def _recorder(self) -> ValueRecorder:
        times = self

        class Recorder(ValueRecorder):
            def __torch_dispatch__(self, *call: Any, **keywords: Any) -> Any:
                times.calls += 1
                return super().__torch_dispatch__(*call, **keywords)

        self._made.append(Recorder())
        return self._made[-1]  # type: ignore[no-any-return]

    def _recipe_maker(self, *given: Any) -> RecipeMaker:
        maker = RecipeMaker(*given)
        look_up = maker.recomputed

        def timed(*asked: Any) -> Any:
            start_s = time.perf_counter()
            found = look_up(*asked)
            self.look_up_ms += 1000.0 * (time.perf_counter() - start_s)
            return found

        maker.recomputed = timed  # type: ignore[method-assign]
        return maker


def recording_of(model: torch.nn.Module, run: Callable[[Any], object]) -> dict[str, float]:
    """Return what recording takes in a pass of ``run`` (ms), and recorders where nothing needs any.

    ``run`` takes a context for its forward pass.
    """
    times = RecordingTimes()
    with times.counting():
        exact = daf.compress(model, bits="exact")
        for _ in range(PASSES):
            times.begin()
            run(exact)
        found = {
            "recording_ms": times.recording_ms + times.calls * entry_ms(),
            "look_up_ms": times.look_up_ms,
            "recorded_calls": times.calls,
        }
        times.begin()
        run(daf.compress(model, bits=UNRECORDED_BITS))
    return found | {"unused_recorders": times.recorders}


class _Empty(DispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def entry_ms() -> float:
    """Return what it takes a call to enter a mode that does nothing, and to leave it (ms)."""
    number = torch.zeros(1)

    def taken_ms(mode: AbstractContextManager[Any]) -> float:
        start_s = time.perf_counter()
        with mode, torch.no_grad():
            for _ in range(CALLS):
                number.add_(1)
        return 1000.0 * (time.perf_counter() - start_s) / CALLS

    inside, outside = (
        min(taken_ms(mode()) for _ in range(ROUNDS)) for mode in (_Empty, nullcontext)
    )
    return max(0.0, inside - outside)
