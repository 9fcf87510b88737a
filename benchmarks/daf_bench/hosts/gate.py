"""A host's loop, held at the end of each update until the parent asks for the next.

The loop is the host's own: a hook that every optimizer calls after its step is where it stops. So
an update's time is that from one such stop to the next, whatever the host fetches ahead.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from daf.memory import process_memory
from daf.session.session import Session


class Gate:
    """Obeys the parent's commands between updates.

    ``update`` runs the next one: ``ms`` and ``peak_bytes``, or ``raised`` from ``refuse``.
    ``facts``: ``floor_bytes`` (the process before its first forward pass, model and optimizer
    loaded; 0 within a budget) and ``peak_bytes`` since then. ``weights FILE`` writes parameters.
    ``finish``: lets the host end, which ``finished`` answers.

    Args:
        answers: where JSON lines go; hosts print on standard output.
        model: whose parameters are asked for.
        is_budgeted: True where a session accounts for the peak.
    """

    def __init__(self, answers: TextIO, model: nn.Module, *, is_budgeted: bool) -> None:
        self._answers, self._model = answers, model
        self._start_s = 0.0
        self._floor_bytes = 0
        self._is_finishing = False
        self._first_forward = None if is_budgeted else register_module_forward_pre_hook(self._begin)
        self._hook = register_optimizer_step_post_hook(self._end_update)

    def wait(self) -> None:
        """Answer until the next update may run; the process ends with its parent."""
        for line in iter(sys.stdin.readline, ""):
            command, *words = line.rstrip("\n").split(" ")
            if command in ("update", "finish"):
                self._is_finishing = command == "finish"
                self._start_s = time.perf_counter()
                return
            self._answer(self._facts() if command == "facts" else self._write(" ".join(words)))
        os._exit(0)  # in the midst of a host, which has nothing to save

    def refuse(self, error: Exception) -> None:
        """Answer an update, or the end, that the host refused."""
        self._answer({"raised": str(error)})

    def finished(self) -> None:
        """Answer that the host's loop came to its end."""
        self._hook.remove()
        self._answer({"finished": self._is_finishing, **self._facts()})

    def _begin(self, module: nn.Module, inputs: object) -> None:
        del module, inputs
        if self._first_forward is not None:
            self._first_forward.remove()
            self._first_forward = None
            self._floor_bytes = process_memory.resident_bytes()
            process_memory.reset_peak()

    def _end_update(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if optimizer.param_groups[0]["params"][0] is not next(self._model.parameters()):
            return  # a session measures what a step takes, on parameters of its own
        ms = 1000 * (time.perf_counter() - self._start_s)
        self._answer({"ms": ms, "peak_bytes": process_memory.peak_bytes()})
        self.wait()

    def _facts(self) -> dict[str, Any]:
        peak_bytes = process_memory.peak_bytes()
        sessions = [each for each in gc.get_objects() if isinstance(each, Session)]
        peak_bytes = max([peak_bytes, *(each.peak_bytes for each in sessions)])
        plans = [each.plan for each in sessions if each.plan is not None]
        return {
            "floor_bytes": self._floor_bytes,
            "peak_bytes": peak_bytes,
            "sessions": len(sessions),
            "micro_batches": [plan.micro_batch for plan in plans],
            "reasons": [plan.reason for plan in plans],
        }

    def _write(self, path: str) -> dict[str, Any]:
        with Path(path).open("wb") as file, torch.no_grad():
            for parameter in self._model.parameters():
                parameter.float().contiguous().numpy().tofile(file)
        return {}

    def _answer(self, found: dict[str, Any]) -> None:
        self._answers.write(json.dumps(found) + "\n")
        self._answers.flush()
