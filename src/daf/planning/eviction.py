"""SAGE's eviction order (Gim and Ko, MobiSys 2022): least time per byte freed first."""

from __future__ import annotations

import numpy as np

from daf.planning.table import (
    Floats,
    Indices,
    Selection,
    Table,
    kept_selection,
    lawful,
    unmet,
    worst_moments,
)

_MOST_ROUNDS = 120
_MOST_LOOSENINGS = 400


def evicted(table: Table, limit_bytes: int) -> Selection | None:
    """Return a selection within the limit, starting from everything kept; None: not found."""
    holder = np.array(kept_selection(table), dtype=np.intp)  # (families,) the column of each
    for _ in range(_MOST_ROUNDS):
        usage = table.usage_of(_selection(holder))
        worst = worst_moments(usage, limit_bytes, 1)
        if not worst:
            _loosen(table, holder, limit_bytes)
            return _selection(holder)
        if not _tighten(table, holder, table.row(worst[0]), float(usage[worst[0]]) - limit_bytes):
            return None
    return None


def _selection(holder: Indices) -> Selection:
    return tuple(sorted({int(column) for column in holder}))


def _tighten(table: Table, holder: Indices, row: Floats, excess: float) -> bool:
    """Evict bytes of one moment (``row``) until the excess is gone; False if nothing frees any."""
    moved: set[int] = set()
    for _, freed, column in sorted(_evictions(table, holder, row)):
        if excess <= 0:
            break
        families = table.families_of(column)
        needs = column in table.needs
        possible = not (needs and column in unmet(table, {*_selection(holder), column}))
        if possible and moved.isdisjoint(families):
            holder[list(families)] = column
            moved |= families
            excess -= freed
    for column in lawful(table, _selection(holder)):
        holder[list(table.families_of(column))] = column
    return bool(moved)


def _evictions(table: Table, holder: Indices, row: Floats) -> list[tuple[float, float, int]]:
    """Return (milliseconds per byte, bytes freed, column) of every change that frees bytes."""
    found = []
    for column in range(table.columns):
        families = table.families_of(column)
        now = {int(holder[family]) for family in families}
        freed = sum(float(row[each]) for each in now) - float(row[column])
        if freed > 0 and all(table.families_of(each) <= families for each in now):
            cost = float(table.cost_ms[column]) - sum(float(table.cost_ms[each]) for each in now)
            found.append((cost / freed, freed, column))
    return found


def _loosen(table: Table, holder: Indices, limit_bytes: int) -> None:
    count = int(table.first[-1])
    now = holder[table.family_of]
    gain = np.where(now < count, table.cost_ms[now] - table.cost_ms[:count], 0.0)
    order = np.argsort(-gain, kind="stable")
    for column in order[gain[order] > 0][:_MOST_LOOSENINGS]:
        family, before = table.family_of[column], holder[table.family_of[column]]
        if table.cost_ms[column] < table.cost_ms[before]:
            holder[family] = column
            selection = _selection(holder)
            if table.peak_bytes(selection) > limit_bytes or unmet(table, set(selection)):
                holder[family] = before
