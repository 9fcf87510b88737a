"""A good selection at once, and how far from the best one it can be at most.

Choices are tightened by cost per byte freed at the moment that is worst, then
loosened again where room is left. The bound is the Lagrangian dual of the same
program: with a price on every byte above the limit each family can be decided
for itself (Everett, "Generalized Lagrange multiplier method", 1963); prices
are found by subgradient steps (Polyak, 1969). Codes that others are
computed from are taken to be there in the bound, which can only lower it.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from daf.planning.mip import Solution, worst_moments
from daf.planning.table import Floats, Table

_MOST_ROUNDS = 120
_MOST_LOOSENINGS = 400
_DUAL_STEPS = 40
_MOST_ROWS = 24
_NOISE_PRICES = (1.0, 10.0, 100.0, 1000.0, 10000.0)


def solve_greedily(
    table: Table, limit_bytes: int, tolerance: float, noise_price_ms: float
) -> Solution | None:
    """A selection within the limit and the tolerance, with its bound; None where none was found."""
    objective = table.cost_ms + noise_price_ms * table.noise
    rows: dict[int, Floats] = {}
    for factor in _NOISE_PRICES:
        search = _Search(table, limit_bytes, table.cost_ms + factor * noise_price_ms * table.noise)
        found = search.run()
        rows.update(search.rows)
        if found is None:
            return None
        if table.noise[found].sum() <= tolerance:
            total = float(objective[found].sum())
            bound = _bound(table, objective, rows, limit_bytes, tolerance, total)
            return Solution(tuple(sorted(found)), total, min(total, bound))
    return None


def lawful(table: Table, selection: list[int]) -> list[int]:
    """The selection with codes of their own, or kept, where what is to tell them is not there."""
    chosen = set(selection)
    while True:
        unmet = {
            dependent
            for dependent, alternatives in table.requires
            if dependent in chosen and chosen.isdisjoint(alternatives)
        }
        if not unmet:
            return sorted(chosen)
        chosen = {_own(table, column) if column in unmet else column for column in chosen}


def _own(table: Table, column: int) -> int:
    """Execution always has the tensor's own code as a way out, or the tensor."""
    if column >= table.first[-1]:
        return column + 1  # the same one, that holds them itself
    family = int(table.family_of[column])
    found = table.column_of(family, table.option(column).level, follow=False)
    assert found is not None
    return found if found != column else int(table.first[family])


class _Search:
    """From everything kept to a selection within the limit."""

    def __init__(self, table: Table, limit_bytes: int, objective: Floats) -> None:
        self._table = table
        self._limit = limit_bytes
        self._objective = objective
        self._holder = [int(first) for first in table.first[:-1]]  # which column serves a family
        self.rows: dict[int, Floats] = {}
        self._needs: dict[int, list[tuple[int, ...]]] = defaultdict(list)
        for dependent, alternatives in table.requires:
            self._needs[dependent].append(alternatives)

    def run(self) -> list[int] | None:
        for _ in range(_MOST_ROUNDS):
            usage = self._usage()
            worst = worst_moments(usage, self._limit, 1)
            if not worst:
                self._loosen(usage)
                return sorted(set(self._holder))
            if not self._tighten(worst[0], float(usage[worst[0]]) - self._limit):
                return None
        return None

    def _usage(self) -> Floats:
        return self._table.usage(self._table.amounts(sorted(set(self._holder))))

    def _row(self, moment: int) -> Floats:
        if moment not in self.rows:
            self.rows[moment] = self._table.row(moment)
        return self.rows[moment]

    def _tighten(self, moment: int, excess: float) -> bool:
        """Take the cheapest bytes away at a moment until it is within the limit; False: no way."""
        row = self._row(moment)
        moves = self._option_moves(row) + self._replay_moves(row)
        moves.sort()
        moved: set[int] = set()
        for _, freed, column in moves:
            families = self._families(column)
            if excess <= 0:
                break
            if moved.isdisjoint(families) and self._is_possible(column):
                self._take(column)
                moved |= families
                excess -= freed
        if moved:
            self._holder = self._lawful_holder()
        return bool(moved)

    def _option_moves(self, row: Floats) -> list[tuple[float, float, int]]:
        """Per family the column that frees bytes at the least cost for each."""
        table = self._table
        count = int(table.first[-1])
        holder = np.array(self._holder)
        free = holder < count  # not inside a replayed module
        now_bytes = np.where(free, row[holder], 0.0)[table.family_of]
        now_cost = np.where(free, self._objective[holder], 0.0)[table.family_of]
        freed = now_bytes - row[:count]
        useful = (freed > 0) & free[table.family_of]
        price = np.where(
            useful, (self._objective[:count] - now_cost) / np.where(useful, freed, 1.0), np.inf
        )
        columns = np.flatnonzero(useful)
        return [(float(price[c]), float(freed[c]), int(c)) for c in columns]

    def _replay_moves(self, row: Floats) -> list[tuple[float, float, int]]:
        found = []
        for place, replay in enumerate(self._table.replays):
            column = self._table.replay_column(place)
            now = {self._holder[family] for family in replay.families}
            inner = [c for c in now if c >= self._table.first[-1]]
            if column in now or any(not self._families(c) <= replay.families for c in inner):
                continue
            freed = sum(float(row[c]) for c in now) - float(row[column])
            cost = float(self._objective[column]) - sum(float(self._objective[c]) for c in now)
            if freed > 0:
                found.append((cost / freed, freed, column))
        return found

    def _families(self, column: int) -> frozenset[int]:
        table = self._table
        if column >= table.first[-1]:
            return table.replays[column - int(table.first[-1])].families
        return frozenset([int(table.family_of[column])])

    def _is_possible(self, column: int) -> bool:
        chosen = set(self._holder)
        return all(not chosen.isdisjoint(each) for each in self._needs.get(column, ()))

    def _take(self, column: int) -> None:
        for family in self._families(column):
            self._holder[family] = column

    def _lawful_holder(self) -> list[int]:
        repaired = lawful(self._table, sorted(set(self._holder)))
        holder = list(self._holder)
        for column in repaired:
            for family in self._families(column):
                holder[family] = column
        return holder

    def _loosen(self, usage: Floats) -> None:
        """Go back to cheaper choices where the room for them is there, largest gain first."""
        table, tries = self._table, 0
        count = int(table.first[-1])
        holder = np.array(self._holder)
        gain = np.where(holder < count, self._objective[holder], 0.0)[table.family_of]
        gain = gain - self._objective[:count]
        for column in np.argsort(-gain, kind="stable"):
            if gain[column] <= 0 or tries == _MOST_LOOSENINGS:
                return
            family = int(table.family_of[column])
            current = self._holder[family]
            if current >= count or self._objective[column] >= self._objective[current]:
                continue
            tries += 1
            changed = usage + self._change(current, int(column))
            if changed.max() <= self._limit and self._may_replace(current, int(column)):
                self._holder[family] = int(column)
                usage = changed

    def _change(self, old: int, new: int) -> Floats:
        change = np.zeros(self._table.moments + 1)
        for column, sign in ((old, -1.0), (new, 1.0)):
            for span in self._table.option(column).spans:
                change[span.first] += sign * span.nbytes
                change[span.last + 1] -= sign * span.nbytes
        moments: Floats = np.cumsum(change[:-1])
        return moments

    def _may_replace(self, old: int, new: int) -> bool:
        """Has ``new`` what it needs, and does nothing need ``old``?"""
        chosen = (set(self._holder) - {old}) | {new}
        needed = (self._needs[column] for column in chosen if column in self._needs)
        return all(not chosen.isdisjoint(each) for needs in needed for each in needs)


def _bound(
    table: Table,
    objective: Floats,
    rows: dict[int, Floats],
    limit_bytes: int,
    tolerance: float,
    reached: float,
) -> float:
    """The best Lagrangian bound of a few dozen subgradient steps."""
    moments = sorted(rows, key=lambda m: -float(table.base_bytes[m]))[:_MOST_ROWS]
    weights = [rows[moment] * 1e-6 for moment in moments]
    limits = [(limit_bytes - float(table.base_bytes[moment])) * 1e-6 for moment in moments]
    if np.isfinite(tolerance):
        weights.append(table.noise)
        limits.append(tolerance)
    matrix = np.array(weights).reshape(len(weights), table.columns)
    limit = np.array(limits)
    prices = np.zeros(len(limits))
    best, scale = -np.inf, 1.0
    for _ in range(_DUAL_STEPS):
        reduced = objective + prices @ matrix
        value, chosen = _independent_minimum(table, reduced)
        value -= float(prices @ limit)
        scale = scale if value > best else 0.8 * scale
        best = max(best, value)
        slope = matrix[:, chosen].sum(axis=1) - limit
        length = float(slope @ slope)
        if length == 0.0 or reached <= best:
            break
        prices = np.maximum(0.0, prices + scale * (reached - value) / length * slope)
    return best


def _independent_minimum(table: Table, cost: Floats) -> tuple[float, list[int]]:
    """Every family's and replay's cheapest column, each decided for itself.

    Replays are nested in one another or apart, as modules are; from the inside
    out each takes the place of what is inside it where it is cheaper.
    """
    count = int(table.first[-1])
    if count == 0:
        return 0.0, []
    least = np.minimum.reduceat(cost[:count], table.first[:-1])
    order = np.lexsort((cost[:count], table.family_of))
    holder = [int(c) for c in order[table.first[:-1]]]
    value = [float(each) for each in least]
    for place in sorted(range(len(table.replays)), key=lambda p: len(table.replays[p].families)):
        column = table.replay_column(place)
        inside = sorted(table.replays[place].families)
        if float(cost[column]) < sum(value[family] for family in inside):
            for family in inside:
                value[family], holder[family] = 0.0, column
            value[inside[0]] = float(cost[column])
    return sum(value), sorted(set(holder))
