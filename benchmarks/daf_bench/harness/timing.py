"""Times of calls taken in turn, so that a noisy machine falls on all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch


def interleaved_ms(
    calls: Mapping[str, Callable[[], object]], rounds: int
) -> dict[str, list[float]]:
    """Milliseconds of every call by round, in alternating order; a first round is not kept."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for index in range(rounds + 1):
        names = list(calls) if index % 2 else list(calls)[::-1]
        for name in names:
            start_ns = time.perf_counter_ns()
            calls[name]()
            if index:
                found[name].append((time.perf_counter_ns() - start_ns) / 1e6)
    return found


def device_seconds(work: Callable[[], object], device: torch.device) -> float:
    """One run; on a GPU between two events, which is waited for."""
    if device.type != "cuda":
        begin_s = time.perf_counter()
        work()
        return time.perf_counter() - begin_s
    first = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    last = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    first.record()
    work()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3
