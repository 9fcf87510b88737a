"""Strategies on one machinery: DAF's own search, and the published fixed ones to compare with.

- ``optimal``: the least predicted step time of all.
- ``sage``: SAGE's order (Gim and Ko, MobiSys 2022): smaller pieces down to the
  measured knee of examples per second, then evict by cost per byte.
- ``checkpoint``: Chen et al. (2016): replay the level of the model's tree that has
  nearest to the square root of as many blocks as there are layers.
- ``accumulate``: everything kept, the largest piece that fits.
- ``reduce``: SAGE's subgraph reduction alone: whatever at most five operators compute is
  computed again, however long they take; the largest piece that fits.
- ``quantize``: the whole batch, no replay: one width everywhere, the widest that fits; once
  sensitivities were measured, the widths that add least noise in the budget's bytes.
- ``plain``, ``exact``, ``8-bit`` … ``1-bit``: that at every site, in the largest pieces that fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from daf.core.policy import Method
from daf.core.profile import Profile
from daf.planning.candidate import Candidate, noise_price_ms, with_margin
from daf.planning.greedy import lawful, solve_greedily
from daf.planning.mip import Program
from daf.planning.options import WIDTHS, Allowed
from daf.planning.search import Search, Shape, piece_sizes, shapes
from daf.planning.table import Replay, Table, kept_selection, level_selection, make_table

# A piece is at the knee when it has this share of the best measured examples per second.
KNEE_FRACTION = 0.95
_SMALLEST_SIZES = 8
# SAGE's fixed threshold (Gim and Ko, 2022).
REDUCED_OPERATORS = 5
_NOISE_FIRST = 1e6  # times its ordinary price noise outweighs all time that codes take

Strategy = Callable[[Profile, int, float, Allowed], Candidate | None]


def knee(profile: Profile) -> int:
    """The smallest measured size with nearly the best measured rate (examples per second)."""
    rates = {examples: examples / ms for examples, ms in profile.micro_batch_ms}
    best = max(rates.values())
    return min(examples for examples, rate in rates.items() if rate >= KNEE_FRACTION * best)


def optimal(
    profile: Profile,
    limit: int,
    tolerance: float,
    allowed: Allowed,
    stop: Callable[[], bool] = lambda: False,
) -> Candidate | None:
    """The least objective over all sizes and selections, proven by HiGHS; or, once ``stop`` is
    true, the best so far.
    """
    return Search(profile, limit, tolerance, allowed, stop).run(exactly=True)


def quick(profile: Profile, limit: int, tolerance: float, allowed: Allowed) -> Candidate | None:
    """The same by greedy choices with a proven gap, for use until the exact answer is there."""
    return Search(profile, limit, tolerance, allowed).run(exactly=False)


def tightest(profile: Profile, tolerance: float, allowed: Allowed) -> Candidate | None:
    """What peaks lowest of all: nearly always the smallest piece, or the whole batch.

    Tensors too small to be treated can make a slightly larger piece hold less, so a few of
    the smallest are tried; the whole batch needs no gradients while it goes forward.
    """
    allowed = allowed.within(tolerance)
    sizes = set(piece_sizes(profile)[-_SMALLEST_SIZES:]) | {profile.batch_size}
    chosen = [shape for shape in shapes(profile, allowed) if shape.micro_batch in sizes]
    best: Candidate | None = None
    for shape in reversed(chosen):
        table = _table(profile, shape, allowed)
        if best is not None and with_margin(profile, table.base_peak_bytes) >= best.peak_bytes(
            profile
        ):
            continue
        selection = Program(table, tolerance, 0.0).least_peak()
        if selection is not None:
            found = Candidate(table, selection)
            if best is None or found.peak_bytes(profile) < best.peak_bytes(profile):
                best = found
    return best


def _table(profile: Profile, shape: Shape, allowed: Allowed) -> Table:
    return make_table(
        profile, shape.micro_batch, allowed, release_gradients=shape.release_gradients
    )


# --- published strategies ---------------------------------------------------------------------


def _sage_allowed(allowed: Allowed) -> Allowed:
    """SAGE has no codes: only what is lossless, and replay."""
    return replace(allowed, widths=(), release_gradients=False, must_release=False)


def sage(profile: Profile, limit: int, tolerance: float, allowed: Allowed) -> Candidate | None:
    """Accumulate to the knee, then evict by cost per byte; below the knee only if it must."""
    own, turning = _sage_allowed(allowed), knee(profile)
    sizes = piece_sizes(profile)
    above = [size for size in sizes if size >= turning] or sizes[:1]
    for size in above:
        table = make_table(profile, size, own)
        if table.peak_bytes(kept_selection(table)) <= limit:
            return Candidate(table, tuple(kept_selection(table)))
    for size in sizes[len(above) - 1 :]:
        table = make_table(profile, size, own)
        found = solve_greedily(table, limit, tolerance, 0.0)
        if found is not None:
            return Candidate(table, found.selection)
    least = tightest(profile, tolerance, own)
    fits = least is not None and least.table.peak_bytes(list(least.selection)) <= limit
    return least if fits else None


def lowest_level(
    profile: Profile, size: int, tolerance: float, allowed: Allowed, *, release: bool
) -> Candidate:
    """One level everywhere, the one that peaks lowest at a size of piece within the tolerance.

    Found at once, and so near the least that pieces of this size can hold.
    """
    own = replace(allowed.within(tolerance), replay=False)
    table = make_table(profile, size, own, release_gradients=release)
    levels = ("keep", "exact", *map(str, own.widths))
    selections = [lawful(table, level_selection(table, level)) for level in levels]
    within = [each for each in selections if table.noise[each].sum() <= tolerance]
    lowest: list[int] = min(within, key=lambda selection: table.peak_bytes(list(selection)))
    return Candidate(table, tuple(lowest))


def _first_that_fits(candidates: Iterator[Candidate], limit: int) -> Candidate | None:
    fitting = (each for each in candidates if each.table.peak_bytes(list(each.selection)) <= limit)
    return next(fitting, None)


def _accumulating(profile: Profile, allowed: Allowed) -> Iterator[Candidate]:
    for size in piece_sizes(profile):
        table = make_table(profile, size, replace(allowed, replay=False, widths=()))
        yield Candidate(table, tuple(kept_selection(table)))


def _checkpointing(profile: Profile, allowed: Allowed) -> Iterator[Candidate]:
    table = make_table(profile, profile.batch_size, replace(allowed, widths=()))
    yield Candidate(table, checkpointed(profile, table))


def checkpointed(profile: Profile, table: Table) -> tuple[int, ...]:
    """Everything kept but what lies in the blocks of one level of the model's tree."""
    parents = {call.parent for call in profile.calls}
    layers = sum(1 for index in range(len(profile.calls)) if index not in parents)
    levels: dict[int, list[int]] = {}
    for place, each in _whose_inputs_are_kept(table):
        levels.setdefault(each.module.count("."), []).append(place)
    wanted = math.sqrt(max(1, layers))
    blocks = min(levels.values(), key=lambda level: abs(len(level) - wanted), default=[])
    return _replaying(table, blocks)


def _whose_inputs_are_kept(table: Table) -> Iterator[tuple[int, Replay]]:
    """One replay for each module, as it is where everything else is kept."""
    seen: set[str] = set()
    for place, each in enumerate(table.replays):
        if each.module not in seen:
            seen.add(each.module)
            yield place, each


def _replaying(table: Table, places: Sequence[int]) -> tuple[int, ...]:
    """These replays, and everything else kept."""
    covered = frozenset[int]().union(*(table.replays[place].families for place in places))
    kept = [c for family, c in enumerate(kept_selection(table)) if family not in covered]
    return tuple(lawful(table, kept + [table.replay_column(place) for place in places]))


def _reducing(profile: Profile, allowed: Allowed) -> Iterator[Candidate]:
    for size in piece_sizes(profile):
        table = make_table(profile, size, replace(allowed, widths=()))
        yield Candidate(table, reduced(table))


def reduced(table: Table) -> tuple[int, ...]:
    """Everything kept but what lies in the largest calls of so few operators."""
    replays = _whose_inputs_are_kept(table)
    few = [place for place, each in replays if each.operators <= REDUCED_OPERATORS]
    chosen: list[int] = []
    covered: set[int] = set()
    for place in sorted(few, key=lambda place: -len(table.replays[place].families)):
        if not covered & table.replays[place].families:
            chosen.append(place)
            covered |= table.replays[place].families
    return _replaying(table, chosen)


def _quantizing(profile: Profile, allowed: Allowed) -> Iterator[Candidate]:
    table = make_table(profile, profile.batch_size, replace(allowed, replay=False))
    for width in WIDTHS:
        if width in allowed.widths:
            selection = lawful(table, level_selection(table, str(width)))
            yield Candidate(table, tuple(selection))


def _at_level(level: str) -> Callable[[Profile, Allowed], Iterator[Candidate]]:
    """One level everywhere; only the size of pieces is chosen."""

    def candidates(profile: Profile, allowed: Allowed) -> Iterator[Candidate]:
        own = replace(allowed, replay=False, widths=WIDTHS)
        for shape in shapes(profile, own):
            table = _table(profile, shape, own)
            yield Candidate(table, tuple(lawful(table, level_selection(table, level))))

    return candidates


def _least_noise(profile: Profile, limit: int, allowed: Allowed) -> Candidate | None:
    """Codes alone, of the whole batch: the widths of least noise whose peak is within the limit."""
    table = _table_of_codes(profile, allowed)
    price_ms = _NOISE_FIRST * noise_price_ms(profile)
    found = Program(table, math.inf, price_ms).least_objective(limit)
    if found is None or math.isinf(found.objective):
        found = solve_greedily(table, limit, math.inf, price_ms)
    return Candidate(table, found.selection) if found else None


def _least_coded(profile: Profile, allowed: Allowed) -> Candidate | None:
    """The widths among which ``_least_noise`` chooses whose peak is lowest."""
    table = _table_of_codes(profile, allowed)
    selection = Program(table, math.inf, 0.0).least_peak()
    return None if selection is None else Candidate(table, selection)


def _table_of_codes(profile: Profile, allowed: Allowed) -> Table:
    own = replace(allowed, replay=False, methods=allowed.methods - {Method.SPILL})
    return make_table(profile, profile.batch_size, own)


_FIXED: Mapping[str, Callable[[Profile, Allowed], Iterator[Candidate]]] = {
    "accumulate": _accumulating,
    "checkpoint": _checkpointing,
    "reduce": _reducing,
    "quantize": _quantizing,
    "plain": _at_level("keep"),
    "exact": _at_level("exact"),
} | {f"{width}-bit": _at_level(str(width)) for width in WIDTHS}
POLICIES = ("optimal", "sage", "checkpoint", "accumulate", "reduce", "quantize")
LEVELS = tuple(name for name in _FIXED if name not in POLICIES)


def find(
    policy: str,
    profile: Profile,
    limit: int,
    tolerance: float,
    allowed: Allowed,
    stop: Callable[[], bool] = lambda: False,
) -> Candidate | None:
    """What a policy chooses with its computed peak within ``limit``; None if nothing fits."""
    if policy == "optimal":
        return optimal(profile, limit, tolerance, allowed, stop)
    if policy == "quantize" and profile.weights:
        return _least_noise(profile, limit, allowed)
    if policy in _FIXED:
        return _first_that_fits(_FIXED[policy](profile, allowed), limit)
    search: Mapping[str, Strategy] = {"quick": quick, "sage": sage}
    return search[policy](profile, limit, tolerance, allowed)


def least(policy: str, profile: Profile, tolerance: float, allowed: Allowed) -> Candidate | None:
    """What a policy can do that peaks lowest."""
    if policy == "quantize" and profile.weights:
        return _least_coded(profile, allowed)
    if policy in _FIXED:
        candidates = _FIXED[policy](profile, allowed)
        return min(candidates, key=lambda each: each.peak_bytes(profile), default=None)
    return tightest(profile, tolerance, _sage_allowed(allowed) if policy == "sage" else allowed)
