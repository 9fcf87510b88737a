"""A workload's first gradient under some capture, in a process that measures nothing else."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import daf
from daf.step.microbatch import read_loss
from daf_bench.harness.row_log import Row
from daf_bench.harness.subprocess_channel import Child, serve
from daf_bench.workloads import built_workload
from daf_bench.workloads.trainable import Trainable


def measured_by(module: str, workload: str, folder: Path | None, *, is_small: bool) -> Row:
    """Return what ``python -m module`` (``answer_with``) measures of a workload."""
    what = {"name": workload, "folder": folder and str(folder), "is_small": is_small}
    child = Child(module, what, f"{workload}, {module}")
    try:
        return child.ask("measure")
    finally:
        child.end()


def answer_with(measure: Callable[[Trainable], Row]) -> None:
    """Be that process: build what the argument names, and measure it when asked."""
    what: dict[str, Any] = json.loads(sys.argv[1])
    serve(lambda _command: measure(built_workload(**what)))


def gradient(work: Trainable, way: daf.compress) -> Tensor:
    """Return the first batch's gradient at the first weights, float32 and flat."""
    work.model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    with way:
        found = read_loss(work.task.loss(work.model, work.batch(0)), work.order.batch_size)
    found.mean.backward()  # type: ignore[no-untyped-call]
    gradients = (each.grad for each in work.model.parameters())
    return torch.cat([each.flatten().float() for each in gradients if each is not None])


def relative_error(found: Tensor, plain: Tensor) -> float:
    """Return the length of the difference over plain's."""
    return float((found - plain).double().norm() / plain.double().norm())
