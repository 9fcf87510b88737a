"""One side of the comparison in a process of its own: a workload's passes, plainly or exactly.

``python -m daf_bench.values.child JSON`` is that process. In one process with the other, plain
PyTorch would have its freed blocks used again, too, which is not what a user without DAF has.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import daf
from daf.core.policy import Method
from daf.step.microbatch import read_loss
from daf_bench.harness.method_runner import write_gradient
from daf_bench.harness.subprocess_channel import serve
from daf_bench.values.recording import recording_of
from daf_bench.workloads import built_workload


@dataclass(frozen=True, slots=True)
class Side:
    """What one process runs."""

    workload: str
    folder: str | None
    is_small: bool
    is_exact: bool


class Passes:
    """Answers ``pass``, ``gradient FILE`` and ``recording``."""

    def __init__(self, side: Side) -> None:
        self._work = built_workload(side.workload, side.folder, is_small=side.is_small)
        self._ours = daf.compress(self._work.model, bits="exact") if side.is_exact else None

    def answer(self, command: str, *words: str) -> dict[str, Any]:
        """Carry out one command."""
        if command == "pass":
            return self._timed(self._ours or nullcontext())
        if command == "gradient":
            return self._gradient(Path(" ".join(words)))
        if command == "recording":
            return recording_of(self._work.model, self._timed)
        raise ValueError(f"unknown command {command!r}; there are pass, gradient and recording")

    def _timed(self, way: AbstractContextManager[object]) -> dict[str, float]:
        """What a forward and a backward pass take (ms), and forward alone."""
        work, batch = self._work, self._work.batch(0)
        work.model.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        start_s = time.perf_counter()
        with way:
            loss = read_loss(work.task.loss(work.model, batch), work.order.batch_size).mean
        forward_ms = 1000.0 * (time.perf_counter() - start_s)
        loss.backward()  # type: ignore[no-untyped-call]
        return {"ms": 1000.0 * (time.perf_counter() - start_s), "forward_ms": forward_ms}

    def _gradient(self, path: Path) -> dict[str, Any]:
        """Write a pass's gradient; of exact passes return what was held and computed again.

        It is the second pass: the first one proves recipes and learns what several readers share.
        """
        for _ in range(2):
            self._timed(self._ours or nullcontext())
        write_gradient(self._work.model, path)
        if self._ours is None:
            return {}
        stats, sites = self._ours.stats, self._ours.sites()
        return {
            "saved_bytes_plain": stats.plain_peak_bytes,
            "saved_bytes": stats.held_peak_bytes,
            "recomputed": sum(each.treatment.method is Method.RECOMPUTE for each in sites),
        }


if __name__ == "__main__":
    serve(Passes(Side(**json.loads(sys.argv[1]))).answer)
