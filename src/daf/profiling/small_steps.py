"""The small steps that are measured: their sizes, operators, codes and times."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor, nn

from daf.capture.capture import Capture
from daf.core.policy import Policy, coded_policy, policy_for, with_planned_operators
from daf.memory.domain import MemoryDomain
from daf.profiling.split_choice import LEAST_WITH_STATISTICS
from daf.step.context import StepContext
from daf.step.microbatch import read_loss

TOGETHER_MS, MOST_RUNS = 20.0, 8  # a step is timed twice; a very short one more often, until two
AGREE = 0.03  # of its times differ by no more than this share
LINEAR, LINEAR_MS = 0.05, 0.25  # so near the line between two sizes' times is on it; or so few ms
LONG_MS = 200.0  # one that takes so long once: it bears a disturbance, and the user waits
# Maps a number of examples to the process's peak (bytes) in their step.
Expectation = Callable[[int], float]
SizeTimes = tuple[tuple[int, float], ...]  # (examples, ms), the fewest first


@dataclass(frozen=True, slots=True)
class StepOperators:
    """PyTorch's operators (``batch_size`` 0), or fused and chunked ones for a batch of that size.

    ``chunk_bytes``: of a chunk in the whole batch, 0 without chunks. Small steps have as many
    chunks as the whole batch will, so that bytes grow with the batch.
    """

    batch_size: int = 0
    chunk_bytes: int = 0

    def of(self, policy: Policy, examples: int) -> Policy:
        """Return the policy with these operators, for a step of ``examples`` examples."""
        if not self.batch_size:
            return policy
        chunk_bytes = max(1, self.chunk_bytes * examples // self.batch_size)
        return with_planned_operators(policy, chunk_bytes)


# Codes that hold least, so that measuring fits wherever training will.
TIGHTEST_BITS = 1
TIGHTEST = coded_policy(TIGHTEST_BITS)
RECOMPUTING = policy_for("exact")


def probe_sizes(examples: int) -> tuple[int, ...]:
    """Return an eighth and a quarter of the batch, at least 2 (batch norm) and 4 examples."""
    larger = min(examples, max(2 * LEAST_WITH_STATISTICS, examples // 4))
    smaller = min(examples, max(LEAST_WITH_STATISTICS, larger // 2))
    return (smaller,) if smaller == larger else (smaller, larger)


def sizes_within(
    wanted: Sequence[int], expected: Expectation, budget_bytes: int, least: int = 1
) -> tuple[int, ...]:
    """Return as many of the largest sizes, or halves of the smallest, as fit; at least one."""
    sizes = sorted({*wanted, *halvings(wanted[0], least)})
    fitting = [size for size in sizes if expected(size) <= budget_bytes]
    return tuple(fitting[-len(wanted) :] or sizes[:1])


def halvings(examples: int, least: int) -> Iterator[int]:
    """Yield ``examples`` and its halves down to ``least``, which ends them."""
    while examples > least:
        yield examples
        examples //= 2
    yield least


def fastest_ms(run: Callable[[], float]) -> float:
    """Return the least time of some runs: disturbances only add time, and seldom the same twice."""
    found_ms = [run()]
    if found_ms[0] >= LONG_MS:
        return found_ms[0]
    found_ms.append(run())
    while sum(found_ms) < TOGETHER_MS and len(found_ms) < MOST_RUNS:
        fastest, second = sorted(found_ms)[:2]
        if second <= (1.0 + AGREE) * fastest:
            break
        found_ms.append(run())
    return min(found_ms)


def times_by_size(sizes: Sequence[int], measure: Callable[[int], float | None]) -> SizeTimes:
    """Return the times of sizes, on lines where what is measured in their middle lies on them.

    The largest are left out while ``measure`` returns None, as where memory is refused.
    """
    left, last_ms = sorted(sizes), None
    while left and (last_ms := measure(left[-1])) is None:
        left.pop()
    if last_ms is None:
        return ()
    first_ms = (measure(left[0]) if len(left) > 1 else None) or last_ms
    return tuple(_on_lines(left, (first_ms, last_ms), measure))


def _on_lines(
    sizes: list[int], ends_ms: tuple[float, float], measure: Callable[[int], float | None]
) -> list[tuple[int, float]]:
    """Return the times of sizes between two whose times are known, and theirs."""
    middle, line_ms = len(sizes) // 2, np.interp(sizes, [sizes[0], sizes[-1]], ends_ms)
    middle_ms = measure(sizes[middle]) if len(sizes) > 2 else None
    near_ms = max(LINEAR_MS, LINEAR * (middle_ms or 0.0))
    if middle_ms is None or abs(middle_ms - line_ms[middle]) <= near_ms:
        return [*zip(sizes, map(float, line_ms), strict=True)]
    below = _on_lines(sizes[: middle + 1], (ends_ms[0], middle_ms), measure)
    return below + _on_lines(sizes[middle:], (middle_ms, ends_ms[1]), measure)[1:]


def timed_ms(
    capture: Capture,
    memory: MemoryDomain,
    context: StepContext,
    policy: Policy,
    examples: int,
    backward: Callable[[Tensor], None],
) -> float:
    """Return the time of a step of so many examples under a policy; no gradient is left."""
    part = context.first(examples)
    memory.wait()
    start_s = time.perf_counter()
    with capture.step(policy, seed=0, step_index=0, batch=part):
        loss = read_loss(context.loss_fn(capture.model, part), examples)
    backward(loss.mean)
    memory.wait()
    passed_ms = 1000.0 * (time.perf_counter() - start_s)
    nn.Module.zero_grad(capture.model)  # as plain code, whatever overrides it
    return passed_ms
