"""What can be done with each family of saved tensors: the options that plans choose from."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from daf.core.policy import (
    DERIVED,
    KEEP,
    LEAST_SCORE_BITS,
    RECOMPUTE,
    SMALL_BYTES,
    Method,
    Need,
    Reading,
    Site,
    Treatment,
    coded_policy,
    exact_policy,
    placed_on_host,
    ranged_policy,
)
from daf.core.profile import Profile, Saving
from daf.core.units import pinned_bytes
from daf.planning.option_costs import OptionCosts, Span, code_key

WIDTHS = (8, 4, 3, 2, 1)
RECORDING = -1  # numbers what all recipes need: the graph of values
KEPT, EXACT, SPILLED, RECOMPUTED, HELD = "keep", "exact", "spill", "recompute", "held for others"
_LEAST_SCORES = f"{LEAST_SCORE_BITS} with scores"
_ON_HOST = " on the host"
_NORMALISATIONS = frozenset({"batch_norm", "layer_norm", "rms_norm"})

Family = tuple[Saving, ...]
ByNeed = Mapping[Need, Treatment]


@dataclass(frozen=True, slots=True)
class Allowed:
    """What execution can carry out and the user permits."""

    methods: frozenset[Method] = frozenset(Method)
    widths: tuple[int, ...] = WIDTHS
    ranges: str = ""  # "tensor" or "channel": DAF's published codes in place of ours
    replay: bool = True
    release_gradients: bool = True
    must_release: bool = False  # a whole batch's gradients are always released
    release_refusal: str = ""  # why none are, although the user asked for it
    host_bytes: int = 0  # host memory for a device's codes (0: none)
    passing_bytes: int = 0  # device memory of codes and raw data on their way

    def within(self, tolerance: float) -> "Allowed":
        """Return self, without codes if the tolerance is 0: noise measured as 0 is still noise."""
        return replace(self, widths=()) if tolerance == 0 else self


EVERYTHING = Allowed()


@dataclass(frozen=True, slots=True)
class Option:
    """One way to treat a family: bytes held, time, and variance added relative to the batch's."""

    level: str  # keep, exact, spill or a width; suffixes: fewer bits of q and k, host memory
    treatments: Mapping[Site, Treatment]
    spans: tuple[Span, ...]
    cost_ms: float
    noise: float
    requires: frozenset[Site] = frozenset()  # sites that must be coded beside it
    requires_kept: frozenset[Site] = frozenset()  # sites that must be kept
    leaves: frozenset[int] = frozenset()  # of recipes, by number, that must be held

    @property
    def coded_sites(self) -> frozenset[Site]:
        """The sites that hold a code, mask or packing under this option."""
        other = (Method.KEEP, Method.SPILL, Method.DROP, Method.REDERIVE, Method.RECOMPUTE)
        return frozenset(s for s, each in self.treatments.items() if each.method not in other)


def families(savings: Iterable[Saving]) -> tuple[Family, ...]:
    """Return savings grouped by shared sites and memory, in order of each group's first save."""
    root: dict[object, object] = {}

    def find(item: object) -> object:
        while root.setdefault(item, item) != item:
            item = root[item]
        return item

    listed = list(savings)
    for saving in listed:
        root[find(saving.site)] = find(saving.storage)
    groups: dict[object, list[Saving]] = defaultdict(list)
    for saving in listed:
        groups[find(saving.site)].append(saving)
    return tuple(tuple(group) for group in groups.values())


class OptionMaker:
    """Makes the options of families at one micro-batch size (``examples``)."""

    def __init__(self, profile: Profile, examples: int, allowed: Allowed) -> None:
        self._profile, self._examples = profile, examples
        self._allowed = allowed
        self._costs = OptionCosts(profile, examples, allowed.passing_bytes)
        # Sites where a fused normalisation's saved value yields its result; then sites whose
        # tensors can be rederived from these, and those that can while an input is kept.
        self._yielding = _sites_of_none_but(profile.savings, _yields_result)
        self._derivable = _sites_of_none_but(profile.savings, self._is_derivable)
        self._rederivable = _sites_of_none_but(
            profile.savings, lambda each: each.teller is not None or self._is_derivable(each)
        )
        self._levels = list(self._levels_here())
        on_host = list(self._levels_on_host()) if allowed.host_bytes else []
        self._levels += on_host
        self.sends_codes = bool(on_host)

    def _levels_here(self) -> Iterator[tuple[str, ByNeed]]:
        widths = self._allowed.widths
        yield EXACT, {**exact_policy().by_need, **DERIVED}
        ranges = self._allowed.ranges
        for width in widths:
            coded = ranged_policy(width, ranges) if ranges else coded_policy(width)
            yield str(width), coded.by_need
        if LEAST_SCORE_BITS in widths and not ranges and self._profile.weights:
            yield _LEAST_SCORES, coded_policy(LEAST_SCORE_BITS, score_bits=LEAST_SCORE_BITS).by_need
        if Method.SPILL in self._allowed.methods:
            yield SPILLED, dict.fromkeys(Need, Treatment(Method.SPILL))

    def _levels_on_host(self) -> Iterator[tuple[str, ByNeed]]:
        for level, here in self._levels:
            by_need = {need: placed_on_host(each) for need, each in here.items()}
            if level != SPILLED and self._pinned_bytes(by_need) <= self._allowed.host_bytes:
                yield level + _ON_HOST, by_need

    def _pinned_bytes(self, by_need: ByNeed) -> int:
        codes: dict[tuple[object, ...], int] = {}
        for saving in self._profile.savings:
            treatment = by_need.get(saving.need, KEEP)
            if not treatment.on_host:
                continue
            if self._can(saving, treatment):
                codes[code_key(saving, treatment)] = self._costs.code_bytes(saving, treatment)
            if beside := round(saving.beside_bytes.at(self._examples)):
                codes["beside", saving.site, saving.storage] = beside
        return sum(map(pinned_bytes, codes.values()))

    def options(self, family: Family) -> list[Option]:
        """Return the distinct options of a family, *keep* first."""
        found = [self._option(KEPT, family, {})]
        # Several widths may give the same treatments (masks have one); the first counts.
        seen: list[tuple[dict[Site, Treatment], frozenset[Site]]] = [({}, frozenset())]
        for level, by_need in self._levels:
            if level.startswith(_LEAST_SCORES) and not self._may_narrow_scores(family):
                continue
            treatments = self._treatments(family, by_need)
            is_coded = level.removesuffix(_ON_HOST) not in (EXACT, SPILLED)
            followed = _codes_followed(family, treatments) if is_coded else None
            ways = [(False, frozenset[Site]())]
            for follow, requires in ways if followed is None else [(True, followed), *ways]:
                if (treatments, requires) not in seen:
                    seen.append((treatments, requires))
                    found.append(self._option(level, family, treatments, follow, requires))
        if Method.RECOMPUTE in self._allowed.methods and (again := self._recomputed(family)):
            found.append(again)
        return found

    def _recomputed(self, family: Family) -> Option | None:
        """Return the option without codes; None where a tensor has neither recipe nor mask."""
        treatments = self._treatments(family, exact_policy().by_need)
        made = {each.site: each.recipe for each in family if each.site not in treatments}
        recipes = [each for each in made.values() if each is not None]
        if not recipes or len(recipes) < len(made):
            return None
        again = self._option(RECOMPUTED, family, treatments | dict.fromkeys(made, RECOMPUTE))
        return replace(
            again,
            requires_kept=frozenset().union(*(each.kept for each in recipes)),
            leaves=frozenset(number for each in recipes for number, _ in each.held) | {RECORDING},
        )

    def leaves(self) -> dict[int, Option]:
        """Return, by number, what holds a leaf that recipes share, as long as one may need it.

        ``RECORDING`` holds nothing, and takes the time that every recipe needs.
        """
        spans: dict[int, Span] = {}
        for saving in self._profile.savings:
            for number, size in saving.recipe.held if saving.recipe else ():
                before = spans.get(number, Span(saving.saved, saving.released, 0.0))
                last = max(before.last, saving.released)
                spans[number] = Span(before.first, last, size.at(self._examples))
        found = {number: Option(HELD, {}, (span,), 0.0, 0.0) for number, span in spans.items()}
        if any(saving.recipe for saving in self._profile.savings):
            found[RECORDING] = Option(HELD, {}, (), self._profile.recording_ms, 0.0)
        return found

    def _option(
        self,
        level: str,
        family: Family,
        treatments: Mapping[Site, Treatment],
        follow: bool = False,
        requires: frozenset[Site] = frozenset(),
    ) -> Option:
        held = self._costs.spans_ms_noise(family, treatments, follow=follow)
        derived = (each for each in family if treatments.get(each.site) == DERIVED.get(each.need))
        kept = (each.teller for each in derived if each.site not in self._derivable and each.teller)
        return Option(level, treatments, *held, requires, frozenset(kept))

    def _treatments(self, family: Family, by_need: ByNeed) -> dict[Site, Treatment]:
        """Return treatments of sites not kept; a site whose tensors cannot share one is kept."""
        found: dict[Site, Treatment] = {}
        for saving in family:
            treatment = by_need.get(saving.need, KEEP)
            if saving.site in self._derivable and treatment != KEEP:
                treatment = DERIVED[saving.need]  # no bytes, and no noise of its own
            if not self._can(saving, treatment):
                treatment = KEEP
            if found.setdefault(saving.site, treatment) != treatment:
                found[saving.site] = KEEP
        return {site: treatment for site, treatment in found.items() if treatment != KEEP}

    def _may_narrow_scores(self, family: Family) -> bool:
        """True if the noise of few bits was measured at every coded q and k of the family."""
        level = coded_policy(LEAST_SCORE_BITS).by_need
        scores = {each.site for each in family if each.need is Need.SCORE}
        coded = scores & self._treatments(family, level).keys()
        return bool(coded) and coded <= self._profile.weights.keys()

    def _is_derivable(self, saving: Saving) -> bool:
        """True if it can be rederived whatever is done at the sites it is computed from."""
        return saving.need in DERIVED and self._yielding.issuperset(saving.parents or (None,))

    def _can(self, saving: Saving, treatment: Treatment) -> bool:
        return (
            treatment != KEEP
            and saving.treatable
            and treatment.method in self._allowed.methods
            and not (treatment.method is Method.SPILL and saving.reading is Reading.IN_PLACE)
            and (treatment.method is not Method.REDERIVE or saving.site in self._rederivable)
            and saving.tensor_bytes.at(self._examples) >= SMALL_BYTES
            and (treatment.method is not Method.PACK or saving.packed_bits > 0)
        )


def _codes_followed(family: Family, treatments: Mapping[Site, Treatment]) -> frozenset[Site] | None:
    """Return the sites outside the family whose codes its tensors are computed from; None: none."""
    # None too where a site also has codes of its own, which would be narrowed to its parents'.
    treated = (each for each in family if each.site in treatments)
    coded = [each for each in treated if treatments[each.site].method is not Method.REDERIVE]
    following = [each for each in coded if each.may_follow]
    own = {each.site for each in coded if not each.may_follow}
    if not following or not own.isdisjoint(each.site for each in following):
        return None
    parents = (each.parents or () for each in following)
    return frozenset().union(*parents) - {saving.site for saving in family}


def _sites_of_none_but(
    savings: tuple[Saving, ...], holds: Callable[[Saving], bool]
) -> frozenset[Site]:
    """Return the sites for all of whose tensors ``holds`` is true."""
    others = {each.site for each in savings if not holds(each)}
    return frozenset(each.site for each in savings) - others


def _yields_result(saving: Saving) -> bool:
    """True if a fused normalisation's saved value, kept or coded, yields its result."""
    is_read_in_place = saving.reading is Reading.IN_PLACE and saving.need is Need.NORM
    return is_read_in_place and saving.site.operator in _NORMALISATIONS and saving.treatable
