"""Small measured steps to a Profile: bytes as a function of the batch, for every policy.

Each step runs the user's own model and loss on the first few examples of the
real batch. Afterwards random states, buffers, gradients and training flags are
as they were, so training starts as if it had not been profiled.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import nn

from daf.errors import PoolFullError
from daf.execution.capture import Capture
from daf.execution.microbatch import (
    LossFunction,
    batch_size,
    batch_slice,
    read_loss,
    split_refusal,
)
from daf.memory import compiler, measure
from daf.memory.keeper import MemoryKeeper
from daf.plan import Measurement, Policy, Profile, proportional_peak

PROBE_ELEMENTS = 4096


def storage_bytes(tensors: Iterator[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind some tensors."""
    sizes = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors
    }
    return sum(sizes.values())


def parameter_bytes(model: nn.Module) -> int:
    """Bytes of parameters and buffers, shared ones counted once."""
    tensors = [*model.parameters(), *model.buffers()]
    return storage_bytes(iter(tensors))


def gradient_bytes(model: nn.Module) -> int:
    """Bytes that gradients take once they all exist."""
    trained = {id(each): each for each in model.parameters() if each.requires_grad}
    return sum(each.numel() * each.element_size() for each in trained.values())


def _state_bytes(state: Mapping[Any, Any]) -> int:
    values = state.values()
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))


def optimizer_bytes_to_come(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of optimizer state that the first step will create.

    Found by running an optimizer of the same class and settings on one small
    parameter; where its constructor takes something else, two numbers per
    parameter (Adam's) are assumed.
    """
    pending = [
        (group, parameter)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad and parameter not in optimizer.state
    ]
    ratios = {id(group): _state_ratio(optimizer, group) for group, _ in pending}
    return int(sum(ratios[id(group)] * parameter.nbytes for group, parameter in pending))


def _state_ratio(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> float:
    probe = nn.Parameter(torch.zeros(PROBE_ELEMENTS))
    probe.grad = torch.ones_like(probe)
    settings = {name: group[name] for name in optimizer.defaults if name in group}
    try:
        trial = type(optimizer)([probe], **settings)
        compiler.step(trial)
    except (TypeError, ValueError, RuntimeError):
        return 2.0
    return _state_bytes(trial.state[probe]) / probe.nbytes


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Restore random states, buffers and gradients on exit, whatever the body did."""
    torch_state, numpy_state, python_state = (
        torch.get_rng_state(),
        numpy.random.get_state(),
        random.getstate(),
    )
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
        torch.set_rng_state(torch_state)
        numpy.random.set_state(numpy_state)
        random.setstate(python_state)


class Profiler:
    """Measures steps of one model on one batch.

    Args:
        model: trained model, as it will be trained.
        optimizer: its optimizer; never stepped here.
        capture: the capture that training will use.
        keeper: what the session set in the process.
        floor_bytes: the process before the model existed.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        capture: Capture,
        keeper: MemoryKeeper,
        floor_bytes: int,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._capture = capture
        self._keeper = keeper
        self._floor_bytes = floor_bytes

    def profile(
        self,
        batch: Any,
        loss_fn: LossFunction,
        policies: tuple[Policy, ...],
        budget_bytes: int,
        *,
        allow_split: bool,
        on_progress: Callable[[str], None] = lambda _: None,
    ) -> Profile:
        """Measure policies at the sizes of ``probe_sizes``, tightest first; seconds at most.

        No step is measured that is expected to pass the budget, so policies may be
        left out. The tightest policy is an exception where the batch must stay
        whole: if its small steps do not fit, the job does not, and they only serve
        to name the least budget that would. Nor is one kept that a capped pool cannot hold.

        Args:
            batch: the real batch; its first examples are used.
            loss_fn: the user's own.
            policies: from what holds most to what holds least.
            budget_bytes: of the whole process.
            allow_split: the user permits micro-batches in any case.
            on_progress: told each policy's name as its turn comes.

        Raises:
            PoolFullError: the pool cannot hold even the smallest step of the tightest policy.
        """
        sizes = probe_sizes(batch_size(batch))
        refusal = "" if allow_split else split_refusal(self._model)
        measurements: dict[str, tuple[Measurement, ...]] = {}
        with undisturbed(self._model):
            # Once unmeasured: code pages, thread pools and kernels' own buffers come to stay.
            tightest = self._measure(batch, loss_fn, policies[-1], sizes[0])
            limit = sys.maxsize if refusal else budget_bytes
            for policy in reversed(policies):
                if measurements and tightest.peak_bytes + tightest.plain_bytes > budget_bytes:
                    break
                on_progress(policy.name)
                points = self._points(batch, loss_fn, policy, sizes, limit)
                if points:
                    measurements[policy.name] = points
                limit = budget_bytes
        return self.outline(batch, measurements, refusal)

    def _points(
        self,
        batch: Any,
        loss_fn: LossFunction,
        policy: Policy,
        sizes: tuple[int, ...],
        limit_bytes: int,
    ) -> tuple[Measurement, ...]:
        fixed = measure.resident_bytes() + gradient_bytes(self._model)
        points: list[Measurement] = []
        for size in sizes:
            if points and proportional_peak(points[-1], size, fixed) > limit_bytes:
                break
            try:
                points.append(self._measure(batch, loss_fn, policy, size))
            except PoolFullError:  # the pool has a cap of its own, and this policy needs more
                break
        return tuple(points)

    def outline(
        self, batch: Any, measurements: dict[str, tuple[Measurement, ...]], refusal: str
    ) -> Profile:
        """The Profile's fixed terms around given measurements."""
        self._keeper.flush()
        return Profile(
            floor_bytes=self._floor_bytes,
            resident_bytes=measure.resident_bytes(),
            parameter_bytes=parameter_bytes(self._model),
            gradient_bytes=gradient_bytes(self._model),
            optimizer_bytes=optimizer_bytes_to_come(self._optimizer),
            batch_size=batch_size(batch),
            measurements=measurements,
            split_refusal=refusal,
            recycles=self._keeper.recycles,
        )

    def _measure(
        self, batch: Any, loss_fn: LossFunction, policy: Policy, examples: int
    ) -> Measurement:
        part = batch_slice(batch, 0, examples)
        self._capture.release_scratch()
        self._keeper.flush()
        measure.reset_peak()
        with self._capture.step(policy, seed=0, step_index=0, batch=part):
            loss = read_loss(loss_fn(self._model, part), examples)
        loss.mean.backward()  # type: ignore[no-untyped-call]
        peak = measure.peak_bytes()
        for parameter in self._model.parameters():
            parameter.grad = None
        stats = self._capture.stats
        return Measurement(examples, peak, stats.plain_peak_bytes, stats.held_peak_bytes)


def probe_sizes(examples: int) -> tuple[int, ...]:
    """Two sizes to measure: an eighth and a quarter of the batch, at least 2 (batch norm) and 4."""
    larger = min(examples, max(4, examples // 4))
    smaller = min(examples, max(2, larger // 2))
    return (smaller,) if smaller == larger else (smaller, larger)
