"""The best selection of a table, exactly: a mixed-integer program for HiGHS.

Only moments at which the peak can lie become rows. They are found by asking:
solve, look at which moments the answer is above the limit, add those, solve
again; first with fractions allowed, which is fast and gives a lower bound.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array, vstack

from daf.planning.table import Floats, Table

_SCALE = 1e-6  # bytes to MB, so that rows and costs are of one size
_ROWS_A_ROUND = 6
_MOST_ROUNDS = 40
# Equal blocks make equal answers, among which branching never ends. Nodes and not seconds,
# so that the same profile gives the same plan.
_MOST_NODES = 100
RELATIVE_GAP = 1e-3  # of what the choices add to a step, which is a part of it
_SMALL_COLUMNS = 60  # programs up to this are solved to the last byte


@dataclass(frozen=True, slots=True)
class Solution:
    """A selection, what it costs (objective), and a bound that no selection goes below."""

    selection: tuple[int, ...]
    objective: float
    bound: float

    @property
    def gap(self) -> float:
        """By how much the objective could at most be bettered."""
        return max(0.0, self.objective - self.bound)


def worst_moments(usage: Floats, limit: Floats | float, count: int) -> list[int]:
    """Moments above the limit that are the highest of their neighbours, the worst first."""
    over = usage - limit
    padded = np.concatenate([[-np.inf], over, [-np.inf]])
    # Of equal neighbours the first counts.
    local = (padded[1:-1] > padded[:-2]) & (padded[1:-1] >= padded[2:])
    places = np.flatnonzero(local & (over > 0))
    return [int(place) for place in places[np.argsort(-over[places], kind="stable")][:count]]


NOT_FOUND = Solution((), np.inf, 0.0)  # there may be one: what it costs is not below 0
_INFEASIBLE = 2  # of scipy.optimize.milp's status


class Program:
    """One table's program; rows that were once needed stay for the next question."""

    def __init__(self, table: Table, tolerance: float, noise_price_ms: float) -> None:
        self._table = table
        self._tolerance = tolerance
        self.objective = table.cost_ms + noise_price_ms * table.noise
        self._rows: dict[int, Floats] = {}
        self._structure = self._structural_constraints()

    def least_objective(
        self, limit_bytes: int, relative_gap: float = RELATIVE_GAP
    ) -> Solution | None:
        """The selection of least objective whose peak is within the limit.

        None: there is none. ``NOT_FOUND``: none was found among as many nodes as are searched.
        """
        if not len(self._table.options):
            peak = self._table.base_bytes.max()
            return Solution((), 0.0, 0.0) if peak <= limit_bytes else None
        relaxed = self._rounds(limit_bytes, whole=False, relative_gap=relative_gap)
        if relaxed is None:
            return None
        return self._rounds(limit_bytes, whole=True, relative_gap=relative_gap)

    def least_peak(self) -> tuple[int, ...] | None:
        """The selection with the lowest peak; None where no selection is within the tolerance.

        Exact for small tables; for large ones within ``RELATIVE_GAP`` of the lowest, or the
        best that was found in ``_MOST_NODES`` nodes for each set of rows.
        """
        table = self._table
        if not len(table.options):
            return ()
        best: tuple[float, tuple[int, ...]] | None = None
        for whole in (False, True):
            for _ in range(_MOST_ROUNDS):
                answer = self._minimise_peak(whole=whole)
                if answer is None:
                    return best[1] if best else None
                amounts, reached = answer
                usage = table.usage(amounts)
                rounded = self._rounded(amounts)
                peak = float(table.usage(table.amounts(list(rounded))).max())
                if self._is_allowed(rounded) and (best is None or peak < best[0]):
                    best = (peak, rounded)
                if best is not None and best[0] <= reached * (1 + self._relative_gap) + 1.0:
                    return best[1]
                worst = worst_moments(usage, reached + 1.0, _ROWS_A_ROUND)
                fresh = [moment for moment in worst if moment not in self._rows]
                if not fresh:
                    break
                self._add_rows(fresh)
        return best[1] if best else None

    @property
    def _relative_gap(self) -> float:
        return RELATIVE_GAP if self._table.columns > _SMALL_COLUMNS else 0.0

    @property
    def _node_limit(self) -> int:
        return _MOST_NODES if self._table.columns > _SMALL_COLUMNS else 100_000

    def _rounded(self, amounts: Floats) -> tuple[int, ...]:
        """The largest share of every family, unless a replay has the most of it."""
        table = self._table
        chosen: list[int] = []
        taken: set[int] = set()
        for place in sorted(
            range(len(table.replays)), key=lambda p: -len(table.replays[p].families)
        ):
            inside = table.replays[place].families
            if amounts[table.replay_column(place)] > 0.5 and taken.isdisjoint(inside):
                chosen.append(table.replay_column(place))
                taken |= inside
        for family in range(len(table.options)):
            if family not in taken:
                first, after = table.first[family], table.first[family + 1]
                chosen.append(int(first + amounts[first:after].argmax()))
        return tuple(sorted(chosen))

    def _is_allowed(self, selection: tuple[int, ...]) -> bool:
        chosen = set(selection)
        met = (
            not chosen.isdisjoint(alternatives)
            for dependent, alternatives in self._table.requires
            if dependent in chosen
        )
        return all(met) and bool(self._table.noise[list(selection)].sum() <= self._tolerance)

    # --- one question -----------------------------------------------------------------------

    def _rounds(self, limit_bytes: int, *, whole: bool, relative_gap: float) -> Solution | None:
        table = self._table
        for _ in range(_MOST_ROUNDS):
            found = milp(
                self.objective,
                integrality=np.ones(table.columns) if whole else None,
                bounds=Bounds(0, 1),
                constraints=[*self._structure, *self._peak_constraints(limit_bytes)],
                options={"mip_rel_gap": relative_gap, "node_limit": self._node_limit},
            )
            if found.x is None:
                return None if found.status == _INFEASIBLE else NOT_FOUND
            amounts = np.round(found.x) if whole else found.x
            usage = table.usage(amounts)
            slack = 0.0 if whole else 1.0
            worst = worst_moments(usage, limit_bytes + slack, _ROWS_A_ROUND)
            fresh = [moment for moment in worst if moment not in self._rows]
            if not worst:
                bound = found.fun if found.mip_dual_bound is None else found.mip_dual_bound
                selection = tuple(int(c) for c in np.flatnonzero(amounts > 0.5))
                return Solution(selection, float(self.objective @ amounts), float(bound))
            if not fresh:  # within the solver's own tolerance of the limit: ask for a little less
                limit_bytes -= int(np.ceil((usage - limit_bytes).max()))
            self._add_rows(fresh)
        return NOT_FOUND

    def _minimise_peak(self, *, whole: bool) -> tuple[Floats, float] | None:
        """Amounts with the lowest peak at the known rows, and a bound on that peak."""
        table = self._table
        count = table.columns
        if not self._rows:
            self._add_rows([int(table.base_bytes.argmax())])
        constraints = [
            LinearConstraint(_with_column(each.A, 0.0), each.lb, each.ub)
            for each in self._structure
        ]
        moments = list(self._rows)
        rows = csr_array(np.stack([self._rows[moment] for moment in moments]) * _SCALE)
        upper = -table.base_bytes[moments] * _SCALE
        constraints.append(LinearConstraint(_with_column(rows, -1.0), -np.inf, upper))
        found = milp(
            np.append(np.zeros(count), 1.0),
            integrality=np.append(np.ones(count), 0) if whole else None,
            bounds=Bounds(np.zeros(count + 1), np.append(np.ones(count), np.inf)),
            constraints=constraints,
            options={"mip_rel_gap": self._relative_gap, "node_limit": self._node_limit},
        )
        if found.x is None:
            return None
        amounts = np.round(found.x[:count]) if whole else found.x[:count]
        bound = found.fun if found.mip_dual_bound is None else found.mip_dual_bound
        return amounts, float(bound) / _SCALE

    # --- constraints ------------------------------------------------------------------------

    def _add_rows(self, moments: list[int]) -> None:
        for moment in moments:
            self._rows[moment] = self._table.row(moment)

    def _peak_constraints(self, limit_bytes: int) -> list[LinearConstraint]:
        if not self._rows:
            return []
        moments = list(self._rows)
        rows = csr_array(np.stack([self._rows[moment] for moment in moments]) * _SCALE)
        upper = (limit_bytes - self._table.base_bytes[moments]) * _SCALE
        return [LinearConstraint(rows, -np.inf, upper)]

    def _structural_constraints(self) -> list[LinearConstraint]:
        """One choice for every family, codes that others are computed from, and the tolerance."""
        table = self._table
        if not len(table.options):
            return []
        family = [int(each) for each in table.family_of]
        column = list(range(len(family)))
        for place, replay in enumerate(table.replays):
            family += sorted(replay.families)
            column += [table.replay_column(place)] * len(replay.families)
        shape = (len(table.options), table.columns)
        once = csr_array((np.ones(len(family)), (family, column)), shape=shape)
        found = [LinearConstraint(once, 1, 1)]
        if table.requires:
            found.append(LinearConstraint(self._requirements(), -np.inf, 0))
        if np.isfinite(self._tolerance):
            noise = csr_array(table.noise[None, :])
            found.append(LinearConstraint(noise, -np.inf, self._tolerance))
        return found

    def _requirements(self) -> csr_array:
        table = self._table
        rows, columns, values = [], [], []
        for place, (dependent, alternatives) in enumerate(table.requires):
            rows += [place] * (1 + len(alternatives))
            columns += [dependent, *alternatives]
            values += [1.0] + [-1.0] * len(alternatives)
        return csr_array((values, (rows, columns)), shape=(len(table.requires), table.columns))


def _with_column(matrix: csr_array, value: float) -> csr_array:
    """One more column of equal values."""
    height = matrix.shape[0]
    extra = csr_array(np.full((1, height), value))
    return vstack([matrix.T, extra]).T.tocsr()
