"""Training-like traces for the pool's benchmark, and processes of their own to play them in."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import daf_bench._native as _native
from daf_bench.pool import trace_player

ALLOCATE, RELEASE, MARK = 0, 1, 2  # benchmarks/native/pool_measure.h: Action
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
