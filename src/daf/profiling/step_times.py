"""Times small steps, twice each; very short ones more often."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch import nn

from daf.capture.capture import Capture
from daf.core.policy import Policy
from daf.memory.domain import MemoryDomain
from daf.step.context import StepContext
from daf.step.microbatch import read_loss

TOGETHER_MS, MOST_RUNS = 20.0, 8


class Times(NamedTuple):
    """``kept``: (examples, ms) with everything kept; ``coded_ms``: the largest of them coded."""

    kept: tuple[tuple[int, float], ...]
    coded_ms: float | None = None


def fastest_ms(run: Callable[[], float]) -> float:
    """Return the least time of some runs: disturbances only add time."""
    found_ms: list[float] = []
    while len(found_ms) < 2 or (sum(found_ms) < TOGETHER_MS and len(found_ms) < MOST_RUNS):
        found_ms.append(run())
    return min(found_ms)


def timed_ms(
    capture: Capture, memory: MemoryDomain, context: StepContext, policy: Policy, examples: int
) -> float:
    """Return the time of a step of so many examples under a policy; no gradient is left."""
    part = context.first(examples)
    memory.wait()
    start_s = time.perf_counter()
    with capture.step(policy, seed=0, step_index=0, batch=part):
        loss = read_loss(context.loss_fn(capture.model, part), examples)
    loss.mean.backward()  # type: ignore[no-untyped-call]
    memory.wait()
    passed_ms = 1000.0 * (time.perf_counter() - start_s)
    nn.Module.zero_grad(capture.model)  # as plain code, whatever overrides it
    return passed_ms


def halvings(examples: int, least: int) -> Iterator[int]:
    """Yield ``examples`` and its halves down to ``least``, which ends them."""
    while examples > least:
        yield examples
        examples //= 2
    yield least
