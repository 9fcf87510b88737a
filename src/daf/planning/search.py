"""The least objective over all shapes of a step and all selections.

Best first: a shape's lower bound is its time with everything kept, then its linear program's bound,
then HiGHS's own. The search ends when the best candidate is within the gap of the lowest bound.
"""

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from daf.core.profile import Profile
from daf.planning.candidate import Candidate, noise_price_ms
from daf.planning.mip import RELATIVE_GAP, Program
from daf.planning.options import EVERYTHING, Allowed
from daf.planning.table import Table, base_bytes, make_table


def micro_batch_sizes(profile: Profile) -> list[int]:
    """Return the smallest micro-batch size for every possible number of them, largest first."""
    if profile.split_refusal:
        return [profile.batch_size]
    whole, least = profile.batch_size, profile.least_micro_batch
    sizes = {-(-whole // count) for count in range(1, whole + 1)}
    # The last micro-batch is shorter; one below the least would have to grow the others.
    fitting = (size for size in sizes if size >= least and not 0 < whole % size < least)
    return sorted({whole, *fitting}, reverse=True)


@dataclass(frozen=True, slots=True)
class Shape:
    """A step's micro-batch size, and whether it releases gradients."""

    micro_batch: int
    release_gradients: bool = False

    def table(self, profile: Profile, allowed: Allowed) -> Table:
        """Return the choices of steps of this shape."""
        return make_table(
            profile, self.micro_batch, allowed, release_gradients=self.release_gradients
        )


def shapes(profile: Profile, allowed: Allowed) -> Iterator[Shape]:
    """Yield the possible shapes; only a whole batch can release gradients."""
    for size in micro_batch_sizes(profile):
        if not allowed.must_release:
            yield Shape(size)
        if size == profile.batch_size and allowed.release_gradients:
            yield Shape(size, release_gradients=True)


@dataclass(frozen=True, slots=True)
class Problem:
    """What a candidate is sought for."""

    profile: Profile
    limit_bytes: int = 0  # of the computed peak, margin excluded
    tolerance: float = math.inf  # the most noise, relative to the batch's own
    allowed: Allowed = EVERYTHING
    relative_gap: float = RELATIVE_GAP  # accept a candidate within this share of the lower bound
    stop: Callable[[], bool] = lambda: False  # asked between programs; True returns the best so far
    least_micro_batch: int = 1  # smaller ones are excluded
    most_ms: float = math.inf  # larger objectives are excluded


class Search:
    """One search for the fastest candidate of a problem."""

    def __init__(self, problem: Problem) -> None:
        self._problem, self._profile = problem, problem.profile
        self._allowed = problem.allowed.within(problem.tolerance)
        every = shapes(self._profile, self._allowed)
        self._shapes = [each for each in every if each.micro_batch >= problem.least_micro_batch]
        self._best: Candidate | None = None
        self._best_ms = math.inf
        self._last: tuple[Shape, Table, Program] | None = None

    def run(self) -> Candidate | None:
        """Return the best candidate with a lower bound of all; None: nothing fits."""
        # Of each shape a lower bound of its objective, its number, and whether it was relaxed.
        heap = [
            (self._profile.step_ms(shape.micro_batch), number, False)
            for number, shape in enumerate(self._shapes)
        ]
        heapq.heapify(heap)
        settled_ms = math.inf  # the least bound of solved shapes
        while heap and not self._is_over(heap[0][0]):
            before_ms, number, is_relaxed = heapq.heappop(heap)
            lower_ms = max(before_ms, self._look_at(self._shapes[number], is_relaxed=is_relaxed))
            if is_relaxed:
                settled_ms = min(settled_ms, lower_ms)
            elif lower_ms < math.inf:
                heapq.heappush(heap, (lower_ms, number, True))
        if self._best is None:
            return None
        lowest_ms = min([settled_ms, *(open_ms for open_ms, _, _ in heap)])
        return replace(self._best, bound_ms=min(lowest_ms, self._best.step_ms))

    def _is_over(self, lower_ms: float) -> bool:
        """True if no shape of this bound or a higher one can improve the result enough."""
        if self._best is None:
            return lower_ms > self._problem.most_ms
        return self._best_ms <= (1 + self._problem.relative_gap) * lower_ms or self._problem.stop()

    def _look_at(self, shape: Shape, *, is_relaxed: bool) -> float:
        """Solve a shape's linear or whole program; return its bound (infinite: nothing fits)."""
        base = base_bytes(
            self._profile, shape.micro_batch, release_gradients=shape.release_gradients
        )
        if base.max() > self._problem.limit_bytes:
            return math.inf
        if self._last is None or self._last[0] != shape:
            self._last = (shape, *self._program(shape))
        _, table, program = self._last
        gap = self._problem.relative_gap / (1 + self._problem.relative_gap)  # of the objective
        found = program.least_objective(gap) if is_relaxed else program.relaxed()
        if found is None:
            return math.inf
        if found.objective < min(self._best_ms, self._problem.most_ms):
            self._best, self._best_ms = Candidate(table, found.selection), found.objective
        return found.bound

    def _program(self, shape: Shape) -> tuple[Table, Program]:
        table = shape.table(self._profile, self._allowed)
        added_ms = table.micro_batches * table.cost_ms
        cost = added_ms + noise_price_ms(self._profile) * table.noise
        fixed_ms = self._profile.step_ms(shape.micro_batch)
        return table, Program(
            table, self._problem.tolerance, self._problem.limit_bytes, cost, fixed_ms
        )
