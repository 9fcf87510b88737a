"""Run folders as ``daf train`` leaves them, made up, with known numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from daf.files.records import write_json, write_lines

MB = 10**6
SUMMARY: dict[str, Any] = {
    "model": "resnet18",
    "data": "cifar10:somewhere.npz",
    "parameters": 1234,
    "goal": "classify",
    "batch_size": 64,
    "epochs": 1,
    "steps_per_epoch": 40,
    "left_out_per_epoch": 0,
    "optimizer": "sgd",
    "learning_rate": 0.05,
    "weight_decay": 5e-4,
    "seed": 0,
    "threads": 1,
    "budget_bytes": 600 * MB,
    "floor_bytes": 300 * MB,
    "peak_bytes": 550 * MB,
    "predicted_peak_bytes": 560 * MB,
    "saved_bytes_plain": 200 * MB,
    "saved_bytes_peak": 20 * MB,
    "micro_batch": 64,
    "policy": "2-bit",
    "plan_reason": "it fits",
    "process_settings": [],
    "release_gradients": False,
    "release_refusal": "",
    "pool_bytes": None,
    "evicted_bytes": 0,
    "step_ms_median": 200.0,
    "examples_per_s": 320.0,
    "loss": 1.5,
    "metric": 61.5,
    "metric_name": "test_accuracy_percent",
    "finished": True,
    "steps": 40,
    "evaluations": [],
    "versions": {"daf": "0", "torch": "2"},
}
PLAN: dict[str, Any] = {
    "policy": "2-bit",
    "micro_batch": 64,
    "reason": "2-bit with the whole batch fits",
    "choices": [
        "the whole batch of 64 at once: it fits, and micro-batches would take longer or no less",
        "block: replayed, 2 families of sites not saved for 4.00 ms a micro-batch",
        "conv:conv2d#0[0] rotated 2: frees 90 MB at the peak for 3.00 ms a micro-batch",
        "norm:batch_norm#0[1], head:linear#0[0]: kept: not alive at the peak",
    ],
    "replayed": ["block"],
    "forward_moments": 2,
    "saved_by_moment": {
        "plain": [50 * MB, 90 * MB, 90 * MB, 40 * MB],
        "held": [20 * MB, 30 * MB, 60 * MB, 20 * MB],
        "again": [0, 0, 40 * MB, 0],
    },
    "predicted_peak_bytes": 560 * MB,
    "account": {
        "floor": 300 * MB,
        "parameters": 40 * MB,
        "gradients": 40 * MB,
        "optimizer_state": 40 * MB,
        "saved": 20 * MB,
        "beside_the_model": 10 * MB,
        "transient": 90 * MB,
        "margin": 20 * MB,
        "predicted_peak": 560 * MB,
    },
}


def site(name: str, need: str, method: str, bits: int, plain: int, held: int) -> dict[str, Any]:
    sizes = {"plain_bytes": plain, "held_bytes": held, "evicted_bytes": 0, "spilled_bytes": 0}
    return {"site": name, "need": need, "method": method, "bits": bits, **sizes}


SITES = [
    site("conv:conv2d#0[0]", "linear", "rotated", 2, 96 * MB, 6 * MB),
    site("norm:batch_norm#0[0]", "norm", "rotated", 3, 96 * MB, 9 * MB),
    site("norm:batch_norm#0[1]", "exact", "keep", 0, 256, 256),
    site("relu:relu#0[0]", "sign", "mask", 1, 96 * MB, 3 * MB),
    site("head:linear#0[0]", "linear", "rederive", 0, 0, 0),
]


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """Write a run folder; keywords replace entries of its summary."""

    def make(name: str = "run", **changes: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        write_json(folder / "summary.json", SUMMARY | changes)
        write_json(folder / "plan.json", PLAN)
        write_lines(folder / "sites.jsonl", SITES)
        write_lines(
            folder / "metrics.jsonl",
            [{"step": i, "loss": 2.5 - i / 40, "examples_per_s": 300.0 + i} for i in range(1, 41)],
        )
        samples = [{"seconds": i / 10, "resident_bytes": (300 + 5 * i) * MB} for i in range(51)]
        marks = [(0.0, "profile"), (2.0, "train"), (4.0, "evaluate")]
        named = [{"seconds": at, "mark": label} for at, label in marks]
        write_lines(folder / "memory.jsonl", [*named, *samples])
        return folder

    return make
