"""The best selection of one table, by a mixed-integer program in HiGHS.

Rows are only the moments at which an answer exceeds the limit, added round by round: first to the
linear program, which bounds every selection, then to the one with integers.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from daf.planning.highs import Answer, LinearProgram, Rows, Status
from daf.planning.table import Floats, Selection, Table, unmet, worst_moments

_SCALE = 1e-6  # bytes to MB, so that rows and costs have similar magnitudes
_ROWS_A_ROUND = 6
_MOST_ROUNDS = 40
# Equal blocks have equal answers, among which branching never ends. The limit counts nodes, not
# seconds, so that the same profile gives the same plan.
_MOST_NODES = 100
RELATIVE_GAP = 0.01  # of a whole step, whose time is predicted to 8 % at best
PEAK_GAP = 1e-3  # of a whole peak: least budgets are needed to the megabyte
_HOPELESS = 1e3
_SMALL_COLUMNS = 60  # least peaks of programs up to this size are exact


@dataclass(frozen=True, slots=True)
class Solution:
    """A selection, its objective, and a lower bound of every selection's objective."""

    selection: Selection
    objective: float
    bound: float


NOT_FOUND = Solution((), np.inf, 0.0)  # a selection may exist; objectives are never negative


class Program:
    """One table's program, with a row for every moment found to matter.

    ``tolerance``: the most noise. ``limit_bytes``: of the computed peak; None: minimise the peak.
    ``cost``: (columns,) of the objective; default: ``table.cost_ms``. ``fixed``: the objective of
    choosing nothing, which relative gaps count.
    """

    def __init__(
        self,
        table: Table,
        tolerance: float,
        limit_bytes: int | None = None,
        cost: Floats | None = None,
        fixed: float = 0.0,
    ) -> None:
        self._table, self._tolerance = table, tolerance
        self._has_limit = limit_bytes is not None
        self._limit_bytes = limit_bytes or 0
        self._cost = table.cost_ms if cost is None else cost
        self._fixed = fixed
        upper = np.ones(table.columns)
        if self._has_limit:
            self._program = LinearProgram(self._cost, upper, fixed)
        else:  # one more column: the peak
            self._program = LinearProgram(np.append(0.0 * upper, 1.0), np.append(upper, np.inf))
        for rows in self._structure():
            self._program.add_rows(rows)
        self._rows: dict[int, int] = {}  # by moment
        self._held_bytes = np.zeros(table.columns)  # summed over these moments
        self._shares = np.zeros(table.columns)  # the linear program's last answer

    def relaxed(self) -> Solution | None:
        """Return the linear bound and its best rounding (infinite: none); None: nothing fits."""
        found = self._rounds(whole=False, relative_gap=0.0)
        if found is None or found is NOT_FOUND:
            return found
        best = replace(NOT_FOUND, bound=found.bound)
        for selection in map(self._rounded, (self._shares, self._leanest())):
            objective = self._fixed + float(self._cost[list(selection)].sum())
            fits = self._table.peak_bytes(selection) <= self._limit_bytes
            if objective < best.objective and fits and self._is_allowed(selection):
                best = replace(best, selection=selection, objective=objective)
        return best

    def _leanest(self) -> Floats:
        has_share = self._shares > 1e-6
        scores: Floats = np.where(has_share, 1.0 / (1.0 + self._held_bytes), 0.0)
        first_replay = int(self._table.first[-1])
        scores[first_replay:] = has_share[first_replay:]
        return scores

    def least_objective(self, relative_gap: float = RELATIVE_GAP) -> Solution | None:
        """Return the selection of least objective; None: none fits, ``NOT_FOUND``: none found."""
        if self._rounds(whole=False, relative_gap=0.0) is None:
            return None
        return self._rounds(whole=True, relative_gap=relative_gap)

    def least_peak(self) -> Selection | None:
        """Return the selection with the lowest peak; None: none is within the tolerance.

        Exact for small tables; else within ``PEAK_GAP`` of the lowest, or the best of
        ``_MOST_NODES`` nodes for each set of rows.
        """
        table = self._table
        gap = PEAK_GAP if table.columns > _SMALL_COLUMNS else 0.0
        self._add_moments([int(table.base_bytes.argmax())])
        best: tuple[float, Selection] | None = None
        for whole in (False, True):
            for _ in range(_MOST_ROUNDS):
                answer = self._solve(gap, whole=whole)
                if answer.amounts is None:
                    return best and best[1]
                reached = answer.bound / _SCALE
                rounded = self._rounded(answer.amounts)
                peak = float(table.usage_of(rounded).max())
                if self._is_allowed(rounded) and (best is None or peak < best[0]):
                    best = (peak, rounded)
                if best is not None and best[0] <= reached * (1 + gap) + 1.0:
                    return best[1]
                worst = worst_moments(table.usage(answer.amounts), reached + 1.0, _ROWS_A_ROUND)
                if not self._add_moments(worst):
                    break
        return best and best[1]

    def _rounds(self, *, whole: bool, relative_gap: float) -> Solution | None:
        for _ in range(_MOST_ROUNDS):
            answer = self._solve(relative_gap, whole=whole)
            if (amounts := answer.amounts) is None:
                return None if answer.status is Status.INFEASIBLE else NOT_FOUND
            usage = self._table.usage(amounts)
            slack = 0.0 if whole else 1.0
            worst = worst_moments(usage, self._limit_bytes + slack, _ROWS_A_ROUND)
            if not worst:
                self._shares = amounts
                selection = tuple(int(c) for c in np.flatnonzero(amounts > 0.5))
                return Solution(selection, self._fixed + float(self._cost @ amounts), answer.bound)
            if not self._add_moments(worst):
                # Within the solver's tolerance of the limit: ask for a little less.
                self._limit_bytes -= int(np.ceil((usage - self._limit_bytes).max()))
                for moment, row in self._rows.items():
                    self._program.bound_row(row, self._room(moment))
        return NOT_FOUND

    def _solve(self, relative_gap: float, *, whole: bool) -> Answer:
        """Solve; amounts are (table.columns,), and exact integers if ``whole``."""
        count = self._table.columns
        is_small = not self._has_limit and count <= _SMALL_COLUMNS
        answer = self._program.solve(
            whole=np.arange(len(self._program)) < count if whole else None,
            relative_gap=relative_gap,
            most_nodes=100_000 if is_small else _MOST_NODES,
        )
        if answer.amounts is None:
            return answer
        amounts = answer.amounts[:count]
        return replace(answer, amounts=np.round(amounts) if whole else amounts)

    def _rounded(self, scores: Floats) -> Selection:
        table = self._table
        chosen: list[int] = []
        taken: set[int] = set()
        for place in sorted(
            range(len(table.replays)), key=lambda p: -len(table.replays[p].families)
        ):
            inside = table.replays[place].families
            if scores[table.replay_column(place)] > 0.5 and taken.isdisjoint(inside):
                chosen.append(table.replay_column(place))
                taken |= inside
        for family in range(len(table.options)):
            if family not in taken:
                first, after = table.first[family], table.first[family + 1]
                chosen.append(int(first + scores[first:after].argmax()))
        return tuple(sorted(chosen))

    def _is_allowed(self, selection: Selection) -> bool:
        is_quiet = self._table.noise_of(selection) <= self._tolerance
        return is_quiet and not unmet(self._table, set(selection))

    def _structure(self) -> Iterator[Rows]:
        """Yield rows: one choice per family, required codes, and the tolerance."""
        table = self._table
        family = [int(each) for each in table.family_of]
        column = list(range(len(family)))
        for place, replay in enumerate(table.replays):
            family += sorted(replay.families)
            column += [table.replay_column(place)] * len(replay.families)
        yield Rows(family, column, 1.0, lower=1, upper=1, count=len(table.options))
        if table.requires:
            yield self._requirements()
        if np.isfinite(self._tolerance):
            # As shares of the tolerance; more than ``_HOPELESS`` of them is just as impossible.
            unit = self._tolerance or 1.0
            shares = np.minimum(table.noise[None, :] / unit, _HOPELESS)
            yield Rows.of_dense(shares, lower=-np.inf, upper=self._tolerance / unit)

    def _requirements(self) -> Rows:
        table = self._table
        rows, columns, values = [], [], []
        for place, (dependent, alternatives) in enumerate(table.requires):
            rows += [place] * (1 + len(alternatives))
            columns += [dependent, *alternatives]
            values += [1.0] + [-1.0] * len(alternatives)
        return Rows(rows, columns, values, lower=-np.inf, upper=0, count=len(table.requires))

    def _add_moments(self, moments: list[int]) -> bool:
        """Add rows for new moments; False if there are none."""
        fresh = [moment for moment in moments if moment not in self._rows]
        if fresh:
            matrix = np.stack([self._table.row(moment) for moment in fresh]) * _SCALE
            self._held_bytes += matrix.sum(axis=0)
            if not self._has_limit:
                matrix = np.column_stack([matrix, np.full(len(fresh), -1.0)])
            upper = [self._room(moment) for moment in fresh]
            first = self._program.add_rows(Rows.of_dense(matrix, lower=-np.inf, upper=upper))
            self._rows |= {moment: first + place for place, moment in enumerate(fresh)}
        return bool(fresh)

    def _room(self, moment: int) -> float:
        return float(self._limit_bytes - self._table.base_bytes[moment]) * _SCALE
