"""``daf.compress``: codes of some bits, or a budget, in anybody's training loop."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Self, overload

import torch
from torch import nn

from daf.budget.request import Budget, parse_budget
from daf.capture import compress as codes
from daf.core.errors import ClosedSessionError, OptionError
from daf.core.markup import Markup
from daf.core.notebook import card
from daf.core.plan import Plan
from daf.core.reports import SiteReport
from daf.memory import process_memory
from daf.session.arguments import asked_memory, check_trained, checked_tolerance
from daf.session.forward.losses import Losses
from daf.session.forward.runner import ForwardRunner
from daf.torch_compat.modules import Uncopied, around_calls

_OF_MODEL = "_daf_budget"  # the attribute by which a model finds its own
_REPORTED = """
calls peak_bytes saved_bytes_plain saved_bytes_peak evicted_bytes unplanned_because
"""
# A script that calls its layers one by one, and has many, is not planned for layer by layer.
MOST_MODELS = 32


class BudgetedForward(Uncopied):
    """Runs one model's forward passes within a budget, inside ``with``.

    The model's calls inside are planned: codes, fusion and replay, never cut and never retried;
    what lies around them is as it was, but for ``F.cross_entropy`` of many classes inside ``with``,
    which holds its logits once. Each model has one such object, which ``compress`` returns
    again. The limit, once a first call has set it, stays in force between them, until ``close`` or
    the end of the model. Calls without gradients, and nested ones, run as they are. ``budget``,
    ``tolerance`` and ``seed``: as ``compress`` takes them.
    """

    def __init__(
        self, model: nn.Module, budget: Budget, *, tolerance: float | None = None, seed: int = 0
    ) -> None:
        self.model = model
        self._budget, self._seed = budget, seed
        self._tolerance = checked_tolerance(tolerance)
        if not callable(budget):
            parse_budget(budget)
        asked_memory(model, budget)
        self.number = 0  # among a script's models
        self.counts_loading = False  # True: no budget is taken below what was held before, either
        self._runner: ForwardRunner | None = None
        self._entered = 0
        self._listening: ExitStack | None = None
        self._losses = Losses()
        self._around_losses = ExitStack()
        vars(model)[_OF_MODEL] = self

    @staticmethod
    def of(model: nn.Module) -> "BudgetedForward | None":
        """Return the model's own, or None."""
        return vars(model).get(_OF_MODEL)

    def __enter__(self) -> Self:
        if self.of(self.model) is not self:
            raise ClosedSessionError(
                "asked to go on after close(); call daf.compress(model, budget=...) again"
            )
        if self._listening is None:
            self._listening = _listen(weakref.ref(self))
            weakref.finalize(self, self._listening.close).atexit = False
        if self._entered == 0:
            self._around_losses.enter_context(self._losses.inside())
        self._entered += 1
        return self

    def __exit__(self, *exception: object) -> None:
        self._entered -= 1
        if self._entered == 0:
            self._around_losses.close()
            if self._runner is not None and exception[0] is None:
                self._runner.end_losses()

    def running(
        self, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> AbstractContextManager[None]:
        """Return what a call of the model with these arguments and keywords runs within."""
        if not torch.is_grad_enabled():
            return nullcontext()
        if self._runner is None:
            self._runner = ForwardRunner(
                self.model, self._budget, self._tolerance, self._seed, self._losses
            )
            if self.counts_loading:
                self._runner.include_loading()
        return self._runner.running(arguments, keywords)

    @property
    def budget(self) -> Budget:
        """The budget asked for; set at any moment, from any thread, it acts at once."""
        return self._budget

    @budget.setter
    def budget(self, value: Budget) -> None:
        if self._runner is not None:
            self._runner.ask(value)
        self._budget = value

    @property
    def plan(self) -> Plan | None:
        """The plan of the next call; None before the first."""
        return None if self._runner is None else self._runner.plan

    @property
    def peak_bytes(self) -> int:
        """Highest memory of the process (or of the model's GPU) since the first call; 0 before."""
        return 0 if self._runner is None else self._runner.peak_bytes

    def sites(self) -> tuple[SiteReport, ...]:
        """Return the treatment and bytes of every site of the last call."""
        return () if self._runner is None else self._runner.sites()

    def report(self) -> dict[str, Any]:
        """Return what was planned and held (JSON-able; bytes)."""
        runner, plan = self._runner, self.plan
        if runner is None:
            return {"model": type(self.model).__name__, "calls": 0}
        return {
            "model": type(self.model).__name__,
            **{name: getattr(runner, name) for name in _REPORTED.split()},
            "plan": plan.policy.name if plan else None,
            "choices": list(plan.choices) if plan else [],
        }

    def _repr_html_(self) -> str:
        if self._runner is not None:
            return self._runner._repr_html_()
        return card(f"{type(self.model).__name__} within {self._budget}", Markup("Not called yet."))

    def close(self) -> None:
        """Lift the limit, and forget the model."""
        vars(self.model).pop(_OF_MODEL, None)
        if self._listening is not None:
            self._listening.close()
        if self._runner is not None:
            self._runner.close()


def _listen(own: weakref.ref[BudgetedForward]) -> ExitStack:
    """Run the calls of one's model inside ``with`` by ``running``, until the stack is closed.

    It is closed with its owner and not at the end of each ``with``: to replace ``nn.Module``'s call
    takes as long as a small model's pass, since Python forgets the methods of all its subclasses.
    """

    def around(
        module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> AbstractContextManager[None] | None:
        budgeted = own()
        if budgeted is None or module is not budgeted.model or not budgeted._entered:
            return None
        return budgeted.running(arguments, keywords)

    listening = ExitStack()
    listening.enter_context(around_calls(around))
    return listening


@overload
def compress(
    model: nn.Module, *, budget: Budget, tolerance: float | None = None, seed: int = 0
) -> BudgetedForward: ...


@overload
def compress(model: nn.Module, bits: int | str = 2, **options: Any) -> codes.compress: ...


def compress(model: nn.Module, bits: int | str | None = None, **options: Any) -> Any:
    """Hold less of what autograd saves, around the forward pass of anybody's loop.

    Args:
        model: whose calls are compressed.
        bits: for every element, 2 by default; ``daf.capture.compress`` has it and the options that
            go with it. Not together with a budget.
        budget: most bytes of the whole process, as ``Session`` takes it: plans choose codes, fusion
            and replay. The limit holds from the first call on, between calls, and in backward.
        tolerance: with a budget, the most variance that codes may add to the gradient, relative to
            the batch's own, as ``Session`` takes it; 0: exact treatments only.
        seed: int in [0, 2**64), of the codes.
        options: those of ``daf.capture.compress.compress``.

    Returns:
        With a budget, the model's ``BudgetedForward``, the same at every call; a context manager,
        as the other one is.

    Raises:
        BudgetError: inside, or in backward or an update: the budget cannot hold them;
            ``least_bytes`` is the least that could. A ``torch.OutOfMemoryError`` too.
        UnitError: the budget cannot be read.
        OptionError: ``bits`` and a budget together; no module; another option's wrong value.
    """
    check_trained(model)
    if "budget" not in options:
        return codes.compress(model, 2 if bits is None else bits, **options)
    if bits is not None:
        raise OptionError(f"asked for bits={bits!r} and a budget; give one of the two")
    if (found := BudgetedForward.of(model)) is None:
        return BudgetedForward(model, **options)
    found.budget = options["budget"]
    return found


class ScriptModels:
    """Finds models by their calls, and runs these within a budget.

    A model is what is called in training mode, with gradients, outside of every other one, and has
    parameters to train. ``tell`` gets a line about each; ``tolerance``: as ``compress`` takes it.
    """

    def __init__(
        self, budget: Budget, tolerance: float | None, tell: Callable[[str], object]
    ) -> None:
        self._budget, self._tolerance = budget, checked_tolerance(tolerance)
        if not callable(budget):
            parse_budget(budget)  # before the first model, which may never come
        self._tell = tell
        self._reports: dict[int, dict[str, Any]] = {}  # by number, as models come and go

    def watching(self) -> AbstractContextManager[None]:
        """Find models inside."""
        return around_calls(self._around)

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
        found.number, found.counts_loading = len(self._reports), True
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
