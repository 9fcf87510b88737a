"""The models that a script trains, each within the script's budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from daf.budget.request import Budget
from daf.memory import process_memory
from daf.session.forward.compress import BudgetedForward
from daf.torch_compat.modules import around_calls

# A script that calls its layers one by one, and has many, is not planned for layer by layer.
MOST_MODELS = 32


class ScriptModels:
    """Finds models by their calls, and runs these within a budget.

    A model is what is called in training mode, with gradients, outside of every other one, and has
    parameters to train. ``tell`` gets a line about each.
    """

    def __init__(
        self, budget: Budget, tolerance: float | None, tell: Callable[[str], object]
    ) -> None:
        self._budget, self._tolerance = budget, tolerance
        self._tell = tell
        self._reports: dict[int, dict[str, Any]] = {}  # by number, as models come and go

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Find models inside."""
        with around_calls(self._around):
            yield

    def reports(self) -> list[dict[str, Any]]:
        """Return every model's report (JSON-able; bytes), the first that was found first."""
        return [*self._reports.values()]

    def peak_bytes(self) -> int:
        """Return the most that the process held."""
        known: list[int] = [each.get("peak_bytes", 0) for each in self._reports.values()]
        return max([process_memory.peak_bytes(), *known])

    def _around(
        self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> AbstractContextManager[None] | None:
        if not (torch.is_grad_enabled() and module.training):
            return None
        found = BudgetedForward.of(module) or self._begun(module)
        return None if found is None else self._noted(found, arguments, keywords)

    def _begun(self, module: nn.Module) -> BudgetedForward | None:
        trains = any(each.requires_grad for each in module.parameters())
        if not trains or len(self._reports) >= MOST_MODELS:
            return None
        found = BudgetedForward(module, self._budget, tolerance=self._tolerance)
        found.number = len(self._reports)
        self._reports[found.number] = found.report()
        self._tell(f"{type(module).__name__}: measuring small passes, then planning")
        return found

    @contextmanager
    def _noted(
        self, found: BudgetedForward, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Iterator[None]:
        before = found.plan
        try:
            with found.running(arguments, keywords):
                if before is None and found.plan is not None:
                    self._tell(f"{type(found.model).__name__}: {found.plan.reason}")
                yield
        finally:
            self._reports[found.number] = found.report()
