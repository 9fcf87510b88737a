"""A contestant's work: the same model, data order and optimizer for everybody."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn

from daf.core.errors import PoolFullError
from daf.memory import process_memory
from daf.memory.domain import keeper_of, memory_on
from daf.memory.recycling_allocator import RecyclingAllocator
from daf.memory.statistics import audit, stats
from daf.profiling.model_memory import parameter_bytes
from daf.session.session import Session
from daf.torch_compat import compiler
from daf.training.data import load_data
from daf.training.models import Recipe, find_model
from daf.training.task import Batch, BatchOrder, DataSet, Indices, Loss, settle_goal
from daf_bench.harness.ablation_loop import LeveredLoop, gradient_bytes, state_bytes
from daf_bench.harness.peer_methods import lean_step, plain_step
from daf_bench.harness.worker import Entry

MEMORY_FORMATS = {"channels_last": torch.channels_last, "contiguous": torch.contiguous_format}


OPTIMIZERS: Mapping[str, Callable[[nn.Module, float], torch.optim.Optimizer]] = {
    "sgd": lambda model, rate: torch.optim.SGD(
        model.parameters(), lr=rate, momentum=0.9, weight_decay=5e-4
    ),
    "adamw": lambda model, rate: torch.optim.AdamW(model.parameters(), lr=rate),
}


# What blocks that do not fit each other may take beside those that are alive.
LIMIT_ROOM_BYTES = 4 * 2**20


class Workload:
    """Builds what an ``Entry`` names and runs its steps; every random choice follows the seed."""

    def __init__(self, entry: Entry) -> None:
        recipe = find_model(entry.model)
        data = load_data(entry.data, image_size=entry.image_size, context=entry.context)
        goal = settle_goal(entry.model, recipe.goal, data)
        self._device = torch.device(entry.device)
        self._memory = memory_on(self._device)
        process_memory.warm_up(self._device)
        self.floor_bytes = self._memory.held_bytes()
        if entry.recycle:
            # Until the process ends: nothing of the workload outlives it.
            cap_bytes = 0 if entry.recycle_tightly else entry.recycle_cap_bytes
            self._allocator = RecyclingAllocator(cap_bytes=cap_bytes).__enter__()
        memory_format = MEMORY_FORMATS[entry.memory_format]
        self.model = _built(recipe, data, memory_format, entry.seed)
        self.task = data.make_task(goal, self.model, memory_format=memory_format)
        self.model.to(self._device)
        if entry.keep_compiler_out:
            compiler.keep_out()
        self.optimizer = OPTIMIZERS[entry.optimizer](self.model, entry.learning_rate)
        self._entry = entry
        self._step_index = 0
        self._peak_bytes = 0
        self._session = self._start_session()
        self._levered = self._start_levered()
        self._keeper = keeper_of(self._memory)
        if entry.limit_bytes is not None:
            self._keeper.open()
            self._keeper.bound(entry.limit_bytes, entry.limit_bytes)

    @cached_property
    def order(self) -> BatchOrder:
        """Which examples a step trains on."""
        return BatchOrder(self.task.train_examples, self._entry.batch_size, self._entry.seed)

    def step(self) -> dict[str, float]:
        """One training step: its mean loss, its peak and its time, data loading left out."""
        return self._timed(self._next_batch())

    def _timed(self, batch: Batch) -> dict[str, float]:
        self._peak_bytes = max(self._peak_bytes, self._memory.peak_bytes())
        self._memory.reset_peak()
        self._memory.wait()
        start_s = time.perf_counter()
        loss = self._run(batch)
        self._memory.wait()
        step_ms = 1000 * (time.perf_counter() - start_s)
        self._tighten()
        return {"loss": loss, "step_ms": step_ms, "peak_bytes": self._memory.peak_bytes()}

    def fits(self) -> bool:
        """Are two steps done within the limit? The second of them has the optimizer's state.

        A batch of more examples than there are repeats them.
        """
        refusals = self._keeper.refusals()
        indices = np.arange(self._entry.batch_size, dtype=np.int64) % self.task.train_examples
        try:
            for _ in range(2):
                self._timed(self._batch(indices))
        except PoolFullError:
            return False
        except RuntimeError as error:
            if not self._keeper.has_refused(error, refusals):
                raise
            return False
        return True

    def _tighten(self) -> None:
        """Once two steps have told what is alive at most, hold no more than that.

        The first of them brings the optimizer's state into being.
        """
        is_known = self._step_index >= 2 and self._entry.recycle_tightly
        if is_known and self._allocator.limit_bytes is None:
            counts = stats()
            highest = counts["live_bytes.peak"] + counts["external_bytes.peak"]
            self._allocator.limit_bytes = highest + LIMIT_ROOM_BYTES
            self._allocator.cap_bytes = None

    def facts(self) -> dict[str, Any]:
        """Bytes so far, in ``summary.json``'s names."""
        session, counted = self._session, self._session or self._levered
        return {
            "floor_bytes": self.floor_bytes,
            "peak_bytes": max(
                self._peak_bytes, session.peak_bytes if session else self._memory.peak_bytes()
            ),
            "saved_bytes_plain": counted.saved_bytes_plain if counted else None,
            "saved_bytes_peak": counted.saved_bytes_peak if counted else None,
            "parameter_bytes": parameter_bytes(self.model),
            "gradient_bytes": self._gradient_bytes(),
            "state_bytes": state_bytes(self.optimizer),
            **(self._account() if self._entry.recycle else {}),
        }

    def _gradient_bytes(self) -> int:
        if self._levered is not None:
            return self._levered.gradient_bytes_peak
        return gradient_bytes(self.model)

    @staticmethod
    def _account() -> dict[str, Any]:
        found, counts = audit(), stats()
        return {
            "resident_bytes": found.resident_bytes,
            "held_bytes": found.held_bytes,
            "other_bytes": found.other_bytes,
            "live_peak_bytes": counts["live_bytes.peak"],
            "held_peak_bytes": counts["held_bytes.peak"],
        }

    def _start_session(self) -> Session | None:
        entry = self._entry
        if entry.levers is not None or entry.bits is None:
            return None
        return Session(
            self.model,
            self.optimizer,
            None,
            bits=entry.bits,
            seed=entry.seed,
            baseline_bytes=self.floor_bytes,
        )

    def _start_levered(self) -> LeveredLoop | None:
        entry = self._entry
        if entry.levers is None:
            return None
        bits = "plain" if entry.bits is None else entry.bits
        return LeveredLoop(self.model, self.optimizer, entry.levers, bits, entry.seed)

    def _next_batch(self) -> Batch:
        batch = self._batch(self.order.indices(self._step_index))
        self._step_index += 1
        return batch

    def _batch(self, indices: Indices) -> Batch:
        generator = np.random.default_rng([self._entry.seed, self._step_index])
        batch = self.task.train_batch(indices, generator)
        return tuple(each.to(self._device) for each in batch)

    def _run(self, batch: Batch) -> float:
        if self._session is not None:
            return self._session.step(batch, self._loss).loss
        if self._levered is not None:
            return self._levered.step(batch, self._loss)
        step = lean_step if self._entry.keep_compiler_out else plain_step
        return step(self.model, self.optimizer, batch, self._loss)

    def _loss(self, model: nn.Module, batch: Batch) -> Loss:
        kind = self._entry.autocast
        if kind is None:
            return self.task.loss(model, batch)
        with torch.autocast(self._device.type, dtype=getattr(torch, kind)):
            return self.task.loss(model, batch)


def _built(
    recipe: Recipe, data: DataSet, memory_format: torch.memory_format, seed: int
) -> nn.Module:
    torch.manual_seed(seed)
    model = recipe.build(data.facts)
    model.to(memory_format=memory_format)  # type: ignore[call-overload]
    return model
