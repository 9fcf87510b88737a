"""The gradient of one batch under one plan, summed over micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from daf.capture.capture import Capture
from daf.capture.compiled_calls import apart
from daf.core.errors import NonFiniteLossError
from daf.core.plan import Plan
from daf.core.policy import Policy
from daf.kernels.devices import is_processor
from daf.memory.domain import device_of
from daf.step.dry_run import rehearse
from daf.step.gradient_release import GradientRelease
from daf.step.microbatch import (
    LossFunction,
    WeightedLoss,
    batch_size,
    micro_batches,
    read_loss,
    scale_gradients,
)
from daf.step.nonfinite import first_nonfinite
from daf.step.state_guard import RandomState
from daf.torch_compat.compiled_modules import CompiledModules


class Before:
    """Buffers and random state from before a forward pass, to be put back if it went wrong."""

    def __init__(self, model: nn.Module) -> None:
        self._buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        self._random_state = RandomState()
        device = device_of(model)
        gpu = device if device.type == "cuda" else None  # its passes go through a queue of its own
        with torch.enable_grad():
            self._oldest = torch.zeros((), requires_grad=True, device=gpu) * 1.0

    def restore(self) -> None:
        """Put them back."""
        with torch.no_grad():
            for buffer, value in self._buffers:
                buffer.copy_(value)
        self._random_state.restore()

    def forget_backward(self) -> None:
        """Let go of what a backward pass that failed half-way still holds.

        PyTorch leaves its tasks, and with them the graph, in the thread's queue until another
        pass goes through that. It takes the youngest nodes first, so one that is older than
        all of them goes through it to the end.
        """
        self._oldest.backward(retain_graph=True)  # type: ignore[no-untyped-call]


class _Losses:
    """Mean losses of a step's micro-batches. To look at one is to wait for all that it is made of.

    Args:
        refuse: called with a micro-batch and its loss where that is not finite; raises.
    """

    def __init__(self, refuse: Callable[[Any, float], NoReturn]) -> None:
        self._refuse = refuse
        self._unread: list[tuple[Any, float | Tensor, Tensor]] = []
        self._total = self.weight = 0.0
        self.is_sum = False

    @property
    def mean(self) -> float:
        """Of all that were looked at."""
        return self._total / self.weight

    def add(self, part: Any, loss: WeightedLoss) -> None:
        """A copy: what a recorded graph gives is written over when the graph runs again."""
        self._unread.append((part, loss.weight, loss.mean.detach().clone()))
        self.is_sum = loss.is_sum

    def look(self) -> None:
        """At all that were not looked at yet."""
        unread, self._unread = self._unread, []
        for part, given, mean in unread:
            value = mean.item()
            if not math.isfinite(value):
                self._refuse(part, value)
            weight = float(given)
            self._total += value * weight
            self.weight += weight

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Around passes: where one fails, a loss that is not finite may be why."""
        try:
            yield
        except Exception:
            self.look()
            raise


class GradientStep:
    """Forward and backward of whole batches; parameters change only where they are released.

    ``on_commit`` is called just before the first parameter of a step is changed.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        capture: Capture,
        release: GradientRelease,
        on_commit: Callable[[], None],
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._capture = capture
        self._release = release
        self._on_commit = on_commit
        self._has_rehearsed = False
        self.is_rehearsing = False

    def run(
        self,
        batch: Any,
        loss_fn: LossFunction,
        plan: Plan,
        key: tuple[int, int],
        before: Before,
        *,
        planned: bool,
    ) -> float:
        """Leave the gradient of the mean loss in the parameters; return that loss.

        Args:
            batch: any nest of tensors.
            loss_fn: the user's own.
            plan: what to do.
            key: (seed of the run, index of the step).
            before: put back if the loss is not finite.
            planned: the plan says whether gradients are released; else they are where they can.

        Raises:
            NonFiniteLossError: the loss is inf or NaN; parameters and buffers are untouched.
            ReleaseRefusedError: gradients must be released, and something needs them later.
            CommittedStepError: backward failed after parameters had been updated.
        """
        self._optimizer.zero_grad(set_to_none=True)
        parts = micro_batches(batch, plan.micro_batch)
        self._rehearse_once(parts[0], loss_fn, plan.policy)
        self._release.begin(len(parts), held_by_plan=planned and not plan.release_gradients)
        losses = _Losses(partial(self._refuse_nonfinite, loss_fn, key[1], before))
        looks_first = self._looks_first()
        for index, part in enumerate(parts):
            with losses.explaining():
                loss = self._forward(part, loss_fn, plan.policy, (*key, index))
                losses.add(part, loss)
                if looks_first:
                    losses.look()
                self._backward(loss, only=len(parts) == 1, examples=batch_size(batch))
                del loss
        losses.look()
        if losses.is_sum and len(parts) > 1:
            scale_gradients(list(self._model.parameters()), 1.0 / losses.weight)
        return losses.mean

    def _looks_first(self) -> bool:
        """Is a loss looked at before its backward pass?

        On a device that would wait for the forward pass, while backward could be issued already;
        so it is done only where something may be updated before backward is over.
        """
        if is_processor(device_of(self._model)):
            return True
        releases = self._release.is_asked and not self._release.refusal
        return releases or any(
            each._post_accumulate_grad_hooks for each in self._model.parameters()
        )

    def _rehearse_once(self, part: Any, loss_fn: LossFunction, policy: Policy) -> None:
        """What may be fused is known in the first step already, in a resumed run's too.

        But for what a few examples are too small to show: that is fused from the second step on.
        """
        if not policy.fused or self._has_rehearsed:
            return
        self.is_rehearsing = True
        try:
            if not self._capture.fusions():
                rehearse(self._capture, self._model, policy, part, loss_fn)
            self._has_rehearsed = True
        finally:
            self.is_rehearsing = False

    def _forward(
        self, part: Any, loss_fn: LossFunction, policy: Policy, key: tuple[int, int, int]
    ) -> WeightedLoss:
        capture = self._capture.step(policy, *key, batch=part)
        with capture, self._release.watching():
            return read_loss(loss_fn(self._model, part), batch_size(part))

    def _backward(self, loss: WeightedLoss, *, only: bool, examples: int) -> None:
        if only:
            scaled = loss.mean
        elif loss.is_sum:
            scaled = loss.total
        else:
            scaled = loss.total * (loss.weight / examples)
        # Checkpoints run forward passes again here, compiled parts as the first time.
        again = apart(CompiledModules(self._model))
        with again, self._release.stepping(scaled, on_commit=self._on_commit):
            scaled.backward()  # type: ignore[no-untyped-call]

    def _refuse_nonfinite(
        self, loss_fn: LossFunction, step_index: int, before: Before, part: Any, value: float
    ) -> NoReturn:
        before.forget_backward()
        before.restore()
        where = first_nonfinite(self._model, part, lambda: loss_fn(self._model, part))
        before.restore()
        self._optimizer.zero_grad(set_to_none=True)
        raise NonFiniteLossError(
            f"the loss became {value} at step {step_index}; it began in {where}; parameters "
            f"are those from before this step; try a lower learning rate, more bits, or check the "
            f"data"
        )
