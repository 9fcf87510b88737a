"""Replays of modules in backward: what each holds at which moment, and how long it takes."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from daf.core.profile import CallProfile, Profile, Saving
from daf.planning.option_costs import Span, last_moments
from daf.planning.options import Family


@dataclass(frozen=True, slots=True)
class Replay:
    """Replaying one module's calls: the families inside, bytes held and time."""

    module: str
    families: frozenset[int]
    spans: tuple[Span, ...]
    cost_ms: float
    operators: int  # of the call with most of them
    shared: tuple[tuple[int, int], ...] = ()  # (storage, last moment) that others must keep


def replays_of(profile: Profile, groups: Sequence[Family], examples: int) -> tuple[Replay, ...]:
    """Return one or two replays per module that saves something wholly inside; none of the root."""
    inside = _descendants(profile.calls)
    by_module: dict[str, list[int]] = defaultdict(list)
    for index, call in enumerate(profile.calls):
        by_module[call.module].append(index)
    callers = [{saving.call for saving in group} for group in groups]
    families_at: dict[int, list[int]] = defaultdict(list)
    savings_at: dict[int, list[Saving]] = defaultdict(list)
    for family, group in enumerate(groups):
        for saving in group:
            families_at[saving.call].append(family)
            savings_at[saving.call].append(saving)
    until = last_moments(profile.savings)
    found: list[Replay] = []
    for calls in by_module.values():
        covered = set().union(*(inside[call] for call in calls))
        families = frozenset(
            each for call in covered for each in families_at[call] if callers[each] <= covered
        )
        if families and _is_possible(profile, calls, inside):
            own = {saving.storage for family in families for saving in groups[family]}
            others = {storage: last for storage, last in until.items() if storage not in own}
            held = [
                _held(profile, profile.calls[call], savings, others, examples)
                for call in calls
                if (savings := [each for within in inside[call] for each in savings_at[within]])
            ]
            found += _of_module(profile, calls, families, held, examples)
    return tuple(found)


def _descendants(calls: tuple[CallProfile, ...]) -> list[set[int]]:
    found: list[set[int]] = [{index} for index in range(len(calls))]
    for index in range(len(calls) - 1, -1, -1):  # callers come before what they call
        parent = calls[index].parent
        if parent >= 0:
            found[parent] |= found[index]
    return found


def _is_possible(profile: Profile, calls: Sequence[int], inside: Sequence[set[int]]) -> bool:
    """True if all calls can be replayed, none lies in another one, and the module is no root."""
    is_nested = any(other in inside[call] for call in calls for other in calls if other != call)
    replayable = all(profile.calls[call].replayable for call in calls)
    return replayable and not is_nested and any(profile.calls[call].parent >= 0 for call in calls)


# Spans that one call's replay always holds; by storage, those that count unless others keep them.
_Held = tuple[list[Span], dict[int, Span]]


def _of_module(
    profile: Profile,
    calls: Sequence[int],
    families: frozenset[int],
    held: Sequence[_Held],
    examples: int,
) -> Iterator[Replay]:
    module = profile.calls[calls[0]].module
    cost_ms = sum(profile.calls[call].forward_ms.at(examples) for call in calls)
    operators = max(profile.calls[call].operators for call in calls)
    rebuilt = tuple(span for always, _ in held for span in always if span.nbytes > 0)
    inputs = [item for _, by_storage in held for item in by_storage.items()]
    last: dict[int, int] = {}
    for storage, span in inputs:
        last[storage] = max(last.get(storage, -1), span.last)
    if last:
        yield Replay(module, families, rebuilt, cost_ms, operators, tuple(sorted(last.items())))
    spans = rebuilt + tuple(span for _, span in inputs)
    yield Replay(module, families, spans, cost_ms, operators)


def _held(
    profile: Profile,
    call: CallProfile,
    savings: Sequence[Saving],
    others: Mapping[int, int],
    examples: int,
) -> _Held:
    """Return a call's inputs until its replay, then all that the call saves.

    While it runs, transient bytes are at most those of the first forward; what is held, inputs too,
    was among these until the program freed it, and counts once. ``savings`` are of the call and
    those inside it; ``others`` gives the last moment of kept storages that are not replayed.
    """
    begin = min(saving.read for saving in savings)
    ends = max(saving.released for saving in savings)
    given = {storage for storage, _ in call.inputs}
    nbytes = {s.storage: s.storage_bytes.at(examples) for s in reversed(savings)}
    always = [
        Span(begin, last, nbytes[storage])  # new memory, even if others hold the original
        for storage, last in last_moments(savings).items()
        if storage not in given
    ]
    by_storage: dict[int, Span] = {}
    for storage, size in call.inputs:
        span = Span(call.first_forward, ends, size.at(examples))
        if others.get(storage, -1) >= ends:
            by_storage[storage] = span
        else:
            always.append(span)
    transient = profile.timeline.transient[call.first_forward : call.last_forward + 1]
    running = np.array([each.at(examples) for each in transient] or [0.0])
    for storage, dies in {saving.storage: saving.dies for saving in savings}.items():
        running -= nbytes[storage]
        running[max(0, dies - call.first_forward) :] += nbytes[storage]
    always.append(Span(begin, begin, max(0.0, float(running.max()))))
    return always, by_storage
