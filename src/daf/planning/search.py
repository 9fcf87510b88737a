"""The least objective over all sizes of piece and all selections.

Every size is first answered greedily, which also says what no answer at that
size can go below. Exact answers are asked for only where that is below the
best answer so far, the lowest first. Tables are made again for them: they are
the largest thing the planner holds, and few are needed twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from daf.core.profile import Profile
from daf.planning.candidate import Candidate, noise_price_ms, pieces_of
from daf.planning.greedy import solve_greedily
from daf.planning.mip import NOT_FOUND, Program, Solution
from daf.planning.options import Allowed
from daf.planning.table import Table, base_bytes, make_table


def piece_sizes(profile: Profile) -> list[int]:
    """Sizes of piece, the largest first: the largest for every number of pieces."""
    if profile.split_refusal:
        return [profile.batch_size]
    counts = range(1, profile.batch_size + 1)
    return sorted({-(-profile.batch_size // count) for count in counts}, reverse=True)


@dataclass(frozen=True, slots=True)
class Shape:
    """What a table is made for."""

    micro_batch: int
    release_gradients: bool


def shapes(profile: Profile, allowed: Allowed) -> Iterator[Shape]:
    """Sizes of piece, and whether gradients are released, which only a whole batch can."""
    for size in piece_sizes(profile):
        whole = size == profile.batch_size
        if not (whole and allowed.must_release):
            yield Shape(size, False)
        if whole and allowed.release_gradients:
            yield Shape(size, True)


# Times of pieces are predicted from those of others: BERT-small's in pieces of 8 were predicted 3 %
# shorter than in pieces of 32, and took a tenth longer. So much larger pieces may be faster, if
# their step is predicted no more than so much longer.
RIVAL_PIECES = 2
RIVAL_MS = 1.25


class Search:
    """One search for the fastest candidate within a limit (bytes, margin not included)."""

    def __init__(
        self,
        profile: Profile,
        limit_bytes: int,
        tolerance: float,
        allowed: Allowed,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._profile = profile
        self._stop = stop
        self._limit = limit_bytes
        self._tolerance = tolerance
        self._allowed = allowed.within(tolerance)
        self._best: Candidate | None = None
        self._rival: Candidate | None = None  # the best of those with much larger pieces
        self._lower_ms: dict[Shape, float] = {}  # no step of that shape is shorter
        self._settled: set[Shape] = set()

    def run(self, *, exactly: bool) -> Candidate | None:
        """The best that was found, with a bound that no candidate goes below; None: nothing fits.

        With ``exactly`` each size's best is proven by HiGHS where its bound leaves it open;
        else it is the greedy one. Between sizes ``stop`` is asked whether what is known is enough.
        """
        for shape in sorted(shapes(self._profile, self._allowed), key=self._base_ms):
            self._lower_ms[shape] = self._base_ms(shape)
            # Even keeping everything is no faster, here and at all sizes that follow.
            if self._lower_ms[shape] >= self._best_ms or (self._best and self._stop()):
                break
            self._sweep(shape, exactly=exactly)
        if exactly:
            self._settle()
        best = self._best
        if best is None:
            return None
        bound_ms = min(min(self._lower_ms.values()), best.step_ms(self._profile))
        rival = self._rival and replace(self._rival, bound_ms=bound_ms)
        return replace(best, bound_ms=bound_ms, rival=rival)

    @property
    def _best_ms(self) -> float:
        return math.inf if self._best is None else self._objective(self._best)

    def _base_ms(self, shape: Shape) -> float:
        return self._profile.step_ms(shape.micro_batch)

    def _sweep(self, shape: Shape, *, exactly: bool) -> None:
        base = base_bytes(
            self._profile, shape.micro_batch, release_gradients=shape.release_gradients
        )
        if base.max() > self._limit:
            self._lower_ms[shape] = math.inf
            return
        table = self._table(shape)
        price_ms = self._noise_price_ms(table)
        found = solve_greedily(table, self._limit, self._tolerance, price_ms)
        self._take(shape, table, found or NOT_FOUND)
        if found is None and exactly:  # seldom more than a bound of 0 is known then
            program = Program(table, self._tolerance, price_ms)
            self._take(shape, table, program.relaxed(self._limit))

    def _settle(self) -> None:
        """Exact answers where they can matter, the most promising first."""
        while open_shapes := self._lower_ms.keys() - self._settled:
            shape = min(open_shapes, key=lambda each: (self._lower_ms[each], each.micro_batch))
            if self._lower_ms[shape] >= self._best_ms or self._stop():
                return
            self._ask_exactly(shape, self._table(shape))

    def _ask_exactly(self, shape: Shape, table: Table) -> None:
        self._settled.add(shape)
        room_ms = (self._best_ms - self._base_ms(shape)) / pieces_of(self._profile, table)
        program = Program(table, self._tolerance, self._noise_price_ms(table))
        self._take(shape, table, program.least_objective(self._limit, worthless_ms=room_ms))

    def _take(self, shape: Shape, table: Table, found: Solution | None) -> None:
        """Learn from an answer; None: there is none at this shape."""
        if found is None:
            self._lower_ms[shape] = math.inf
            return
        lower_ms = self._base_ms(shape) + found.bound * pieces_of(self._profile, table)
        self._lower_ms[shape] = max(self._lower_ms[shape], lower_ms)
        if math.isinf(found.objective):
            return
        self._compare(Candidate(table, found.selection))

    def _compare(self, candidate: Candidate) -> None:
        known = [each for each in (self._best, self._rival, candidate) if each is not None]
        self._best = min(known, key=self._objective)
        least_pieces = RIVAL_PIECES * self._best.table.micro_batch
        most_ms = RIVAL_MS * self._best_ms
        rivals = [
            each
            for each in known
            if each.table.micro_batch >= least_pieces and self._objective(each) <= most_ms
        ]
        self._rival = min(rivals, key=self._objective, default=None)

    def _objective(self, candidate: Candidate) -> float:
        return candidate.objective(self._profile)

    def _table(self, shape: Shape) -> Table:
        best = self._best and self._best.table
        if best and (best.micro_batch, best.release_gradients) == (
            shape.micro_batch,
            shape.release_gradients,
        ):
            return best
        return make_table(
            self._profile,
            shape.micro_batch,
            self._allowed,
            release_gradients=shape.release_gradients,
        )

    def _noise_price_ms(self, table: Table) -> float:
        return noise_price_ms(self._profile) / pieces_of(self._profile, table)
