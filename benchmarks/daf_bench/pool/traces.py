"""Training-like traces for the pool's benchmark, and processes of their own to play them in."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import daf_bench._native as _native
from daf_bench.pool import trace_player

# benchmarks/native/pool_measure.h: Action; what is bare has no headers.
ALLOCATE, RELEASE, MARK, BARE = range(4)
CONTESTANTS = ("adaptive", "fixed", "best-fit", "malloc", "malloc-return")
GROWTH_RULES = ("adaptive", "fixed", "fixed-cut")
Operations = NDArray[np.void]  # of pool_player.OPERATION, or of SAMPLE


@dataclass(frozen=True, slots=True)
class Shape:
    """What a made-up training run looks like; sizes are elements."""

    iterations: int
    least_tensors: int = 20
    most_tensors: int = 60
    least_count: int = 2**15
    most_count: int = 2**23
    minimum_bits: int = 0  # 0: every plane stays
    survivors: float = 0.03  # tensors that live into the next iteration
    seed: int = 0


def make_operations(shape: Shape) -> tuple[Operations, list[tuple[int, int]]]:
    """A trace (``pool_player.OPERATION``) and the (elements, bits) of one iteration.

    Every iteration allocates tensors of random size and width, is marked where
    its forward ends, and frees them nearly in reverse order.
    """
    random = np.random.default_rng(shape.seed)
    parts: list[Operations] = []
    free_ids = list(range(4 * shape.most_tensors))
    waiting: list[int] = []
    for _ in range(shape.iterations):
        forward = _forward(shape, random, free_ids)
        backward = _backward([*waiting, *forward["id"].tolist()], random)
        kept = random.random(len(backward)) < shape.survivors
        waiting = backward["id"][kept].tolist()
        backward = backward[~kept]
        free_ids += backward["id"].tolist()
        mark = np.zeros(1, trace_player.OPERATION)
        mark["action"] = MARK
        parts += [forward, mark, backward]
    first = parts[0]
    return np.concatenate(parts), list(
        zip(first["count"].tolist(), first["bits"].tolist(), strict=True)
    )


def _forward(shape: Shape, random: np.random.Generator, free_ids: list[int]) -> Operations:
    size = int(random.integers(shape.least_tensors, shape.most_tensors + 1))
    out = np.zeros(size, trace_player.OPERATION)
    out["action"] = ALLOCATE
    out["id"] = [free_ids.pop() for _ in range(size)]
    low, high = np.log(shape.least_count), np.log(shape.most_count)
    out["count"] = np.exp(random.uniform(low, high, size)).astype(np.uint64)
    out["bits"] = random.integers(1, 5, size)
    out["minimum_bits"] = shape.minimum_bits or out["bits"]
    out["importance"] = random.random(size) / out["count"]
    return out


def _backward(ids: list[int], random: np.random.Generator) -> Operations:
    out = np.zeros(len(ids), trace_player.OPERATION)
    out["action"] = RELEASE
    order = np.argsort(-np.arange(len(ids)) + random.normal(0, 2, len(ids)))
    out["id"] = np.array(ids, np.uint32)[order]
    return out


def play(
    contestant: str, page_bytes: int, cap_bytes: int | None, operations: Operations
) -> tuple[Operations, float]:
    """Samples (``pool_player.SAMPLE``) after every operation, and seconds.

    In a process of its own, without torch: what malloc did before would show.
    """
    with tempfile.TemporaryDirectory() as folder:
        given, wanted = Path(folder) / "operations.npy", Path(folder) / "samples.npy"
        np.save(given, operations)
        command = [sys.executable, "-I", trace_player.__file__, str(_native.__file__), contestant]
        command += [str(page_bytes), str(cap_bytes or 0), str(given), str(wanted)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        return np.load(wanted), float(done.stdout)


def waste_of(operations: Operations, samples: Operations) -> dict[str, float]:
    """Payload over held bytes at the worst moments, on the mean, and early and late."""
    payload = samples["payload_bytes"].astype(np.float64)
    held = np.maximum(samples["held_bytes"].astype(np.float64), 1)
    marks = operations["action"] == MARK
    peak = float(payload[marks].mean())
    ratio = payload / held
    at_marks = ratio[marks]
    tenth = max(1, len(at_marks) // 10)
    return {
        "peak_payload_bytes": peak,
        "worst": float(ratio[payload >= peak / 2].min()),
        "worst_at_peaks": float(at_marks.min()),
        "worst_from_tenth_of_peak": float(ratio[payload >= peak / 10].min()),
        "mean_at_peaks": float(at_marks.mean()),
        "first_tenth": float(at_marks[:tenth].mean()),
        "last_tenth": float(at_marks[-tenth:].mean()),
        "worst_resident": _worst_resident(payload[marks], samples["resident_bytes"][marks]),
    }


def _worst_resident(payload: NDArray[np.float64], resident: NDArray[np.uint64]) -> float:
    """The same with what the system says is in memory."""
    return float((payload / np.maximum(resident.astype(np.float64), 1)).min())


def usual_cap(page_bytes: int, operations: Operations) -> int:
    """A tenth more than what the passes' ends hold on the mean."""
    free, _ = play("adaptive", page_bytes, None, operations)
    marks = operations["action"] == MARK
    return int(1.1 * free["payload_bytes"][marks].mean())


def growth_row(
    rule: str, page_bytes: int, cap_bytes: int, samples: Operations, seconds: float
) -> dict[str, Any]:
    """Evictions, bytes held and time of one rule of growth."""
    return {
        "rule": rule,
        "cap_bytes": cap_bytes,
        "page_bytes": page_bytes,
        "evicted_pages": int(samples["evicted_pages"][-1]),
        "mean_held_bytes": float(samples["held_bytes"].mean()),
        "peak_held_bytes": int(samples["held_bytes"].max()),
        "seconds": seconds,
    }
