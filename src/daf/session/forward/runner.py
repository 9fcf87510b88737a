"""Runs the forward passes of one model, in a loop that keeps its step, within a budget.

The model's first call shows its inputs. A session's profiler measures small passes on them, under a
loss that stands in for the user's, and proves replay and fusion; the planner plans for the whole
batch. The first passes run under the tightest plan; their measured peak, with the user's loss and
update, corrects the plan that follows. Backward passes and updates stay under the limit too.
"""

import gc
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from daf.budget.request import Budget
from daf.capture.compiled_calls import apart
from daf.capture.known_passes import KnownPasses
from daf.core.errors import BudgetError
from daf.core.plan import Plan
from daf.core.policy import Policy
from daf.core.profile import Profile
from daf.memory.owners import owners
from daf.profiling.model_memory import bytes_of_first_update, gradient_bytes, parameter_bytes
from daf.session.arguments import asked_memory
from daf.session.forward.losses import Losses
from daf.session.parts import SessionReadings, make_parts
from daf.session.plan_controller import NEAR
from daf.step.context import BatchInfo, StepContext
from daf.step.splitting import Splitting
from daf.torch_compat.autograd_graph import backward_errors, bytes_of, version_of
from daf.torch_compat.compiled_modules import CompiledModules
from daf.torch_compat.operator_mode import modes_restored
from daf.torch_compat.out_of_memory import out_of_memory
from daf.torch_compat.pytree import map_nest, tensors_in_batch

# Updates after which the tightest plan's peak is known, of every part of a loop that trains
# several models in turn; or calls, where updates are not seen.
UPDATES_TO_MEASURE = 2
CALLS_TO_MEASURE = 16
# What libraries load in a first pass, and what a prediction may miss by, where none is tried again.
MARGIN_BYTES = 8 * 2**20
Living = TypeVar("Living")


class ForwardRunner(SessionReadings):
    """One model's passes within a budget; arguments as ``compress``'s; ``losses`` read outputs."""

    def __init__(
        self, model: nn.Module, budget: Budget, tolerance: float | None, seed: int, losses: Losses
    ) -> None:
        memory = asked_memory(model, budget)
        parts = make_parts(
            model,
            optimizer_of(model),
            budget,
            memory,
            baseline_bytes=max(0, memory.held_bytes() - parameter_bytes(model)),
            tolerance=tolerance,
            sensitivity=False,
            can_run_again=False,
        )
        super().__init__(parts)
        self.model = model
        self._plan_controller.margin_bytes = lambda profile: (
            MARGIN_BYTES + trained_beside_bytes(model, profile)
        )
        self._seed = seed
        self._splitting = Splitting(split=False)
        self._splitting.forbidden_because = "its loop keeps its own step"
        self.unplanned_because, self._losses = "", losses
        self._examples = 1  # of the largest call
        self._version = -1
        self._updates_seen = self._calls_seen = 0
        self._refusals = 0
        self._known_passes = KnownPasses(self._capture)
        own = weakref.ref(self)

        def refused(error: Exception) -> None:
            if (runner := own()) is not None:
                runner.raise_refusal(error)

        self._listener = refused
        backward_errors.add(refused)
        weakref.finalize(self, backward_errors.remove, refused).atexit = False
        parts.end_with(self)
        memory.reset_peak()

    def close(self) -> None:
        """Undo what was set in the process."""
        backward_errors.remove(self._listener)
        self._parts.close()

    @property
    def calls(self) -> int:
        """How many calls ran under a plan."""
        return self._runner.counters.step_index

    @property
    def plan(self) -> Plan | None:
        """The plan in force; None before the first call."""
        return self._plan_controller.selector.running

    def ask(self, budget: Budget) -> None:
        """Follow another budget."""
        if budget != self._budget_controller.asked:
            self._budget_controller.ask(budget)

    @contextmanager
    def running(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Iterator[None]:
        """Run a call of the model with these arguments inside.

        BudgetError: the budget cannot hold it; ``least_bytes`` is the least that could.
        """
        plan = self._planned(without_graph((arguments, keywords)))
        self._refusals = self._keeper.refusals()
        try:
            if plan is None:
                yield
                return
            with self._capturing(plan.policy, (arguments, keywords)):
                yield
            self._runner.counters.note_step(1.0)
            self._runner.counters.note_held(self._plan_controller.selector.autotuner)
        except Exception as error:
            self.raise_refusal(error)
            raise

    def _capturing(self, policy: Policy, inputs: Any) -> AbstractContextManager[object]:
        """Capture a call with these inputs, unless what it saves is known."""
        index, compiled = self._runner.counters.step_index, CompiledModules(self.model)
        tensors = list(tensors_in_batch(inputs))
        kind = tuple((each.shape, each.dtype, each.requires_grad) for each in tensors)
        if self._known_passes.begin(policy, compiled, index, (self.model.training, kind)):
            return apart(compiled)
        external = [each for each in tensors if each.grad_fn is None]
        return self._capture.step(policy, self._seed, index, batch=external)

    def raise_refusal(self, error: Exception) -> None:
        """Raise BudgetError if an error comes from memory refused since the last call began."""
        if isinstance(error, BudgetError) or not self._keeper.has_refused(error, self._refusals):
            return
        if (found := self._plan_controller.refusal()) is not None:
            raise out_of_memory(found, self._keeper.memory_name) from error

    def end_losses(self) -> None:
        """Plan for another loss than the stand-in, where that did not come; raises as ``running``.

        A budget that nearly does is tried, as it may be one that an error named.
        """
        controller = self._plan_controller
        try:
            controller.plan_beside(self._losses.unmet_bytes(self._examples))
        except BudgetError as error:
            if (controller.budget_bytes or 0) < NEAR * (error.least_bytes or 0):
                raise out_of_memory(error, self._keeper.memory_name) from error.__cause__

    def _planned(self, batch: Any) -> Plan | None:
        controller, counters = self._plan_controller, self._runner.counters
        with owners.turn, modes_restored():
            self._learn()
            loss_fn, splitting, index = self._losses.stand_in, self._splitting, counters.step_index
            context = StepContext.of(self.model, batch, loss_fn, splitting, self._seed, index)
            self._examples = max(self._examples, context.info.examples)
            is_new = controller.selector.plan is None
            if context.info.nbytes <= controller.planned_for_bytes:
                context.info = BatchInfo(1, context.info.nbytes)  # more examples, smaller ones
            try:
                plan = None if self.unplanned_because else controller.plan_for(context)
            except BudgetError as error:
                raise out_of_memory(error, self._keeper.memory_name) from error.__cause__
            except Exception as error:
                self.unplanned_because = f"{type(error).__name__}: {error}"[:300]
                plan = None
            self._updates.watch()
            if plan is not None:
                self._budget_controller.bound(plan)
                if is_new:
                    counters.begin_peak()
            elif (budget_bytes := self._budget_controller.begin_step()) is not None:
                self._keeper.open()
                self._keeper.bound(budget_bytes, budget_bytes)
            return plan

    def _learn(self) -> None:
        version = sum(map(version_of, self.model.parameters()))
        selector = self._plan_controller.selector
        self._updates_seen += -1 < self._version < version
        self._calls_seen += 1
        self._version = version
        is_known = self._updates_seen >= UPDATES_TO_MEASURE or self._calls_seen > CALLS_TO_MEASURE
        if selector.first is None or not is_known:
            return
        peak_bytes = self._runner.counters.end_peak()
        with suppress(BudgetError):
            selector.correct(peak_bytes, self._budget_controller.budget_bytes)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return the living optimizer that steps most of a model's parameters; else one without state.

    A loop that keeps its step hands over none; its optimizer usually lives before the first pass.
    """
    living = _living_optimizers(model)
    found = max(living, key=living.__getitem__, default=None)
    if found is not None and living[found]:
        return found
    trained = [each for each in model.parameters() if each.requires_grad and each.is_leaf]
    return torch.optim.SGD(trained or [torch.zeros(1)], lr=0.0)


def trained_beside_bytes(model: nn.Module, profile: Profile) -> int:
    """Return what other models may take while this one trains.

    That is the gradients and states that they lack, and what they keep alive for backward: of one
    that has been called its saved bytes, but for those alive now. Of another nobody knows yet: as
    much as plain PyTorch saves of this one, twice that of a larger one, and what libraries load. Of
    one that the model's own optimizer steps too, its share of this by parameters.
    """
    living = _living_optimizers(model)
    others = [each for each, shared in living.items() if not shared]
    to_come = sum(map(bytes_of_first_update, others))
    partners = _stepped_beside(model, [each for each, shared in living.items() if shared])
    share = sum(map(bytes_of, partners)) / max(1, gradient_bytes(model))
    known = [each for each in _living(ForwardRunner) if each.model is not model]
    unknown = max(0.0, len(others) + min(1.0, share) - len(known))
    is_larger = to_come > gradient_bytes(model) + profile.optimizer_bytes
    saved = profile.plain_saved_bytes * (2 if is_larger else 1)
    alive = sum(max(0, e.saved_bytes_peak - e._capture.stats.held_bytes) for e in known)
    lacking = sum(bytes_of(each) for each in partners if each.grad is None)
    return to_come + lacking + alive + int(unknown * (saved + MARGIN_BYTES))


def _stepped_beside(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> list[Tensor]:
    own = {id(each) for each in model.parameters()}
    found = {
        id(e): e for each in optimizers for group in each.param_groups for e in group["params"]
    }
    return [each for key, each in found.items() if key not in own and each.requires_grad]


def _living_optimizers(model: nn.Module) -> dict[torch.optim.Optimizer, int]:
    own = {id(each) for each in model.parameters()}

    def shared(optimizer: torch.optim.Optimizer) -> int:
        groups = getattr(optimizer, "param_groups", [])  # none before its constructor ends
        return sum(id(each) in own for group in groups for each in group["params"])

    return {each: shared(each) for each in _living(torch.optim.Optimizer)}


def _living(kind: type[Living]) -> list[Living]:
    return [each for each in gc.get_objects() if issubclass(type(each), kind)]


def without_graph(batch: Any) -> Any:
    """Return a nest whose tensors have no graph: what made them is not this model's."""

    def bare(tensor: Tensor) -> Tensor:
        if tensor.grad_fn is None:
            return tensor
        return tensor.detach().requires_grad_(tensor.requires_grad)

    return map_nest(Tensor, bare, batch)
