"""One side of the personalisation under a budget: answers ``learn`` and ``adapt``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from daf.memory import process_memory
from daf.session.session import Session
from daf.torch_compat import compiler
from daf.training.models import find_model
from daf_bench.accuracy.tasks import (
    ADAPTING_RATE,
    Effort,
    Prepared,
    batches,
    evaluate,
    general_job,
    load_speakers,
    new_speaker_job,
    train_plainly,
)
from daf_bench.harness.subprocess_channel import serve


class Personalisation:
    """What the process was told to be."""

    def __init__(self, told: dict[str, Any]) -> None:
        self._path = Path(told["path"])
        self._weights = Path(told["weights"])
        self._seed = int(told["seed"])
        self._effort = Effort(**told["effort"])
        self._above_floor: int | None = told["above_floor"]

    def answer(self, command: str) -> dict[str, Any]:
        """Do it.

        Raises:
            ValueError: there is no such command.
        """
        if command == "learn":
            return self._learn()
        if command == "adapt":
            return self._adapt()
        raise ValueError(f"asked to {command!r}; known: learn, adapt")

    def _learn(self) -> dict[str, Any]:
        data = load_speakers(self._path)
        torch.manual_seed(self._seed)
        model = find_model("resnet20").build(data.facts)
        train_plainly(general_job(model, data, self._seed, self._effort))
        torch.save(model.state_dict(), self._weights)
        return {}

    def _adapt(self) -> dict[str, Any]:
        data = load_speakers(self._path)
        process_memory.warm_up()
        compiler.keep_out()
        floor_bytes = process_memory.resident_bytes()
        model = find_model("resnet20").build(data.facts)
        model.load_state_dict(torch.load(self._weights, weights_only=True))
        job = new_speaker_job(model, self._path, self._seed, self._effort)
        # Another optimizer than the job's: a schedule's patched step loads torch's compiler, 70 MB.
        optimizer = torch.optim.SGD(model.parameters(), ADAPTING_RATE, momentum=0.9)
        budget = None if self._above_floor is None else floor_bytes + self._above_floor
        seeded = Session(model, optimizer, budget, baseline_bytes=floor_bytes, seed=self._seed)
        with seeded as session:
            losses = self._train(session, job)
            peak_bytes = session.peak_bytes
        after = evaluate(model, job.task, self._effort.most_tests)
        # Last, because it holds more than training may; the weights are still in the file.
        model.load_state_dict(torch.load(self._weights, weights_only=True))
        before = evaluate(model, job.task, self._effort.most_tests)
        return {
            "before_percent": before["accuracy_percent"],
            "after_percent": after["accuracy_percent"],
            "final_loss": losses[-1],
            "floor_bytes": floor_bytes,
            "peak_bytes": peak_bytes,
            "budget_bytes": budget,
            "policy_name": session.plan.policy.name if session.plan else None,
            "saved_bytes_plain": session.saved_bytes_plain,
            "saved_bytes": session.saved_bytes_peak,
            "measurements": session.noise.tracker.measurements,
        }

    def _train(self, session: Session, job: Prepared) -> list[float]:
        job.model.train()
        return [session.step(batch, job.task.loss).loss for batch in batches(job, self._seed)]


if __name__ == "__main__":
    serve(Personalisation(json.loads(sys.argv[1])).answer)
