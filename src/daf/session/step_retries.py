"""A step's gradient under a plan, or under tighter ones while memory is refused."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

from daf.capture.capture import Capture
from daf.core.errors import BudgetError, PoolFullError
from daf.core.plan import Plan
from daf.memory.limit_protocol import Keeper
from daf.session.budget_controller import BudgetController
from daf.step.gradient import Before, GradientStep
from daf.step.microbatch import LossFunction

_Refusal = TypeVar("_Refusal", PoolFullError, RuntimeError)


class Replanning(NamedTuple):
    """What a session answers to refused memory.

    ``tighter``: the next tighter plan, or None; ``refusal``: the error to raise then.
    """

    tighter: Callable[[Plan], Plan | None]
    refusal: Callable[[], BudgetError]


class StepRetries:
    """Runs one session's gradients.

    Args:
        gradient: computes them.
        optimizer: whose gradients are dropped between attempts.
        capture: what they run under.
        keeper: refuses memory.
        controller: knows the budget in force.
    """

    def __init__(
        self,
        gradient: GradientStep,
        optimizer: torch.optim.Optimizer,
        capture: Capture,
        keeper: Keeper,
        controller: BudgetController,
    ) -> None:
        self._gradient = gradient
        self._optimizer = optimizer
        self._capture = capture
        self._keeper = keeper
        self._budget_controller = controller

    def run(
        self,
        batch: Any,
        loss_fn: LossFunction,
        plan: Plan,
        key: tuple[int, int],
        before: Before,
        replanning: Replanning | None,
    ) -> tuple[float, Plan]:
        """The mean loss, and the plan that held.

        Args:
            batch: whole.
            loss_fn: the user's own.
            plan: is tried first.
            key: seed and index of the step.
            before: the state to go back to.
            replanning: None where nothing was planned.

        Raises:
            BudgetError: no plan holds the step.
            PoolFullError: nor do the pool's bytes.
            RuntimeError: whatever else the step raised.
        """
        while True:
            self._capture.bound_spilling(self._budget_controller.bound(plan))
            try:
                planned = replanning is not None
                found = self._attempt(batch, loss_fn, plan, key, before, planned=planned)
            finally:
                self._capture.bound_spilling(None)
            if isinstance(found, float):
                return found, plan
            self._clear_away(before)
            tighter = None if replanning is None else replanning.tighter(plan)
            if tighter is None:
                if replanning is None or isinstance(found, PoolFullError):
                    raise found
                raise replanning.refusal() from found
            plan = tighter

    def _attempt(
        self,
        batch: Any,
        loss_fn: LossFunction,
        plan: Plan,
        key: tuple[int, int],
        before: Before,
        *,
        planned: bool,
    ) -> float | PoolFullError | RuntimeError:
        """The loss, or the error of an allocation that was refused; any other is raised."""
        refusals = self._keeper.refusals()
        try:
            return self._gradient.run(batch, loss_fn, plan, key, before, planned=planned)
        except PoolFullError as error:
            return _bare(error)
        except RuntimeError as error:
            if not self._keeper.has_refused(error, refusals):
                raise
            return _bare(error)

    def _clear_away(self, before: Before) -> None:
        """Nothing of a refused step stays: a tighter plan needs the room, and so does planning."""
        self._optimizer.zero_grad(set_to_none=True)
        before.forget_backward()
        self._capture.wait_until_packed()
        self._capture.release_scratch()
        gc.collect()  # a failed step's frames and graph can be parts of circles
        self._keeper.flush()
        before.restore()


def _bare(error: _Refusal) -> _Refusal:
    """An error without tracebacks, its causes' included, whose frames hold a step's tensors."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)
