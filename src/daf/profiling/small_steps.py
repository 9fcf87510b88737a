"""The steps that are measured: their sizes, operators and codes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from daf.core.policy import Policy, coded_policy, with_planned_operators
from daf.profiling.split_choice import LEAST_WITH_STATISTICS
from daf.profiling.step_times import halvings

# Maps a number of examples to the process's peak (bytes) in their step.
Expectation = Callable[[int], float]


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
