"""What can be done with each family of saved tensors, and what that costs.

A *family* is the sites whose tensors share memory: keeping one keeps all. Its options: *keep*;
*exact* (lossless treatments only); 8, 4, 3, 2 or 1 bits, as ``core.policy.coded_policy`` treats
each need; *spill*; and, where codes may travel, *exact* and every width in host memory. Attention's
q and k have 8 bits at every width, or 4 where the noise of that was measured.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from daf.core.code_errors import relative_error
from daf.core.code_format import code_bytes
from daf.core.policy import (
    DERIVED,
    KEEP,
    LEAST_SCORE_BITS,
    LOSSY,
    Method,
    Need,
    Reading,
    Site,
    Treatment,
    coded_policy,
    exact_policy,
    placed_on_host,
)
from daf.core.profile import Profile, Saving, decoded_bytes
from daf.core.units import pinned_bytes

WIDTHS = (8, 4, 3, 2, 1)
KEPT, EXACT, SPILLED = "keep", "exact", "spill"
_LEAST_SCORES = f"{LEAST_SCORE_BITS} with scores"
_ON_HOST = " on the host"
# Noise of errors of 1 everywhere, relative to the batch's own, until it is measured. The two are
# equal where every example has one product with each weight; ResNet-20 showed 0.2 to 0.7.
ASSUMED_NOISE = 1.0
SMALLEST_TREATED_BYTES = 4096  # execution keeps smaller tensors under every policy
_SPILL = Treatment(Method.SPILL)


@dataclass(frozen=True, slots=True)
class Allowed:
    """What execution can carry out and the user permits.

    ``must_release``: a whole batch's gradients are always released. ``host_bytes``: host memory for
    a device's codes (0: none). ``passing_bytes``: device memory of codes and raw data on their way.
    """

    methods: frozenset[Method] = frozenset(Method)
    widths: tuple[int, ...] = WIDTHS
    replay: bool = True
    release_gradients: bool = True
    must_release: bool = False
    host_bytes: int = 0
    passing_bytes: int = 0

    def within(self, tolerance: float) -> Allowed:
        """Return self, without codes if the tolerance is 0: noise measured as 0 is still noise."""
        return replace(self, widths=()) if tolerance == 0 else self


EVERYTHING = Allowed()


@dataclass(frozen=True, slots=True)
class Span:
    """``nbytes`` alive from the moment ``first`` to the moment ``last``, inclusive."""

    first: int
    last: int
    nbytes: float


@dataclass(frozen=True, slots=True)
class Option:
    """One way to treat a family: bytes held, time, and variance added relative to the batch's.

    ``level``: ``"keep"``, ``"exact"``, ``"spill"`` or a width as text, with a suffix for fewer bits
    of attention's q and k and for host memory. ``requires``: sites that must be coded beside it;
    ``requires_kept``: sites that must be kept.
    """

    level: str
    treatments: Mapping[Site, Treatment]
    spans: tuple[Span, ...]
    cost_ms: float
    noise: float
    requires: frozenset[Site] = frozenset()
    requires_kept: frozenset[Site] = frozenset()

    @property
    def coded_sites(self) -> frozenset[Site]:
        """Return the sites that hold a code, mask or packing under this option."""
        other = (Method.KEEP, Method.SPILL, Method.DROP, Method.REDERIVE)
        return frozenset(s for s, each in self.treatments.items() if each.method not in other)


def families(savings: Iterable[Saving]) -> list[tuple[Saving, ...]]:
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
    return [tuple(group) for group in groups.values()]


def _lossy(profile: Profile) -> list[Saving]:
    return [each for each in profile.savings if each.need in LOSSY and each.treatable]


def noise_per_weight(profile: Profile) -> float:
    """Return the noise of an error of 1 at a site of weight 1, relative to the batch's own."""
    if profile.noise_per_weight:
        return profile.noise_per_weight
    sites = {each.site for each in _lossy(profile)}
    return ASSUMED_NOISE / (sum(map(profile.weight, sites)) or 1.0)


def served_weights(profile: Profile) -> dict[Site, float]:
    """Return every lossy site's weight (per tensor) plus that of what its code serves."""
    lossy = _lossy(profile)
    saves = Counter(each.site for each in lossy)
    found = {site: profile.weight(site) / count for site, count in saves.items()}
    own = dict(found)
    for each in lossy:
        parents = [parent for parent in each.parents or () if parent in own]  # masks lose nothing
        for parent in parents:
            found[parent] += own[each.site] / len(parents) / saves[parent]
    return found


class OptionMaker:
    """Makes the options of families at one micro-batch size."""

    def __init__(self, profile: Profile, examples: int, allowed: Allowed) -> None:
        self._profile = profile
        self._examples = examples
        self._allowed = allowed
        exact = {**exact_policy().by_need, **DERIVED}
        self._levels: list[tuple[str, Mapping[Need, Treatment]]] = [(EXACT, exact)]
        self._levels += [(str(width), coded_policy(width).by_need) for width in allowed.widths]
        if LEAST_SCORE_BITS in allowed.widths and profile.weights:
            least = coded_policy(LEAST_SCORE_BITS, score_bits=LEAST_SCORE_BITS)
            self._levels.append((_LEAST_SCORES, least.by_need))
        if Method.SPILL in allowed.methods:
            self._levels.append((SPILLED, dict.fromkeys(Need, _SPILL)))
        self._served = served_weights(profile)
        self._unit = noise_per_weight(profile)
        self._telling = _sites_of_none_but(profile.savings, _tells_its_result)
        self._derivable = _sites_of_none_but(profile.savings, self._is_derivable)
        self._told = _sites_of_none_but(profile.savings, self._is_told)
        travelling = self._travelling_levels() if allowed.host_bytes else []
        self._levels += travelling
        self.sends_codes = bool(travelling)

    def _travelling_levels(self) -> list[tuple[str, Mapping[Need, Treatment]]]:
        """Return the levels whose codes the host can hold all at once, hence in any mixture."""
        found = [
            (level + _ON_HOST, {need: placed_on_host(each) for need, each in by_need.items()})
            for level, by_need in self._levels
            if level != SPILLED
        ]
        most = self._allowed.host_bytes
        return [(level, by_need) for level, by_need in found if self._on_host(by_need) <= most]

    def _on_host(self, by_need: Mapping[Need, Treatment]) -> int:
        """Return the bytes that the host must pin for everything under this level."""
        codes: dict[tuple[object, ...], int] = {}
        for saving in self._profile.savings:
            treatment = by_need.get(saving.need, KEEP)
            if self._can(saving, treatment) and treatment.on_host:
                codes[_code_key(saving, treatment)] = self._code_bytes(saving, treatment)
            beside = round(saving.beside_bytes.at(self._examples))
            if beside and treatment.on_host:
                codes["beside", saving.site, saving.storage] = beside
        return sum(map(pinned_bytes, codes.values()))

    def options(self, family: tuple[Saving, ...]) -> list[Option]:
        """Return the distinct options of a family, *keep* first."""
        found = [self._option(KEPT, family, {}, False, frozenset())]
        # Several widths may give the same treatments (masks have one); the first counts.
        seen: list[tuple[dict[Site, Treatment], frozenset[Site]]] = [({}, frozenset())]
        for level, by_need in self._levels:
            if level.startswith(_LEAST_SCORES) and not self._may_narrow_scores(family):
                continue
            treatments = self._treatments(family, by_need)
            is_coded = level.removesuffix(_ON_HOST) not in (EXACT, SPILLED)
            may_follow = is_coded and self._can_follow(family, treatments)
            for follow in (True, False) if may_follow else (False,):
                requires = self._requires(family, treatments) if follow else frozenset()
                if (treatments, requires) not in seen:
                    seen.append((treatments, requires))
                    found.append(self._option(level, family, treatments, follow, requires))
        return found

    def _treatments(
        self, family: tuple[Saving, ...], by_need: Mapping[Need, Treatment]
    ) -> dict[Site, Treatment]:
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

    def _may_narrow_scores(self, family: tuple[Saving, ...]) -> bool:
        """True if the noise of few bits was measured at every coded q and k of the family."""
        level = coded_policy(LEAST_SCORE_BITS).by_need
        scores = {each.site for each in family if each.need is Need.SCORE}
        coded = scores & self._treatments(family, level).keys()
        return bool(coded) and coded <= self._profile.weights.keys()

    def _is_derivable(self, saving: Saving) -> bool:
        """True if it can be rederived whatever is done at the sites it is computed from."""
        return saving.need in DERIVED and self._telling.issuperset(saving.parents or (None,))

    def _is_told(self, saving: Saving) -> bool:
        """True if it can be rederived, perhaps only while an input is kept."""
        return saving.teller is not None or self._is_derivable(saving)

    def _tellers(
        self, family: tuple[Saving, ...], treatments: Mapping[Site, Treatment]
    ) -> frozenset[Site]:
        """Return the sites that must be kept for these treatments."""
        derived = (each for each in family if treatments.get(each.site) == DERIVED.get(each.need))
        told = (each for each in derived if each.site not in self._derivable)
        return frozenset(each.teller for each in told if each.teller is not None)

    def _can(self, saving: Saving, treatment: Treatment) -> bool:
        return (
            treatment != KEEP
            and saving.treatable
            and treatment.method in self._allowed.methods
            and not (treatment.method is Method.SPILL and saving.reading is Reading.IN_PLACE)
            and (treatment.method is not Method.REDERIVE or saving.site in self._told)
            and saving.tensor_bytes.at(self._examples) >= SMALLEST_TREATED_BYTES
            and (treatment.method is not Method.PACK or saving.packed_bits > 0)
        )

    @staticmethod
    def _can_follow(family: tuple[Saving, ...], treatments: Mapping[Site, Treatment]) -> bool:
        """False where a site also has codes of its own, which would be narrowed to its parents'."""
        coded = _with_codes(family, treatments)
        following = {each.site for each in coded if each.may_follow}
        return bool(following) and following.isdisjoint(
            each.site for each in coded if not each.may_follow
        )

    @staticmethod
    def _requires(
        family: tuple[Saving, ...], treatments: Mapping[Site, Treatment]
    ) -> frozenset[Site]:
        """Return the sites outside the family whose codes its tensors are computed from."""
        treated = _with_codes(family, treatments)
        parents = (saving.parents or () for saving in treated if saving.may_follow)
        return frozenset().union(*parents) - {saving.site for saving in family}

    def _option(
        self,
        level: str,
        family: tuple[Saving, ...],
        treatments: Mapping[Site, Treatment],
        follow: bool,
        requires: frozenset[Site],
    ) -> Option:
        kept = [saving for saving in family if saving.site not in treatments]
        treated = [saving for saving in family if saving.site in treatments]
        beside = [each for each in family if not _on_host(treatments.get(each.site))]
        spans = [*self._kept_spans(kept), *self._spans_beside(beside)]
        cost_ms = noise = 0.0
        coded: dict[tuple[object, ...], list[Saving]] = defaultdict(list)
        spilled = [each for each in treated if treatments[each.site].method is Method.SPILL]
        spans += self._read_spans(spilled)
        for saving in treated:
            treatment = treatments[saving.site]
            cost_ms += self._decode_ms(saving, treatment)
            spans.append(self._decoded_span(saving))
            is_followed = follow and saving.may_follow
            if treatment.method is not Method.REDERIVE and not is_followed:
                noise += self._noise(saving, treatment)
                coded[_code_key(saving, treatment)].append(saving)
        for shared in coded.values():
            treatment = treatments[shared[0].site]
            spans.append(self._code_span(shared, treatment))
            cost_ms += self._encode_ms(shared[0], treatment)
        live = tuple(span for span in spans if span.nbytes > 0)
        kept_sites = self._tellers(family, treatments)
        return Option(level, treatments, live, cost_ms, noise * self._unit, requires, kept_sites)

    def _kept_spans(self, kept: list[Saving]) -> Iterator[Span]:
        """Yield kept memory from the moment at which the program itself would have freed it."""
        by_storage: dict[int, list[Saving]] = defaultdict(list)
        for saving in kept:
            by_storage[saving.storage].append(saving)
        for sharing in by_storage.values():
            last = max(saving.released for saving in sharing)
            size = sharing[0].storage_bytes.at(self._examples)
            if sharing[0].dies <= last:
                yield Span(sharing[0].dies, last, size)
            for saving in sharing:
                if saving.reading is Reading.CHUNKS:  # not decoded, but a chunk has a gradient
                    yield Span(saving.read, saving.released, self._decoded_bytes(saving) / 2)

    def _spans_beside(self, family: Iterable[Saving]) -> Iterator[Span]:
        for saving in family:
            yield Span(saving.saved, saving.released, saving.beside_bytes.at(self._examples))

    def _decoded_span(self, saving: Saving) -> Span:
        """Dropped tensors count too: memory of their size is allocated, though never filled."""
        return Span(saving.read, saving.released, self._decoded_bytes(saving))

    def _read_spans(self, spilled: Sequence[Saving]) -> Iterator[Span]:
        """Yield whole storages read from disk beyond what decoding would allocate.

        A chunked operator, which would overwrite its input, then has a gradient of its own.
        """
        by_storage: dict[int, list[Saving]] = defaultdict(list)
        for saving in spilled:
            by_storage[saving.storage].append(saving)
            if saving.reading is Reading.CHUNKS:
                yield Span(saving.read, saving.released, self._bytes(saving))
        for sharing in by_storage.values():
            begin = min(saving.read for saving in sharing)
            last = max(saving.released for saving in sharing)
            least = min(map(self._decoded_bytes, sharing)) if len(sharing) == 1 else 0.0
            yield Span(begin, last, sharing[0].storage_bytes.at(self._examples) - least)

    def _decoded_bytes(self, saving: Saving) -> float:
        part_bytes = min(4 * saving.elements.at(self._examples), self._profile.part_bytes)
        chunk_bytes = self._profile.chunk_bytes
        return decoded_bytes(saving.reading, self._bytes(saving), chunk_bytes, part_bytes)

    def _code_span(self, shared: list[Saving], treatment: Treatment) -> Span:
        first = min(saving.saved for saving in shared)
        last = max(saving.released for saving in shared)
        size = self._code_bytes(shared[0], treatment)
        if treatment.on_host:  # passing bytes are counted once for all; a larger code goes alone
            size = max(0, size - self._allowed.passing_bytes // 2)  # the other half is raw data's
        return Span(first, last, size)

    def _code_bytes(self, saving: Saving, treatment: Treatment) -> int:
        count = round(saving.elements.at(self._examples))
        if treatment.method in (Method.DROP, Method.SPILL):
            return 0
        if treatment.method is Method.PACK:
            return int(saving.packed_bits * count / 8)
        headers = treatment.method in _WITH_HEADERS
        return code_bytes(count, treatment.bits, headers=headers)

    def _noise(self, saving: Saving, treatment: Treatment) -> float:
        if saving.need not in LOSSY:
            return 0.0
        return self._served.get(saving.site, 1.0) * relative_error(treatment)

    def _bytes(self, saving: Saving) -> float:
        return saving.tensor_bytes.at(self._examples)

    def _encode_ms(self, saving: Saving, treatment: Treatment) -> float:
        if treatment.method is Method.SPILL:
            return 1000.0 * self._bytes(saving) / self._profile.speeds.disk_write
        if treatment.method is Method.DROP:
            return 0.0
        speeds = self._profile.speeds
        return speeds.encode_ms(treatment.method, self._bytes(saving)) + self._travel_ms(
            saving, treatment
        )

    def _decode_ms(self, saving: Saving, treatment: Treatment) -> float:
        if treatment.method is Method.SPILL:
            return 1000.0 * self._bytes(saving) / self._profile.speeds.disk_read
        if treatment.method is Method.DROP:
            return 0.0
        passes = max(1, len(saving.parents or ()))
        decode_ms = self._profile.speeds.decode_ms(treatment.method, self._bytes(saving))
        return passes * decode_ms + self._travel_ms(saving, treatment)

    def _travel_ms(self, saving: Saving, treatment: Treatment) -> float:
        """Return the time one way, as if nothing hid it; trials measure how much is hidden."""
        if not treatment.on_host:
            return 0.0
        return self._profile.speeds.link_ms(self._code_bytes(saving, treatment))


_NORMALISATIONS = frozenset({"batch_norm", "layer_norm", "rms_norm"})


def _sites_of_none_but(
    savings: tuple[Saving, ...], holds: Callable[[Saving], bool]
) -> frozenset[Site]:
    """Return the sites for all of whose tensors ``holds`` is true."""
    others = {each.site for each in savings if not holds(each)}
    return frozenset(each.site for each in savings) - others


def _tells_its_result(saving: Saving) -> bool:
    """True if a fused normalisation's saved value, kept or coded, yields its result."""
    is_read_in_place = saving.reading is Reading.IN_PLACE and saving.need is Need.NORM
    return is_read_in_place and saving.site.operator in _NORMALISATIONS and saving.treatable


def _on_host(treatment: Treatment | None) -> bool:
    return treatment is not None and treatment.on_host


def _code_key(saving: Saving, treatment: Treatment) -> tuple[object, ...]:
    """One code serves equal content and treatment, unless an operator makes its own code of it."""
    if saving.need in (Need.NORM, Need.SMOOTH, Need.TWO_VALUED):
        return saving.content, treatment, saving.site, saving.saved
    return saving.content, treatment, saving.site if saving.need is Need.SIGN else None


def _with_codes(family: tuple[Saving, ...], treatments: Mapping[Site, Treatment]) -> list[Saving]:
    """Return the savings whose treatment holds bytes."""
    treated = (saving for saving in family if saving.site in treatments)
    return [each for each in treated if treatments[each.site].method is not Method.REDERIVE]


_WITH_HEADERS = frozenset({Method.ROTATED, Method.MINMAX})
