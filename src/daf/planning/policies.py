"""Policies by name: DAF's own search, and published strategies to compare it with."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import numpy as np

from daf.core.errors import UnknownNameError
from daf.core.policy import Method
from daf.core.profile import Profile
from daf.planning.candidate import Candidate, noise_price_ms
from daf.planning.mip import RELATIVE_GAP, Program
from daf.planning.options import WIDTHS, Allowed
from daf.planning.replays import Replay
from daf.planning.search import Problem, Search, Shape, micro_batch_sizes, shapes
from daf.planning.table import (
    Floats,
    Indices,
    Selection,
    Table,
    kept_selection,
    lawful,
    level_selection,
    unmet,
    worst_moments,
)

UNMEASURED_GAIN = 0.05  # of a step; times are known to 8 % at best, noise takes 3 steps to learn
KNEE_FRACTION = 0.95  # of the best measured examples per second: the least at the knee
_SMALLEST_SIZES = 8  # a larger one can hold less, if tensors become large enough to be treated
REDUCED_OPERATORS = 5  # SAGE's fixed threshold
_NOISE_FIRST = 1e6  # at this factor on its price, noise outweighs all coding time
_NOISE_GAP = 1e-3  # sensitivities are known more precisely than times
_MOST_ROUNDS = 120
_MOST_LOOSENINGS = 400


@dataclass(frozen=True, slots=True)
class Strategy:
    """How a policy chooses; both functions return None if nothing is within the tolerance."""

    find: Callable[[Problem], Candidate | None]  # within the problem's limit
    least: Callable[[Problem], Candidate | None]  # for the lowest peak
    is_level: bool = False  # every site is treated alike, as ``bits=`` asks


_strategies: dict[str, Strategy] = {}
POLICIES: Mapping[str, Strategy] = MappingProxyType(_strategies)


def register_policy(name: str, strategy: Strategy) -> None:
    """Register a policy for the planner, sessions and command line; an equal name is replaced."""
    _strategies[name] = strategy


def strategy_named(name: str) -> Strategy:
    """Return a registered policy's strategy; raises UnknownNameError if there is none."""
    if name not in _strategies:
        raise UnknownNameError(f"asked for the policy {name!r}; known: {', '.join(_strategies)}")
    return _strategies[name]


def first_that_fits(
    candidates: Callable[[Problem], Iterable[Candidate]], *, is_level: bool = False
) -> Strategy:
    """Return the strategy that takes the first candidate within the limit."""

    def find(problem: Problem) -> Candidate | None:
        return next((each for each in candidates(problem) if _fits(each, problem)), None)

    def least(problem: Problem) -> Candidate | None:
        return min(candidates(problem), key=attrgetter("peak_bytes"), default=None)

    return Strategy(find, least, is_level)


def _fits(candidate: Candidate | None, problem: Problem) -> bool:
    return candidate is not None and candidate.peak_bytes <= problem.limit_bytes


def optimal(problem: Problem) -> Candidate | None:
    """Return the least objective within the problem's gap; the tightest if the search misses it.

    Codes whose noise nobody has measured are left out unless they gain ``UNMEASURED_GAIN``.
    """
    found = Search(problem).run()
    if found is not None and found.noise and not problem.profile.weights:
        most_ms, gap = (1 + UNMEASURED_GAIN) * found.objective, RELATIVE_GAP
        exact = Search(replace(problem, tolerance=0.0, most_ms=most_ms, relative_gap=gap)).run()
        return found if exact is None else replace(exact, bound_ms=found.bound_ms)
    return found or _if_it_fits(tightest(problem), problem)


def _if_it_fits(candidate: Candidate | None, problem: Problem) -> Candidate | None:
    return candidate if _fits(candidate, problem) else None


def tightest(problem: Problem) -> Candidate | None:
    """Return the candidate of lowest peak, of the whole batch or the smallest micro-batches."""
    profile, allowed = problem.profile, problem.allowed.within(problem.tolerance)
    sizes = {*micro_batch_sizes(profile)[-_SMALLEST_SIZES:], profile.batch_size}
    chosen = [shape for shape in shapes(profile, allowed) if shape.micro_batch in sizes]
    best: Candidate | None = None
    for shape in reversed(chosen):
        table = shape.table(profile, allowed)
        if best is not None and table.peak_bytes(()) >= best.peak_bytes:
            continue
        if (selection := Program(table, problem.tolerance).least_peak()) is not None:
            found = Candidate(table, selection)
            best = min(best or found, found, key=attrgetter("peak_bytes"))
    return best


def knee(profile: Profile) -> int:
    """Return the smallest measured size near the best measured examples per second."""
    rates = {examples: examples / ms for examples, ms in profile.micro_batch_ms}
    best = max(rates.values())
    return min(examples for examples, rate in rates.items() if rate >= KNEE_FRACTION * best)


def times_of_sizes(profile: Profile | None) -> list[str]:
    """Return a line that draws what an example takes in measured micro-batches; [] of one size."""
    each = {} if profile is None else {n: ms / n for n, ms in profile.micro_batch_ms}
    if profile is None or len(each) <= 1:
        return []
    drawn = "".join("▁▂▃▄▅▆▇█"[int(7 * ms / max(each.values()))] for ms in each.values())
    spread = f"{min(each.values()):.3g} to {max(each.values()):.3g} ms an example"
    return [f"micro-batches of {', '.join(map(str, each))}: {drawn} {spread}; knee {knee(profile)}"]


def _without_codes(problem: Problem) -> Problem:
    """Return SAGE's problem: lossless treatments and replay only."""
    allowed = replace(problem.allowed, widths=(), release_gradients=False, must_release=False)
    return replace(problem, allowed=allowed)


def sage(problem: Problem) -> Candidate | None:
    """Accumulate down to the knee, then evict by time per byte; smaller only if nothing fits."""
    own, turning = _without_codes(problem), knee(problem.profile)
    sizes = micro_batch_sizes(problem.profile)
    above = [size for size in sizes if size >= turning] or sizes[:1]
    for size in above:
        table = Shape(size).table(own.profile, own.allowed)
        kept = Candidate(table, kept_selection(table))
        if _fits(kept, problem):
            return kept
    for size in sizes[len(above) - 1 :]:
        table = Shape(size).table(own.profile, own.allowed)
        if (selection := evicted(table, problem.limit_bytes)) is not None:
            return Candidate(table, selection)
    return _if_it_fits(tightest(own), problem)


def dynamic_checkpoints(problem: Problem) -> Candidate | None:
    """Evict by time per byte from the whole batch; the least that it can hold if nothing fits."""
    table = _whole(_without_codes(problem))
    if (selection := evicted(table, problem.limit_bytes)) is not None:
        return Candidate(table, selection)
    return _if_it_fits(_least_held(table), problem)


def _whole(problem: Problem) -> Table:
    return Shape(problem.profile.batch_size).table(problem.profile, problem.allowed)


def _least_held(table: Table) -> Candidate | None:
    selection = Program(table, math.inf).least_peak()
    return None if selection is None else Candidate(table, selection)


def _in_micro_batches(
    select: Callable[[Table], Selection], *, may_cut: bool = True, **without: Any
) -> Strategy:

    def candidates(problem: Problem) -> Iterator[Candidate]:
        allowed = replace(problem.allowed, **without)
        whole = [problem.profile.batch_size]
        for size in micro_batch_sizes(problem.profile) if may_cut else whole:
            table = Shape(size).table(problem.profile, allowed)
            yield Candidate(table, select(table))

    return first_that_fits(candidates)


def checkpointed(table: Table) -> Selection:
    """Return everything kept except in the blocks of one level of the module tree."""
    calls = table.profile.calls
    layers = len(set(range(len(calls))) - {call.parent for call in calls})
    levels: dict[int, list[int]] = {}
    for place, each in _whose_inputs_are_kept(table):
        levels.setdefault(each.module.count("."), []).append(place)
    wanted = math.sqrt(max(1, layers))
    blocks = min(levels.values(), key=lambda level: abs(len(level) - wanted), default=[])
    return _replaying(table, blocks)


def _whose_inputs_are_kept(table: Table) -> Iterator[tuple[int, Replay]]:
    seen: set[str] = set()
    for place, each in enumerate(table.replays):
        if each.module not in seen:
            seen.add(each.module)
            yield place, each


def _replaying(table: Table, places: Sequence[int]) -> Selection:
    covered = frozenset[int]().union(*(table.replays[place].families for place in places))
    kept = [c for family, c in enumerate(kept_selection(table)) if family not in covered]
    return lawful(table, kept + [table.replay_column(place) for place in places])


def reduced(table: Table) -> Selection:
    """Return everything kept except in the largest calls of at most ``REDUCED_OPERATORS``."""
    replays = _whose_inputs_are_kept(table)
    few = [place for place, each in replays if each.operators <= REDUCED_OPERATORS]
    chosen: list[int] = []
    covered: set[int] = set()
    for place in sorted(few, key=lambda place: -len(table.replays[place].families)):
        if not covered & table.replays[place].families:
            chosen.append(place)
            covered |= table.replays[place].families
    return _replaying(table, chosen)


def _quantizing(problem: Problem) -> Iterator[Candidate]:
    allowed = replace(problem.allowed, replay=False)
    table = Shape(problem.profile.batch_size).table(problem.profile, allowed)
    for width in WIDTHS:
        if width in allowed.widths:
            yield Candidate(table, lawful(table, level_selection(table, str(width))))


_widest = first_that_fits(_quantizing)


def _by_importance(ranges: str) -> Strategy:
    """Return DAF's published strategy: the whole batch coded, widths by importance."""
    # ``ranges``: its codes of tensors' or channels' ranges; empty: ours.

    def table(problem: Problem) -> Table:
        allowed = problem.allowed
        methods = allowed.methods - {Method.SPILL, Method.RECOMPUTE}
        own = replace(allowed, replay=False, methods=methods, ranges=ranges)
        return _whole(replace(problem, allowed=own))

    return Strategy(lambda p: _least_noise(p, table(p)), lambda p: _least_held(table(p)))


def _least_noise(problem: Problem, table: Table) -> Candidate | None:
    cost = table.cost_ms + _NOISE_FIRST * noise_price_ms(problem.profile) * table.noise
    found = Program(table, math.inf, problem.limit_bytes, cost).least_objective(_NOISE_GAP)
    if found is None or math.isinf(found.objective):
        return _if_it_fits(_least_held(table), problem)
    return Candidate(table, found.selection)


def _quantized(problem: Problem) -> Strategy:
    """Return how the batch is coded: the widest that fits, or with sensitivities least noise."""
    return _by_importance("") if problem.profile.weights else _widest


def lowest_level(problem: Problem, shape: Shape) -> Candidate:
    """Return the uniform level of lowest peak at a shape within the tolerance; needs no solver."""
    own = replace(problem.allowed.within(problem.tolerance), replay=False)
    table = shape.table(problem.profile, own)
    levels = ("keep", "exact", *map(str, own.widths))
    selections = [lawful(table, level_selection(table, level)) for level in levels]
    within = (each for each in selections if table.noise_of(each) <= problem.tolerance)
    return min((Candidate(table, each) for each in within), key=attrgetter("peak_bytes"))


def _at_level(level: str) -> Strategy:
    def candidates(problem: Problem) -> Iterator[Candidate]:
        own: Allowed = replace(problem.allowed, replay=False, widths=WIDTHS)
        for shape in shapes(problem.profile, own):
            table = shape.table(problem.profile, own)
            yield Candidate(table, lawful(table, level_selection(table, level)))

    return first_that_fits(candidates, is_level=True)


def evicted(table: Table, limit_bytes: int) -> Selection | None:
    """Free what takes least time per byte (SAGE's order) down to the limit; None: not found."""
    holder = np.array(kept_selection(table), dtype=np.intp)  # (families,) the column of each
    for _ in range(_MOST_ROUNDS):
        usage = table.usage_of(_selection(holder))
        if not (worst := worst_moments(usage, limit_bytes, 1)):
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
        leaves = table.leaves_of(column)
        needs = column in table.needs
        possible = not (needs and column in unmet(table, {*_selection(holder), column, *leaves}))
        if possible and moved.isdisjoint(families):
            holder[list(families)] = column
            holder[table.family_of[list(leaves)]] = leaves
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
        held = sum(float(row[leaf]) for leaf in table.leaves_of(column) if leaf not in holder)
        freed = sum(float(row[each]) for each in now) - float(row[column]) - held
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


_strategies |= {
    "optimal": Strategy(optimal, tightest),
    "sage": Strategy(sage, lambda problem: tightest(_without_codes(problem))),
    "checkpoint": Strategy(dynamic_checkpoints, lambda p: _least_held(_whole(_without_codes(p)))),
    "checkpoint-static": _in_micro_batches(checkpointed, may_cut=False, widths=()),
    "accumulate": _in_micro_batches(kept_selection, replay=False, widths=()),
    "reduce": _in_micro_batches(reduced, widths=()),
    "quantize": Strategy(lambda p: _quantized(p).find(p), lambda p: _quantized(p).least(p)),
    "daf": _by_importance("tensor"),
    "daf-channels": _by_importance("channel"),
    "plain": _at_level("keep"),
    "exact": _at_level("exact"),
    **{f"{width}-bit": _at_level(str(width)) for width in WIDTHS},
}
