"""The planner's problem in columns: what each choice holds at which moment, costs and adds.

A column is one option of one family, or the replay of one module. A selection is one column per
family, none for families inside a replayed module. Rows are moments, never stored: a column is a
few spans of bytes, so one cumulative sum gives all rows.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from daf.core.policy import Site
from daf.core.profile import Profile
from daf.planning.option_costs import last_moments
from daf.planning.options import (
    EXACT,
    HELD,
    KEPT,
    RECOMPUTED,
    WIDTHS,
    Allowed,
    Family,
    Option,
    OptionMaker,
    families,
)
from daf.planning.replays import Replay, replays_of

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]
Selection = tuple[int, ...]  # columns in ascending order
Requirement = tuple[int, tuple[int, ...]]  # a column, and those of which it needs one beside it


@dataclass(frozen=True)
class Table:
    """All choices at one micro-batch size of ``profile``; columns of replays come last."""

    profile: Profile
    micro_batch: int
    release_gradients: bool
    families: tuple[Family, ...]
    options: tuple[tuple[Option, ...], ...]
    replays: tuple[Replay, ...]
    base_bytes: Floats  # (moments,) of the process without saved tensors
    requires: tuple[Requirement, ...]

    @cached_property
    def first(self) -> Indices:
        """(families + 1,) the first column of every family, then of replays."""
        counts = [len(options) for options in self.options]
        return np.concatenate([[0], np.cumsum(counts)]).astype(np.intp)

    @property
    def columns(self) -> int:
        """Number of columns."""
        return int(self.first[-1]) + len(self.replays)

    @property
    def micro_batches(self) -> float:
        """Micro-batches per step; a shorter last one counts in proportion."""
        return self.profile.batch_size / self.micro_batch

    @cached_property
    def family_of(self) -> Indices:
        """The family of every option's column."""
        return np.repeat(np.arange(len(self.options)), np.diff(self.first))

    @cached_property
    def cost_ms(self) -> Floats:
        """(columns,) milliseconds that each column adds to a micro-batch."""
        return np.array([each.cost_ms for each in self._every], dtype=np.float64)

    @cached_property
    def noise(self) -> Floats:
        """(columns,) variance that each column adds to the gradient, relative to the batch's."""
        own = [option.noise for options in self.options for option in options]
        return np.array(own + [0.0] * len(self.replays), dtype=np.float64)

    @property
    def _every(self) -> list[Option | Replay]:
        return [*(option for options in self.options for option in options), *self.replays]

    @cached_property
    def spans(self) -> tuple[Indices, Indices, Indices, Floats]:
        """(column, first moment, moment after the last, bytes) of every span."""
        rows = [(c, s.first, s.last + 1) for c, each in enumerate(self._every) for s in each.spans]
        nbytes = [span.nbytes for each in self._every for span in each.spans]
        column, first, after = np.array(rows, dtype=np.intp).reshape(-1, 3).T
        return column, first, after, np.array(nbytes, dtype=np.float64)

    def usage(self, amounts: Floats) -> Floats:
        """Return (moments,) bytes of the process with column ``c`` taken ``amounts[c]`` times."""
        column, first, after, nbytes = self.spans
        change = np.zeros(len(self.base_bytes) + 1)
        taken = nbytes * amounts[column]
        np.add.at(change, first, taken)
        np.subtract.at(change, after, taken)
        total: Floats = self.base_bytes + np.cumsum(change[:-1])
        return total

    def row(self, moment: int) -> Floats:
        """Return (columns,) bytes that each column holds at a moment."""
        column, first, after, nbytes = self.spans
        inside = (first <= moment) & (moment < after)
        held: Floats = np.bincount(column[inside], nbytes[inside], self.columns).astype(np.float64)
        return held

    def column_of(self, family: int, level: str, *, follow: bool = True) -> int | None:
        """Return the column of a family's level; the one that needs other codes if ``follow``."""
        places = [at for at, each in enumerate(self.options[family]) if each.level == level]
        if not places:
            return None
        return int(self.first[family]) + (places[0] if follow else places[-1])

    def replay_column(self, replay: int) -> int:
        """Return the column of a replay."""
        return int(self.first[-1]) + replay

    def option(self, column: int) -> Option:
        """Return the option of a family's column."""
        family = int(self.family_of[column])
        return self.options[family][column - int(self.first[family])]

    def usage_of(self, selection: Sequence[int]) -> Floats:
        """Return (moments,) bytes of the process under a selection."""
        chosen = np.zeros(self.columns)
        chosen[list(selection)] = 1.0
        return self.usage(chosen)

    @cached_property
    def needs(self) -> Mapping[int, tuple[tuple[int, ...], ...]]:
        """Per column, sets of alternatives; the column needs one of each set beside it."""
        found: dict[int, list[tuple[int, ...]]] = defaultdict(list)
        for dependent, alternatives in self.requires:
            found[dependent].append(alternatives)
        return {column: tuple(each) for column, each in found.items()}

    def leaves_of(self, column: int) -> list[int]:
        """Return the columns that hold what a column's recipes start from and no site keeps."""
        if column >= self.first[-1] or not self.option(column).leaves:
            return []
        needed = (each[0] for each in self.needs[column] if len(each) == 1)
        return [each for each in needed if self.option(each).level == HELD]

    def is_again(self, column: int) -> bool:
        """True if a column's tensors are computed again: a replay, or recipes."""
        return column >= self.first[-1] or self.option(column).level == RECOMPUTED

    def families_of(self, column: int) -> frozenset[int]:
        """Return the families that a column decides: one, or all inside a replayed module."""
        if column >= self.first[-1]:
            return self.replays[column - int(self.first[-1])].families
        return frozenset([int(self.family_of[column])])

    def peak_bytes(self, selection: Sequence[int]) -> int:
        """Return the peak over the timeline under a selection, rounded up."""
        return int(np.ceil(self.usage_of(selection).max()))

    def cost_of(self, selection: Sequence[int]) -> float:
        """Return the milliseconds that a selection adds to a micro-batch."""
        return float(self.cost_ms[list(selection)].sum())

    def noise_of(self, selection: Sequence[int]) -> float:
        """Return the variance that a selection adds to the gradient, relative to the batch's."""
        return float(self.noise[list(selection)].sum())

    def replays_in(self, selection: Sequence[int]) -> list[Replay]:
        """Return the replays that a selection holds."""
        first = int(self.first[-1])
        return [self.replays[column - first] for column in selection if column >= first]


def make_table(
    profile: Profile, micro_batch: int, allowed: Allowed, *, release_gradients: bool = False
) -> Table:
    """Return the choices of steps in micro-batches of ``micro_batch``."""
    groups = families(profile.savings)
    maker = OptionMaker(profile, micro_batch, allowed)
    options = tuple(tuple(maker.options(group)) for group in groups)
    can_replay = allowed.replay and not profile.is_fused
    replays = replays_of(profile, groups, micro_batch) if can_replay else ()
    base = base_bytes(profile, micro_batch, release_gradients=release_gradients)
    if maker.sends_codes:
        base = base + allowed.passing_bytes
    leaves = maker.leaves()
    requires = _holding(options, list(leaves))
    groups += ((),) * len(leaves)
    options += tuple((_NOTHING, held) for held in leaves.values())
    requires += _requirements(groups, options) + _keeping(groups, options, replays)
    return Table(profile, micro_batch, release_gradients, groups, options, replays, base, requires)


def base_bytes(profile: Profile, micro_batch: int, *, release_gradients: bool) -> Floats:
    """Return (moments,) bytes of the process without saved tensors; the last is the update's."""
    transient = [max(0.0, each.at(micro_batch)) for each in profile.timeline.transient]
    fixed = profile.resident_bytes + profile.optimizer_bytes
    gradients = gradients_by_moment(profile, micro_batch, release_gradients)
    return fixed + gradients + np.array([*transient, profile.update_bytes], dtype=np.float64)


def gradients_by_moment(profile: Profile, micro_batch: int, release_gradients: bool) -> Floats:
    """Return (moments,) bytes of gradients; the last is the update's.

    With several micro-batches all gradients exist from the second on. Released gradients count as
    the largest throughout backward, because a step that has changed parameters cannot be retried.
    """
    existing = [*profile.timeline.gradient_bytes, profile.gradient_bytes]
    gradients = np.array(existing, dtype=np.float64)
    if release_gradients:
        gradients[:] = 0.0
        gradients[profile.timeline.forward : -1] = largest_gradient_bytes(profile)
    elif micro_batch < profile.batch_size:
        gradients[:] = profile.gradient_bytes
    return gradients


def largest_gradient_bytes(profile: Profile) -> int:
    """Return the largest growth of gradients between moments, the update included."""
    sizes = (0, *profile.timeline.gradient_bytes, profile.gradient_bytes)
    return max(after - before for before, after in pairwise(sizes))


Flat = Iterator[tuple[int, Family, Option]]


def _columns_of(groups: Sequence[Family], options: Sequence[tuple[Option, ...]]) -> Flat:
    every = ((group, option) for group, own in zip(groups, options, strict=True) for option in own)
    return ((column, group, option) for column, (group, option) in enumerate(every))


def _requirements(
    groups: Sequence[Family], options: Sequence[tuple[Option, ...]]
) -> tuple[Requirement, ...]:
    coding: dict[Site, list[int]] = defaultdict(list)
    keeping: dict[Site, list[int]] = defaultdict(list)
    for column, group, option in _columns_of(groups, options):
        for site in option.coded_sites:
            coding[site].append(column)
        for site in {saving.site for saving in group} - option.treatments.keys():
            keeping[site].append(column)
    found = []
    for column, _, option in _columns_of(groups, options):
        for wanted, there in ((option.requires, coding), (option.requires_kept, keeping)):
            known = wanted & keeping.keys()  # one option of every family keeps all of it
            found += [(column, tuple(there[site])) for site in sorted(known, key=str)]
    return tuple(found)


def _keeping(
    groups: Sequence[Family], options: Sequence[tuple[Option, ...]], replays: Sequence[Replay]
) -> tuple[Requirement, ...]:
    keeping: dict[int, list[tuple[int, int]]] = defaultdict(list)  # (column, last moment)
    for column, group, option in _columns_of(groups, options):
        kept = (each for each in group if each.site not in option.treatments)
        for storage, last in last_moments(kept).items():
            keeping[storage].append((column, last))
    first = sum(map(len, options))
    return tuple(
        (first + place, tuple(there for there, until in keeping[storage] if until >= last))
        for place, replay in enumerate(replays)
        for storage, last in replay.shared
    )


_NOTHING = Option(KEPT, {}, (), 0.0, 0.0)


def _holding(
    options: Sequence[tuple[Option, ...]], leaves: Sequence[int]
) -> tuple[Requirement, ...]:
    first = sum(map(len, options))
    column_of = {number: first + 2 * place + 1 for place, number in enumerate(leaves)}
    every = enumerate(option for own in options for option in own)
    return tuple(
        (column, (column_of[number],)) for column, option in every for number in option.leaves
    )


def kept_selection(table: Table) -> Selection:
    """Return every family kept, as plain PyTorch does."""
    return tuple(int(first) for first in table.first[:-1])


def level_selection(table: Table, level: str) -> Selection:
    """Return every family at one level, or the nearest wider one that it has."""
    order = (KEPT, EXACT, *map(str, WIDTHS))
    wider = [*reversed(order[: order.index(level) + 1])]
    return tuple(
        next(column for each in wider if (column := table.column_of(family, each)) is not None)
        for family in range(len(table.options))
    )


def unmet(table: Table, chosen: set[int]) -> set[int]:
    """Return the chosen columns that need a column which is not chosen."""
    return {
        column
        for column in chosen
        if any(chosen.isdisjoint(each) for each in table.needs.get(column, ()))
    }


def lawful(table: Table, selection: Sequence[int]) -> Selection:
    """Replace options whose requirements are not chosen by self-sufficient ones."""
    chosen = set(selection)
    while wrong := unmet(table, chosen):
        chosen = {_own(table, column) if column in wrong else column for column in chosen}
    return tuple(sorted(chosen))


def _own(table: Table, column: int) -> int:
    """Return the column with a code of its own, or the kept tensor; both are always possible."""
    if column >= table.first[-1]:
        return column + 1  # the same replay, holding its inputs itself
    family = int(table.family_of[column])
    found = table.column_of(family, table.option(column).level, follow=False)
    assert found is not None
    return found if found != column else int(table.first[family])


def worst_moments(usage: Floats, limit: Floats | float, count: int) -> list[int]:
    """Return moments above the limit that are local maxima, worst first."""
    over = usage - limit
    padded = np.concatenate([[-np.inf], over, [-np.inf]])
    local = (padded[1:-1] > padded[:-2]) & (padded[1:-1] >= padded[2:])  # the first of equals
    places = np.flatnonzero(local & (over > 0))
    return [int(place) for place in places[np.argsort(-over[places], kind="stable")][:count]]
