"""A training loop whose levers are switched one by one, to see what each takes off the peak."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from daf.capture.capture import Capture
from daf.core.errors import UnknownNameError
from daf.core.policy import (
    Policy,
    plain_policy,
    policy_for,
    with_chunked_operators,
    with_fused_operators,
)
from daf.step.dry_run import dry_run
from daf.step.gradient_release import GradientRelease
from daf.step.microbatch import LossFunction, likely_cut, read_loss
from daf.torch_compat import compiler

LEVERS = ("codes", "fused", "chunked", "release")


class LeveredLoop:
    """Steps a model with some of ``LEVERS``, without planner or budget.

    Args:
        model: what is trained.
        optimizer: over its parameters.
        levers: which of ``LEVERS`` are on.
        bits: of the codes, where these are on.
        seed: of the codes.

    Raises:
        UnknownNameError: there is no such lever.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        levers: Sequence[str],
        bits: int | str,
        seed: int,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._policy = lever_policy(levers, bits)
        self._seed = seed
        self._step_index = 0
        self.capture = Capture(model)
        self._release = GradientRelease(
            "release" in levers, model, optimizer, self.capture.parameter_reads
        )
        self.saved_bytes_plain = self.saved_bytes_peak = self.gradient_bytes_peak = 0

    def step(self, batch: Any, loss_fn: LossFunction) -> float:
        """One training step; its mean loss, which is looked at last: a device goes on till then."""
        if self._step_index == 0 and self._policy.fused:
            dry_run(self.capture, self._model, self._policy, batch, loss_fn)
        self._optimizer.zero_grad(set_to_none=True)
        self._release.begin(micro_batches=1)
        capture = self.capture.step(self._policy, self._seed, self._step_index, batch=batch)
        with capture, self._release.watching():
            loss = read_loss(loss_fn(self._model, batch), likely_cut(batch).size(batch))
        mean = loss.mean.detach()
        with self._release.stepping(loss.mean, on_commit=lambda: None):
            loss.mean.backward()  # type: ignore[no-untyped-call]
        del loss
        self.capture.release_scratch()
        self._note_bytes()
        compiler.step(self._optimizer)
        self._step_index += 1
        return mean.item()

    def _note_bytes(self) -> None:
        stats, alive = self.capture.stats, gradient_bytes(self._model)
        self.saved_bytes_plain = max(self.saved_bytes_plain, stats.plain_peak_bytes)
        self.saved_bytes_peak = max(self.saved_bytes_peak, stats.held_peak_bytes)
        waiting = self._release.count.peak_gradient_bytes
        self.gradient_bytes_peak = max(self.gradient_bytes_peak, waiting, alive)


def lever_policy(levers: Sequence[str], bits: int | str) -> Policy:
    """What a capture does with these levers.

    Raises:
        UnknownNameError: there is no such lever.
    """
    unknown = sorted(set(levers) - set(LEVERS))
    if unknown:
        raise UnknownNameError(f"unknown lever {', '.join(unknown)}; known: {', '.join(LEVERS)}")
    policy = policy_for(bits) if "codes" in levers else plain_policy()
    chunked = "chunked" in levers
    if "fused" in levers:
        return with_fused_operators(policy, chunked=chunked)
    return with_chunked_operators(policy, policy.chunk_bytes, chunked=chunked)


def gradient_bytes(model: nn.Module) -> int:
    """Bytes of the gradients that exist now."""
    return sum(each.grad.nbytes for each in model.parameters() if each.grad is not None)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the optimizer's state that exist now."""
    states = (value for state in optimizer.state.values() for value in state.values())
    return sum(value.nbytes for value in states if isinstance(value, torch.Tensor))
