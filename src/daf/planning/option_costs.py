"""What an option holds at which moments, how long it takes, and the noise that it adds."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from daf.core.code_errors import relative_error
from daf.core.code_format import code_bytes
from daf.core.policy import KEEP, LOSSY, RECOMPUTE, Method, Need, Reading, Site, Treatment
from daf.core.profile import Profile, Recipe, Saving, decoded_bytes
from daf.planning.noise import noise_per_weight, served_weights

_FROM_OTHERS = frozenset({Method.REDERIVE, Method.RECOMPUTE})
_WITH_HEADERS = frozenset({Method.ROTATED, Method.MINMAX})


@dataclass(frozen=True, slots=True)
class Span:
    """``nbytes`` alive from the moment ``first`` to the moment ``last``, inclusive."""

    first: int
    last: int
    nbytes: float


class OptionCosts:
    """Costs at one micro-batch size; ``passing_bytes``: of the device, on their way to the host."""

    def __init__(self, profile: Profile, examples: int, passing_bytes: int) -> None:
        self._profile, self._speeds = profile, profile.speeds
        self._examples, self._passing_bytes = examples, passing_bytes
        self._served = served_weights(profile)
        self._unit = noise_per_weight(profile)
        self._by_site = {saving.site: saving for saving in profile.savings}
        self._released = last_moments(profile.savings)  # by storage, if it is kept

    def spans_ms_noise(
        self, family: Sequence[Saving], treatments: Mapping[Site, Treatment], *, follow: bool
    ) -> tuple[tuple[Span, ...], float, float]:
        """Return spans, ms and noise; if ``follow``, what other sites' codes yield has no code."""
        by_site = {saving.site: treatments.get(saving.site, KEEP) for saving in family}
        treated = [saving for saving in family if saving.site in treatments]
        spans = [
            *self._kept_spans([saving for saving in family if saving.site not in treatments]),
            *(
                Span(each.saved, each.released, each.beside_bytes.at(self._examples))
                for each in family
                if not by_site[each.site].on_host
            ),
            *self._read_spans([s for s in treated if by_site[s.site].method is Method.SPILL]),
        ]
        cost_ms = noise = 0.0
        coded: dict[tuple[object, ...], list[Saving]] = defaultdict(list)
        for saving in treated:
            treatment = treatments[saving.site]
            cost_ms += self._decode_ms(saving, treatment)
            if saving.recipe is not None and treatment == RECOMPUTE:
                beside, alive = saving.recipe.beside_bytes, saving.recipe.alive_bytes
                spans.append(Span(saving.saved, saving.released, beside.at(self._examples)))
                spans.append(Span(saving.read, saving.read, alive.at(self._examples)))
                spans += self._leaf_spans(saving.recipe, saving.released)
            # Dropped tensors count too: memory of their size is allocated, though never filled.
            spans.append(Span(saving.read, saving.released, self._decoded_bytes(saving)))
            is_followed = follow and saving.may_follow
            if treatment.method not in _FROM_OTHERS and not is_followed:
                if saving.need in LOSSY:
                    served = self._served.get(saving.site, 1.0)
                    noise += served * relative_error(treatment)
                coded[code_key(saving, treatment)].append(saving)
        for shared in coded.values():
            treatment = treatments[shared[0].site]
            spans.append(self._code_span(shared, treatment))
            encode_ms = self._speeds.encode_ms(treatment.method, self._bytes(shared[0]))
            cost_ms += encode_ms + self._link_ms(shared[0], treatment)
        return tuple(span for span in spans if span.nbytes > 0), cost_ms, noise * self._unit

    def _leaf_spans(self, recipe: Recipe, released: int) -> Iterator[Span]:
        """Yield leaves from the moment at which the sites that keep them would have freed them."""
        for leaf in (self._by_site[site] for site in recipe.kept if site in self._by_site):
            last = self._released[leaf.storage]
            if last < released:
                yield Span(last + 1, released, leaf.storage_bytes.at(self._examples))

    def _kept_spans(self, kept: list[Saving]) -> Iterator[Span]:
        """Yield kept memory from the moment at which the program itself would have freed it."""
        for sharing in _by_storage(kept):
            last = max(saving.released for saving in sharing)
            if sharing[0].dies <= last:
                yield Span(sharing[0].dies, last, sharing[0].storage_bytes.at(self._examples))
            for saving in sharing:
                if saving.reading is Reading.CHUNKS:  # not decoded, but a chunk has a gradient
                    yield Span(saving.read, saving.released, self._decoded_bytes(saving) / 2)

    def _read_spans(self, spilled: list[Saving]) -> Iterator[Span]:
        for saving in spilled:
            if saving.reading is Reading.CHUNKS:  # cannot overwrite its input: one gradient more
                yield Span(saving.read, saving.released, self._bytes(saving))
        for sharing in _by_storage(spilled):
            begin = min(saving.read for saving in sharing)
            last = max(saving.released for saving in sharing)
            least = min(map(self._decoded_bytes, sharing)) if len(sharing) == 1 else 0.0
            yield Span(begin, last, sharing[0].storage_bytes.at(self._examples) - least)

    def _decoded_bytes(self, saving: Saving) -> float:
        part_bytes = min(4 * saving.elements.at(self._examples), self._profile.part_bytes)
        chunk_bytes = self._profile.chunk_bytes
        return decoded_bytes(saving.reading, self._bytes(saving), chunk_bytes, part_bytes)

    def _code_span(self, shared: list[Saving], treatment: Treatment) -> Span:
        size = self.code_bytes(shared[0], treatment)
        if treatment.on_host:  # passing bytes are counted once for all; a larger code goes alone
            size = max(0, size - self._passing_bytes // 2)  # the other half is raw data's
        last = max(saving.released for saving in shared)
        return Span(min(saving.saved for saving in shared), last, size)

    def code_bytes(self, saving: Saving, treatment: Treatment) -> int:
        """Return the bytes of a tensor's code."""
        count = round(saving.elements.at(self._examples))
        if treatment.method in (Method.DROP, Method.SPILL):
            return 0
        if treatment.method is Method.PACK:
            return int(saving.packed_bits * count / 8)
        return code_bytes(count, treatment.bits, headers=treatment.method in _WITH_HEADERS)

    def _bytes(self, saving: Saving) -> float:
        return saving.tensor_bytes.at(self._examples)

    def _decode_ms(self, saving: Saving, treatment: Treatment) -> float:
        if saving.recipe is not None and treatment == RECOMPUTE:
            return saving.recipe.ms.at(self._examples)
        passes = 1 if treatment.method is Method.SPILL else max(1, len(saving.parents or ()))
        decode_ms = self._speeds.decode_ms(treatment.method, self._bytes(saving))
        return passes * decode_ms + self._link_ms(saving, treatment)

    def _link_ms(self, saving: Saving, treatment: Treatment) -> float:
        """Return the time one way, as if nothing hid it; trials measure how much is hidden."""
        if not treatment.on_host:
            return 0.0
        return self._speeds.link_ms(self.code_bytes(saving, treatment))


def last_moments(savings: Iterable[Saving]) -> dict[int, int]:
    """Return the last moment of each storage that these savings hold."""
    found: dict[int, int] = {}
    for saving in savings:
        found[saving.storage] = max(found.get(saving.storage, -1), saving.released)
    return found


def _by_storage(savings: list[Saving]) -> Iterable[list[Saving]]:
    found: dict[int, list[Saving]] = defaultdict(list)
    for saving in savings:
        found[saving.storage].append(saving)
    return found.values()


def code_key(saving: Saving, treatment: Treatment) -> tuple[object, ...]:
    """Return one key for equal content and treatment, unless an operator makes its own code."""
    if saving.need in (Need.NORM, Need.SMOOTH, Need.TWO_VALUED):
        return saving.content, treatment, saving.site, saving.saved
    return saving.content, treatment, saving.site if saving.need is Need.SIGN else None
