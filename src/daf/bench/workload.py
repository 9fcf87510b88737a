"""A contestant's work: the same model, data order and optimizer for everybody."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from daf.bench.contestant import Entry
from daf.bench.levered import LeveredLoop, gradient_bytes, state_bytes
from daf.bench.peers import lean_step, plain_step
from daf.memory import compiler, measure
from daf.memory.recycling import RecyclingAllocator
from daf.memory.statistics import audit, stats
from daf.model_bytes import parameter_bytes
from daf.session import Session
from daf.training.batches import Batch, BatchOrder
from daf.training.data import load_data
from daf.training.data.contents import ImageData, TextData
from daf.training.data.tokens import SentenceData
from daf.training.models import Recipe, find_model
from daf.training.tasks import make_task, settle_goal

MEMORY_FORMATS = {
    "channels_last": torch.channels_last,
    "contiguous": torch.contiguous_format,
}


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
        measure.warm_up()
        self.floor_bytes = measure.resident_bytes()
        if entry.recycle:
            # Until the process ends: nothing of the workload outlives it.
            cap_bytes = 0 if entry.recycle_tightly else entry.recycle_cap_bytes
            self._allocator = RecyclingAllocator(cap_bytes=cap_bytes).__enter__()
        memory_format = MEMORY_FORMATS[entry.memory_format]
        self.model = _built(recipe, data, memory_format, entry.seed)
        self.task = make_task(goal, data, self.model, memory_format=memory_format)
        self.order = BatchOrder(self.task.train_examples, entry.batch_size, entry.seed)
        if entry.keep_compiler_out:
            compiler.keep_out()
        self.optimizer = OPTIMIZERS[entry.optimizer](self.model, entry.learning_rate)
        self._entry = entry
        self._step_index = 0
        self._peak_bytes = 0
        self._session = self._start_session()
        self._levered = self._start_levered()

    def step(self) -> dict[str, float]:
        """One training step: its mean loss, its peak and its time, data loading left out."""
        batch = self._next_batch()
        self._peak_bytes = max(self._peak_bytes, measure.peak_bytes())
        measure.reset_peak()
        start_s = time.perf_counter()
        loss = self._run(batch)
        step_ms = 1000 * (time.perf_counter() - start_s)
        self._tighten()
        return {"loss": loss, "step_ms": step_ms, "peak_bytes": measure.peak_bytes()}

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
                self._peak_bytes, session.peak_bytes if session else measure.peak_bytes()
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
            floor_bytes=self.floor_bytes,
        )

    def _start_levered(self) -> LeveredLoop | None:
        entry = self._entry
        if entry.levers is None:
            return None
        bits = "plain" if entry.bits is None else entry.bits
        return LeveredLoop(self.model, self.optimizer, entry.levers, bits, entry.seed)

    def _next_batch(self) -> Batch:
        generator = np.random.default_rng([self._entry.seed, self._step_index])
        batch = self.task.train_batch(self.order.indices(self._step_index), generator)
        self._step_index += 1
        return batch

    def _run(self, batch: Batch) -> float:
        if self._session is not None:
            return self._session.step(batch, self.task.loss).loss
        if self._levered is not None:
            return self._levered.step(batch, self.task.loss)
        step = lean_step if self._entry.keep_compiler_out else plain_step
        return step(self.model, self.optimizer, batch, self.task.loss)


def _built(
    recipe: Recipe,
    data: ImageData | TextData | SentenceData,
    memory_format: torch.memory_format,
    seed: int,
) -> nn.Module:
    torch.manual_seed(seed)
    model = recipe.build(data.facts)
    model.to(memory_format=memory_format)  # type: ignore[call-overload]
    return model
