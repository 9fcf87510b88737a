"""The planner's problem in columns: what each choice holds at which moment, costs and adds.

A column is one option of one family, or the replay of one module. A selection
is one column per family, except that families inside a replayed module have
none. Rows are moments of the timeline; they are never written out whole, since
a column's bytes are a few spans: a selection's bytes at every moment are one
cumulative sum.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from daf.core.policy import Site
from daf.core.profile import CallProfile, Profile, Saving
from daf.planning.options import KEPT, Allowed, Option, OptionMaker, Span, families

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Replay:
    """Computing one module's calls again: what is inside, and what that holds and takes.

    ``shared``: memory of inputs that others must keep whole, since its bytes are not counted here,
    and the last moment of each; such a replay stands before the same one that holds them itself.
    """

    module: str
    families: frozenset[int]
    spans: tuple[Span, ...]
    cost_ms: float
    operators: int  # of the call with most of them
    shared: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Table:
    """Everything about one size of piece; see ``make_table``.

    ``options[f]`` are family ``f``'s columns ``first[f] … first[f + 1] - 1``; replays
    follow behind. ``base_bytes``: the process at each moment without any choice.
    ``requires`` holds (column, alternatives): it may be chosen only with one of those.
    """

    micro_batch: int
    release_gradients: bool
    options: tuple[tuple[Option, ...], ...]
    replays: tuple[Replay, ...]
    base_bytes: Floats
    requires: tuple[tuple[int, tuple[int, ...]], ...]

    @cached_property
    def first(self) -> Indices:
        """The first column of every family, and of replays."""
        counts = [len(options) for options in self.options]
        return np.concatenate([[0], np.cumsum(counts)]).astype(np.intp)

    @property
    def columns(self) -> int:
        """How many columns there are."""
        return int(self.first[-1]) + len(self.replays)

    @property
    def moments(self) -> int:
        """How many rows there are."""
        return len(self.base_bytes)

    @cached_property
    def family_of(self) -> Indices:
        """The family of every option's column."""
        return np.repeat(np.arange(len(self.options)), np.diff(self.first))

    @cached_property
    def cost_ms(self) -> Floats:
        """Milliseconds that each column adds to a piece."""
        own = [option.cost_ms for options in self.options for option in options]
        return np.array(own + [replay.cost_ms for replay in self.replays], dtype=np.float64)

    @cached_property
    def noise(self) -> Floats:
        """Relative error that each column adds to the gradient."""
        own = [option.noise for options in self.options for option in options]
        return np.array(own + [0.0] * len(self.replays), dtype=np.float64)

    @cached_property
    def spans(self) -> tuple[Indices, Indices, Indices, Floats]:
        """(column, first moment, moment after the last, bytes) of every span."""
        found = [option.spans for options in self.options for option in options]
        found += [replay.spans for replay in self.replays]
        rows = [(c, s.first, s.last + 1, s.nbytes) for c, spans in enumerate(found) for s in spans]
        if not rows:
            empty = np.zeros(0, dtype=np.intp)
            return empty, empty, empty, np.zeros(0)
        column, first, after, nbytes = zip(*rows, strict=True)
        indices = (np.array(each, dtype=np.intp) for each in (column, first, after))
        return (*indices, np.array(nbytes, dtype=np.float64))  # type: ignore[return-value]

    def usage(self, amounts: Floats) -> Floats:
        """(moments,) bytes of the process when column ``c`` is taken ``amounts[c]`` times."""
        column, first, after, nbytes = self.spans
        change = np.zeros(self.moments + 1)
        taken = nbytes * amounts[column]
        np.add.at(change, first, taken)
        np.subtract.at(change, after, taken)
        total: Floats = self.base_bytes + np.cumsum(change[:-1])
        return total

    def row(self, moment: int) -> Floats:
        """(columns,) bytes that each column holds at a moment."""
        column, first, after, nbytes = self.spans
        inside = (first <= moment) & (moment < after)
        held: Floats = np.bincount(
            column[inside], weights=nbytes[inside], minlength=self.columns
        ).astype(np.float64)
        return held

    def column_of(self, family: int, level: str, *, follow: bool = True) -> int | None:
        """The column of an option by level; the one that needs other codes if ``follow``."""
        places = [at for at, each in enumerate(self.options[family]) if each.level == level]
        if not places:
            return None
        return int(self.first[family]) + (places[0] if follow else places[-1])

    def replay_column(self, replay: int) -> int:
        """The column of a replay."""
        return int(self.first[-1]) + replay

    def option(self, column: int) -> Option:
        """The option that a family's column stands for."""
        family = int(self.family_of[column])
        return self.options[family][column - int(self.first[family])]

    def amounts(self, selection: list[int]) -> Floats:
        """A selection as one number per column."""
        chosen = np.zeros(self.columns)
        chosen[selection] = 1.0
        return chosen

    @property
    def base_peak_bytes(self) -> int:
        """The peak if nothing at all were saved."""
        return int(np.ceil(self.base_bytes.max()))

    def peak_bytes(self, selection: list[int]) -> int:
        """The peak over the timeline under a selection, rounded up."""
        return int(np.ceil(self.usage(self.amounts(selection)).max()))


def make_table(
    profile: Profile, micro_batch: int, allowed: Allowed, *, release_gradients: bool = False
) -> Table:
    """The columns and rows of steps in pieces of ``micro_batch``."""
    groups = families(profile.savings)
    maker = OptionMaker(profile, micro_batch, allowed)
    options = tuple(tuple(maker.options(group)) for group in groups)
    replays = (
        _replays(profile, groups, micro_batch) if allowed.replay and not profile.is_fused else ()
    )
    base = base_bytes(profile, micro_batch, release_gradients=release_gradients)
    if maker.sends_codes:
        base = base + allowed.passing_bytes
    requires = _requirements(groups, options) + _keeping(groups, options, replays)
    return Table(micro_batch, release_gradients, options, replays, base, requires)


def base_bytes(profile: Profile, micro_batch: int, *, release_gradients: bool) -> Floats:
    """(moments + 1,) bytes of the process without saved tensors; the last is the update's.

    With several pieces every gradient exists from the second piece on. Where gradients are
    released, the largest is counted throughout backward: one waits while the next is formed,
    and a step that has begun to change parameters cannot be tried again.
    """
    timeline = profile.timeline
    lines = [max(0.0, each.at(micro_batch)) for each in timeline.transient]
    transient = np.array(lines)
    whole = float(profile.gradient_bytes)
    if release_gradients:
        gradients = np.zeros(len(transient) + 1)
        gradients[timeline.forward : -1] = largest_gradient_bytes(profile)
    elif micro_batch < profile.batch_size:
        gradients = np.full(len(transient) + 1, whole)
    else:
        gradients = np.append(np.array(timeline.gradient_bytes, dtype=np.float64), whole)
    fixed = profile.resident_bytes + profile.optimizer_bytes
    result: Floats = fixed + gradients + np.append(transient, float(profile.update_bytes))
    return result


def largest_gradient_bytes(profile: Profile) -> int:
    """The most that gradients grow by from one moment to the next, the update being the last."""
    sizes = (0, *profile.timeline.gradient_bytes, profile.gradient_bytes)
    return max(after - before for before, after in pairwise(sizes))


def _requirements(
    groups: list[tuple[Saving, ...]], options: tuple[tuple[Option, ...], ...]
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    coding: dict[Site, list[int]] = defaultdict(list)
    keeping: dict[Site, list[int]] = defaultdict(list)
    flat: list[Option] = []
    for group, family in zip(groups, options, strict=True):
        for option in family:
            for site in option.coded_sites:
                coding[site].append(len(flat))
            for site in {saving.site for saving in group} - option.treatments.keys():
                keeping[site].append(len(flat))
            flat.append(option)
    found = []
    for column, option in enumerate(flat):
        for wanted, there in ((option.requires, coding), (option.requires_kept, keeping)):
            known = wanted & keeping.keys()  # one option of every family keeps all of it
            found += [(column, tuple(there[site])) for site in sorted(known, key=str)]
    return tuple(found)


def _keeping(
    groups: list[tuple[Saving, ...]],
    options: tuple[tuple[Option, ...], ...],
    replays: tuple[Replay, ...],
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Of replays whose inputs others keep: the options of these that do, for as long."""
    keeping: dict[int, list[tuple[int, int]]] = defaultdict(list)  # (column, until)
    column = 0
    for group, family in zip(groups, options, strict=True):
        for option in family:
            until: dict[int, int] = {}
            for each in group:
                if each.site not in option.treatments:
                    until[each.storage] = max(until.get(each.storage, -1), each.released)
            for storage, last in until.items():
                keeping[storage].append((column, last))
            column += 1
    return tuple(
        (column + place, tuple(there for there, until in keeping[storage] if until >= last))
        for place, replay in enumerate(replays)
        for storage, last in replay.shared
    )


def _replays(
    profile: Profile, groups: list[tuple[Saving, ...]], examples: int
) -> tuple[Replay, ...]:
    """One for every module whose calls save something wholly inside; the whole model is none."""
    inside = _descendants(profile.calls)
    by_module: dict[str, list[int]] = defaultdict(list)
    for index, call in enumerate(profile.calls):
        by_module[call.module].append(index)
    calls_of = [{saving.call for saving in group} for group in groups]
    families_at: dict[int, list[int]] = defaultdict(list)
    savings_at: dict[int, list[Saving]] = defaultdict(list)
    let_go: dict[int, int] = {}
    for family, group in enumerate(groups):
        for saving in group:
            families_at[saving.call].append(family)
            savings_at[saving.call].append(saving)
            let_go[saving.storage] = max(let_go.get(saving.storage, -1), saving.released)
    found = []
    for module, calls in by_module.items():
        covered = set().union(*(inside[call] for call in calls))
        nested = any(other in inside[call] for call in calls for other in calls if other != call)
        whole = frozenset(
            family
            for index in covered
            for family in families_at[index]
            if calls_of[family] <= covered
        )
        possible = all(profile.calls[index].replayable for index in calls) and not nested
        if whole and possible and any(profile.calls[call].parent >= 0 for call in calls):
            own = {saving.storage for family in whole for saving in groups[family]}
            others = {storage: last for storage, last in let_go.items() if storage not in own}
            spans = [
                _call_spans(
                    profile,
                    profile.calls[call],
                    [saving for each in inside[call] for saving in savings_at[each]],
                    others,
                    examples,
                )
                for call in calls
            ]
            cost_ms = sum(profile.calls[call].forward_ms.at(examples) for call in calls)
            operators = max(profile.calls[call].operators for call in calls)
            rest = (cost_ms, operators)
            shared: dict[int, int] = {}
            for each in spans:
                for storage, span in each.kept_by_others.items():
                    shared[storage] = max(shared.get(storage, -1), span.last)
            rebuilt = tuple(span for each in spans for span in each.always if span.nbytes > 0)
            inputs = tuple(span for each in spans for span in each.kept_by_others.values())
            if shared:
                found.append(Replay(module, whole, rebuilt, *rest, tuple(sorted(shared.items()))))
            found.append(Replay(module, whole, rebuilt + inputs, *rest))
    return tuple(found)


class _CallSpans(NamedTuple):
    """What one call's replay holds: ``always``; and by memory what counts only where nobody else
    keeps that input as it is, for as long.
    """

    always: list[Span]
    kept_by_others: dict[int, Span]


def _call_spans(
    profile: Profile,
    call: CallProfile,
    savings: list[Saving],
    let_go: Mapping[int, int],
    examples: int,
) -> _CallSpans:
    """Its inputs until then, then all that it saves.

    The replayed forward pass ends with every tensor inside saved, on top of
    which its own passing bytes are at most those of the first forward pass.
    ``let_go``: the last moment of memory that is not replayed, where that is kept as it is.
    """
    found = _CallSpans([], {})
    if not savings:
        return found
    begin = min(saving.read for saving in savings)
    ends = max(saving.released for saving in savings)
    given = {storage for storage, _ in call.inputs}
    found.always.extend(_rebuilt((s for s in savings if s.storage not in given), begin, examples))
    for storage, size in call.inputs:
        span = Span(call.first_forward, ends, size.at(examples))
        if let_go.get(storage, -1) >= ends:
            found.kept_by_others[storage] = span
        else:
            found.always.append(span)
    passing = profile.timeline.transient[call.first_forward : call.last_forward + 1]
    most = max((each.at(examples) for each in passing), default=0.0)
    found.always.append(Span(begin, begin, most))
    return found


def _rebuilt(savings: Iterable[Saving], begin: int, examples: int) -> list[Span]:
    """New memory, whoever else may hold the first pass's."""
    last: dict[int, Saving] = {}
    for saving in savings:
        known = last.get(saving.storage)
        if known is None or saving.released > known.released:
            last[saving.storage] = saving
    return [Span(begin, each.released, each.storage_bytes.at(examples)) for each in last.values()]


def _descendants(calls: tuple[CallProfile, ...]) -> list[set[int]]:
    """Every call's own index and those of the calls made inside it."""
    found: list[set[int]] = [{index} for index in range(len(calls))]
    for index in range(len(calls) - 1, -1, -1):  # callers come before what they call
        parent = calls[index].parent
        if parent >= 0:
            found[parent] |= found[index]
    return found


def kept_selection(table: Table) -> list[int]:
    """Every family kept: what plain PyTorch does."""
    return [int(first) for first in table.first[:-1]]


def level_selection(table: Table, level: str) -> list[int]:
    """Every family at one level; where it has no such option, at the nearest that holds less."""
    order = (KEPT, "exact", "8", "4", "3", "2", "1")
    rank = order.index(level)
    selection = []
    for family in range(len(table.options)):
        candidates = [*reversed(order[: rank + 1])]
        columns = (table.column_of(family, each) for each in candidates)
        selection.append(next(column for column in columns if column is not None))
    return selection
