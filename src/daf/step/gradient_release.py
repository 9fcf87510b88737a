"""Gradient release: the optimizer steps each parameter as its gradient completes, then frees it."""

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from daf.core.errors import CommittedStepError, OptionError, ReleaseRefusedError
from daf.saved_tensors.ledger import gradient_bytes
from daf.torch_compat import compiler
from daf.torch_compat.autograd_graph import graph_task, is_strided
from daf.torch_compat.parameter_reads import ParameterReads

ReleaseMode = bool | Literal["auto"]
HELD_BY_PLAN = "the plan has room for all gradients, and a step that holds them can be tried again"
ADDS_TO_USERS = "gradients accumulated before the step join its own"
LEFT_TO_USER = "session.backward leaves gradients to a loop of the user's own"
CLIPPED = "their norm is clipped, which needs them all at once"
_TORCH_FOLDER = os.path.dirname(torch.__file__) + os.sep


@dataclass(slots=True)
class ReleaseCount:
    """One step's releases, inside backward and after it; gradient bytes at backward's peak."""

    released: int = 0
    left_to_the_end: int = 0
    peak_gradient_bytes: int = 0


@dataclass(eq=False)
class GradientRelease:
    """Steps an optimizer's parameters inside backward, where that is allowed.

    ``mode``: where it is not allowed, True makes ``begin`` raise, and ``"auto"`` keeps the
    gradients; False never releases. ``reads`` are those of the capture under which the model runs.
    ``is_active`` is True if the present step releases gradients, else ``refusal`` may say why not.

    Raises:
        ValueError: ``mode`` is none of these.
        ReleaseRefusedError: ``mode`` is True, and the optimizer or the model forbid it.
    """

    mode: ReleaseMode
    model: nn.Module
    optimizer: torch.optim.Optimizer
    reads: ParameterReads
    is_active: bool = False
    refusal: str = ""
    kept_because: str = ""  # why the present step's caller needs all gradients; else empty

    def __post_init__(self) -> None:
        if self.mode not in (True, False, "auto"):
            raise OptionError(f"release_gradients is True, False or 'auto'; found {self.mode!r}")
        self._waiting: dict[nn.Parameter, dict[str, Any]] = {}
        self._graph_task: int | None = None
        self._on_commit: Callable[[], None] = lambda: None
        self._state_per_byte: float | None = None  # in a rehearsal
        self._held_state: list[Tensor] = []
        self.begin(micro_batches=1)

    @property
    def committed(self) -> bool:
        """True if a parameter was updated inside this step's backward."""
        return self.count.released > 0

    @property
    def can_release(self) -> bool:
        """True if release is asked for and allowed for a whole batch now."""
        return self.mode is not False and not self.whole_refusal

    @property
    def whole_refusal(self) -> str:
        """Why gradients of a whole batch are not released although that was asked for; else ""."""
        if self.mode is False:
            return ""
        return self.kept_because or release_refusal(self.model, self.optimizer)

    def begin(
        self, micro_batches: int, *, held_by_plan: bool = False, adds_to_users: bool = False
    ) -> None:
        """Begin a step of ``micro_batches`` micro-batches; decide whether it releases gradients.

        ``held_by_plan``: the plan has room for all gradients, so only mode True releases them.
        ``adds_to_users``: the user accumulated gradients that belong to the same update.
        """
        self.count = ReleaseCount()
        self._has_begun = False  # this step released one
        self.refusal = ""
        if self.mode is not False:
            own = release_refusal(self.model, self.optimizer, micro_batches)
            users = ADDS_TO_USERS if adds_to_users else ""
            plans = HELD_BY_PLAN if held_by_plan and self.mode == "auto" else ""
            self.refusal = self.kept_because or own or users or plans
        if self.mode is True and self.refusal:
            raise ReleaseRefusedError(
                f"asked to release gradients inside backward; {self.refusal}; pass "
                "release_gradients='auto' to release them only where that is allowed"
            )
        self.is_active = self.mode is not False and not self.refusal

    @contextmanager
    def rehearsing(self, state_bytes: int) -> Iterator[None]:
        """Free gradients inside as they complete, but update nothing.

        ``state_bytes``: of optimizer state to come, held from then on in each parameter's share.
        """
        trained = [each for each in self.model.parameters() if each.requires_grad]
        self._state_per_byte = state_bytes / max(1, sum(each.nbytes for each in trained))
        try:
            yield
        finally:
            self._state_per_byte = None
            self._held_state.clear()

    def watching(self) -> AbstractContextManager[None]:
        """Watch parameter reads; runs around the forward pass, inside the capture's ``with``."""
        return self.reads.watching() if self.is_active else nullcontext()

    @contextmanager
    def stepping(self, loss: Tensor, on_commit: Callable[[], None]) -> Iterator[None]:
        """Release gradients inside ``loss.backward()``; the others stay in ``grad``.

        The caller steps the optimizer afterwards as always: it skips parameters without a gradient.
        ``on_commit`` is called just before the first parameter changes, or would in a rehearsal;
        if backward fails after that, CommittedStepError is raised.
        """
        if not self.is_active or not loss.requires_grad:
            yield
            return
        self._on_commit = on_commit
        self.reads.begin_backward(loss)
        try:
            with ExitStack() as hooks:
                handle = loss.register_hook(self._begin_graph)  # type: ignore[no-untyped-call]
                hooks.enter_context(handle)
                for group in self.optimizer.param_groups:
                    for parameter in group["params"]:
                        if parameter.requires_grad:
                            hook = partial(self._completed, group)
                            hooks.enter_context(parameter.register_post_accumulate_grad_hook(hook))
                yield
        except Exception as error:
            if self.committed:
                self.optimizer.zero_grad(set_to_none=True)
                raise CommittedStepError(
                    f"backward failed after {self.count.released} parameters had been updated as "
                    "their gradients completed; the model is between two steps and the step cannot "
                    "be retried; load the last checkpoint, and train with a larger budget or "
                    "release_gradients=False"
                ) from error
            raise
        finally:
            self.count.left_to_the_end = len(self._waiting)
            self._waiting.clear()
            self.reads.forget()

    def _begin_graph(self, _gradient: Tensor) -> None:
        self._graph_task = graph_task()

    def _completed(self, group: dict[str, Any], parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        # A backward pass inside a node of this one (reentrant checkpointing) adds a part only.
        if graph_task() == self._graph_task:
            self._waiting[parameter] = group
            self._release_what_is_free()

    def _release_what_is_free(self) -> None:
        held = sum(map(gradient_bytes, self._waiting))
        self.count.peak_gradient_bytes = max(self.count.peak_gradient_bytes, held)
        for parameter, group in list(self._waiting.items()):
            if not self.reads.is_free(parameter):
                continue
            del self._waiting[parameter]
            if not self._has_begun:
                self._on_commit()
                self._has_begun = True
            if self._state_per_byte is None:
                self.count.released += 1
                step_alone(self.optimizer, group, parameter)
            else:
                size = int(self._state_per_byte * parameter.nbytes)
                self._held_state.append(torch.empty(size, dtype=torch.uint8))
            parameter.grad = None


def step_alone(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: nn.Parameter
) -> None:
    """Run ``optimizer.step()`` as if ``parameter``, of ``group``, were the only one.

    Group and state are the optimizer's own, so that learning rate schedulers keep working.
    """
    groups, members = optimizer.param_groups, group["params"]
    optimizer.param_groups, group["params"] = [group], [parameter]
    try:
        compiler.step(optimizer)
    finally:
        optimizer.param_groups, group["params"] = groups, members


def release_refusal(
    model: nn.Module, optimizer: torch.optim.Optimizer, micro_batches: int = 1
) -> str:
    """Return why gradients cannot be released inside backward; empty where they can.

    Clipping by global norm and gradient scalers need all gradients at once. They act through hooks,
    a wrapped ``step``, or attributes of the optimizer; all three are checked.
    """
    if micro_batches > 1:
        count = f"{micro_batches} micro-batches"
        return f"the batch is cut into {count}, whose gradients must be summed first"
    return _optimizer_refusal(optimizer) or _parameter_refusal(model, optimizer)


def _optimizer_refusal(optimizer: torch.optim.Optimizer) -> str:
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        return "LBFGS looks at all gradients at once and runs the loss several times a step"
    # What is not torch's own, among the step and all that its decorators wrap; else the innermost.
    if not _is_of_torch(inspect.unwrap(optimizer.step, stop=lambda each: not _is_of_torch(each))):
        return (
            f"the step of {name} is not torch.optim's own, and may look at several gradients at "
            "once (to clip them, say)"
        )
    if compiler.has_step_hooks(optimizer):
        return f"{name} has step hooks, which would run for each parameter (and may clip)"
    if any(getattr(optimizer, each, None) is not None for each in ("grad_scale", "found_inf")):
        return f"a gradient scaler is at work on {name}, and must see all gradients first"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return f"{name} is differentiable, so its step belongs to a graph"
    return ""


def _parameter_refusal(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    storages: set[int] = set()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (name := names.get(id(parameter))) is None:
                shape = list(parameter.shape)
                return f"the optimizer has a parameter {shape} that is not the model's"
            if trouble := _trouble(parameter, storages):
                return f"parameter {name!r} {trouble}"
    return ""


def _trouble(parameter: Tensor, storages: set[int]) -> str:
    """Return why a parameter cannot be released, else empty; ``storages``: of those before it."""
    if type(parameter) is not nn.Parameter or not is_strided(parameter):
        return f"is a {type(parameter).__name__} of layout {parameter.layout}, not a plain one"
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        return "has a hook, which may read other parameters or gradients (to clip them, say)"
    address = parameter.untyped_storage()._cdata
    if address in storages:
        return "shares its memory with another one, so that their order of updates matters"
    storages.add(address)
    return ""


def _is_of_torch(function: Any) -> bool:
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return code is not None and code.co_filename.startswith(_TORCH_FOLDER)
