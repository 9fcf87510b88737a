"""The best selection of a table, exactly: a mixed-integer program for HiGHS.

Only moments at which the peak can lie become rows. They are found by asking:
solve, look at which moments the answer is above the limit, add those, solve
again; first with fractions allowed, which is fast and gives a lower bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from daf.planning.highs import Answer, LinearProgram, Rows, Status
from daf.planning.table import Floats, Table

_SCALE = 1e-6  # bytes to MB, so that rows and costs are of one size
_ROWS_A_ROUND = 6
_MOST_ROUNDS = 40
# Equal blocks make equal answers, among which branching never ends. Nodes and not seconds,
# so that the same profile gives the same plan.
_MOST_NODES = 100
RELATIVE_GAP = 1e-3  # of what the choices add to a step, which is a part of it
_HOPELESS = 1e3
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


class Program:
    """One table's program; rows that were once needed stay for the next question."""

    def __init__(self, table: Table, tolerance: float, noise_price_ms: float) -> None:
        self._table = table
        self._tolerance = tolerance
        self.objective = table.cost_ms + noise_price_ms * table.noise
        self._moments: list[int] = []

    def least_objective(
        self,
        limit_bytes: int,
        relative_gap: float = RELATIVE_GAP,
        *,
        worthless_ms: float = np.inf,
    ) -> Solution | None:
        """The selection of least objective whose peak is within the limit.

        None: there is none. An objective of infinity: none was found among as many nodes as
        are searched, or none has an objective below ``worthless_ms``.
        """
        if not len(self._table.options):
            return self._nothing_to_choose(limit_bytes)
        question = self._ask(limit_bytes)
        relaxed = self._rounds(question, whole=False, relative_gap=relative_gap)
        if relaxed is None:
            return None
        if relaxed.bound >= worthless_ms:
            return replace(NOT_FOUND, bound=relaxed.bound)
        return self._rounds(question, whole=True, relative_gap=relative_gap)

    def relaxed(self, limit_bytes: int) -> Solution | None:
        """``least_objective``'s bound alone, from shares of choices; None: there is no selection.

        The objective is infinity, because shares are no selection.
        """
        if not len(self._table.options):
            return self._nothing_to_choose(limit_bytes)
        found = self._rounds(self._ask(limit_bytes), whole=False, relative_gap=0.0)
        return found and replace(NOT_FOUND, bound=found.bound)

    def _nothing_to_choose(self, limit_bytes: int) -> Solution | None:
        fits = self._table.base_bytes.max() <= limit_bytes
        return Solution((), 0.0, 0.0) if fits else None

    def least_peak(self) -> tuple[int, ...] | None:
        """The selection with the lowest peak; None where no selection is within the tolerance.

        Exact for small tables; for large ones within ``RELATIVE_GAP`` of the lowest, or the
        best that was found in ``_MOST_NODES`` nodes for each set of rows.
        """
        table = self._table
        if not len(table.options):
            return ()
        if not self._moments:
            self._moments.append(int(table.base_bytes.argmax()))
        question = self._ask(None)
        best: tuple[float, tuple[int, ...]] | None = None
        for whole in (False, True):
            for _ in range(_MOST_ROUNDS):
                answer = question.solve(self._relative_gap, self._node_limit, whole=whole)
                if answer.amounts is None:
                    return best[1] if best else None
                reached = answer.bound / _SCALE
                usage = table.usage(answer.amounts)
                rounded = self._rounded(answer.amounts)
                peak = float(table.usage(table.amounts(list(rounded))).max())
                if self._is_allowed(rounded) and (best is None or peak < best[0]):
                    best = (peak, rounded)
                if best is not None and best[0] <= reached * (1 + self._relative_gap) + 1.0:
                    return best[1]
                worst = worst_moments(usage, reached + 1.0, _ROWS_A_ROUND)
                if not self._add_moments(question, worst):
                    break
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

    def _ask(self, limit_bytes: int | None) -> _Question:
        question = _Question(self._table, self.objective, limit_bytes, self._structure())
        question.add_moments(self._moments)
        return question

    def _rounds(self, question: _Question, *, whole: bool, relative_gap: float) -> Solution | None:
        table = self._table
        for _ in range(_MOST_ROUNDS):
            answer = question.solve(relative_gap, self._node_limit, whole=whole)
            amounts = answer.amounts
            if amounts is None:
                return None if answer.status is Status.INFEASIBLE else NOT_FOUND
            usage = table.usage(amounts)
            slack = 0.0 if whole else 1.0
            worst = worst_moments(usage, question.limit_bytes + slack, _ROWS_A_ROUND)
            if not worst:
                selection = tuple(int(c) for c in np.flatnonzero(amounts > 0.5))
                return Solution(selection, float(self.objective @ amounts), answer.bound)
            if not self._add_moments(question, worst):
                # Within the solver's own tolerance of the limit: ask for a little less.
                question.lower_limit(int(np.ceil((usage - question.limit_bytes).max())))
        return NOT_FOUND

    def _add_moments(self, question: _Question, moments: list[int]) -> bool:
        """Make rows of those that are none yet; False: all are."""
        fresh = [moment for moment in moments if moment not in self._moments]
        question.add_moments(fresh)
        self._moments += fresh
        return bool(fresh)

    # --- constraints ------------------------------------------------------------------------

    def _structure(self) -> Iterator[Rows]:
        """One choice for every family, codes that others are computed from, and the tolerance."""
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
            yield self._quiet_enough()

    def _quiet_enough(self) -> Rows:
        """Noise as a share of the tolerance, so that its size is no matter; one of hopeless noise
        is as impossible with ``_HOPELESS`` shares.
        """
        unit = self._tolerance or 1.0
        shares = np.minimum(self._table.noise[None, :] / unit, _HOPELESS)
        return Rows.of_dense(shares, lower=-np.inf, upper=self._tolerance / unit)

    def _requirements(self) -> Rows:
        table = self._table
        rows, columns, values = [], [], []
        for place, (dependent, alternatives) in enumerate(table.requires):
            rows += [place] * (1 + len(alternatives))
            columns += [dependent, *alternatives]
            values += [1.0] + [-1.0] * len(alternatives)
        return Rows(rows, columns, values, lower=-np.inf, upper=0, count=len(table.requires))


class _Question:
    """A table's program with a row for every moment that matters: the bytes held then are at
    most a limit or, if there is none, at most one more column, the peak, which is minimised.
    """

    def __init__(
        self, table: Table, objective: Floats, limit_bytes: int | None, structure: Iterable[Rows]
    ) -> None:
        self._table = table
        self._has_limit = limit_bytes is not None
        self.limit_bytes = limit_bytes or 0
        cost, upper = objective, np.ones(table.columns)
        if not self._has_limit:
            cost, upper = np.append(np.zeros_like(cost), 1.0), np.append(upper, np.inf)
        self._program = LinearProgram(cost, upper)
        for rows in structure:
            self._program.add_rows(rows)
        self._rows: dict[int, int] = {}  # by moment

    def add_moments(self, moments: list[int]) -> None:
        if not moments:
            return
        matrix = np.stack([self._table.row(moment) for moment in moments]) * _SCALE
        if not self._has_limit:
            matrix = np.column_stack([matrix, np.full(len(moments), -1.0)])
        upper = [self._room(moment) for moment in moments]
        first = self._program.add_rows(Rows.of_dense(matrix, lower=-np.inf, upper=upper))
        self._rows |= {moment: first + place for place, moment in enumerate(moments)}

    def lower_limit(self, by_bytes: int) -> None:
        self.limit_bytes -= by_bytes
        for moment, row in self._rows.items():
            self._program.bound_row(row, self._room(moment))

    def _room(self, moment: int) -> float:
        return float(self.limit_bytes - self._table.base_bytes[moment]) * _SCALE

    def solve(self, relative_gap: float, most_nodes: int, *, whole: bool) -> Answer:
        """Amounts are (table.columns,), and whole to the last bit if ``whole``."""
        count = self._table.columns
        marked = np.arange(len(self._program)) < count if whole else None
        answer = self._program.solve(whole=marked, relative_gap=relative_gap, most_nodes=most_nodes)
        if answer.amounts is None:
            return answer
        amounts = answer.amounts[:count]
        return replace(answer, amounts=np.round(amounts) if whole else amounts)
