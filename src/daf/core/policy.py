"""What is done at every site: needs, methods, treatments, and policies that map needs to them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache
from types import MappingProxyType

from daf.core.errors import UnknownNameError


class Need(StrEnum):
    """What an operator's backward needs of a tensor it saves: the *kind of site*."""

    LINEAR = "linear"  # enters the gradient once and linearly: inputs of conv, linear, mul
    NORM = "norm"  # input of a normalisation; enters twice
    PRODUCT = "product"  # activation times activation: attention's q, k, v, out
    SCORE = "score"  # q and k of attention whose weights are computed again in backward
    PROBABILITY = "probability"  # softmax output: zero must stay zero
    SMOOTH = "smooth"  # only h'(x) of a smooth activation
    SIGN = "sign"  # only on which side of a threshold each element lies
    TWO_VALUED = "two_valued"  # floats that take two values: dropout's noise
    INTEGER = "integer"  # bool, indices, small integers
    INPUT = "input"  # a replayed call starts from it
    SHAPE = "shape"  # content is never read
    EXACT = "exact"  # anything not known to tolerate less


# Needs whose codes add noise to the gradient.
LOSSY = frozenset({Need.LINEAR, Need.NORM, Need.PRODUCT, Need.SCORE, Need.PROBABILITY, Need.SMOOTH})


class Method(StrEnum):
    """How a saved tensor is stored."""

    KEEP = "keep"
    ROTATED = "rotated"
    MINMAX = "minmax"
    MASK = "mask"
    DERIVATIVE = "derivative"
    PACK = "pack"
    DROP = "drop"
    REDERIVE = "rederive"  # from what is held for another operator; else kept
    SPILL = "spill"
    REPLAY = "replay"
    RECOMPUTE = "recompute"  # by forward's operations, from what is kept
    RANGED = "ranged"  # DAF as published; only its own policies choose it
    REGISTERED = "registered"  # by a codec from outside the library


class Reading(StrEnum):
    """How backward reads what replaces a saved tensor."""

    WHOLE = "whole"  # decoded first
    CHUNKS = "chunks"  # a chunk of the batch is decoded at a time
    IN_PLACE = "in place"  # block by block where it lies, never decoded
    APART = "apart"  # kept: in place, written over its result's gradient; decoded: by PyTorch's own


@dataclass(frozen=True, slots=True)
class Treatment:
    """What the plan does at a site: a method and its bits."""

    method: Method
    bits: int = 0
    by_channel: bool = False  # a range per channel, not per tensor (*ranged*)
    on_host: bool = False  # a GPU tensor's code waits in host memory
    whole: bool = False  # no plane may be evicted
    codec: str = ""  # a registered codec's name (*registered*)

    @property
    def is_code(self) -> bool:
        """True if values are coded with an error."""
        return self.method in (Method.ROTATED, Method.MINMAX)


KEEP, RECOMPUTE = Treatment(Method.KEEP), Treatment(Method.RECOMPUTE)

# What backward's need of a tensor allows to hold in its place, beside SPILL, which gives every bit.
_VALUE_METHODS = frozenset(
    {Method.KEEP, Method.ROTATED, Method.MINMAX, Method.RANGED, Method.REGISTERED}
)
SOUND: Mapping[Need, frozenset[Method]] = {
    Need.LINEAR: _VALUE_METHODS | {Method.REDERIVE},
    Need.NORM: _VALUE_METHODS,
    Need.PRODUCT: _VALUE_METHODS,
    Need.SCORE: _VALUE_METHODS,
    Need.PROBABILITY: _VALUE_METHODS,
    Need.SMOOTH: frozenset({Method.KEEP, Method.DERIVATIVE}),
    Need.SIGN: frozenset({Method.KEEP, Method.MASK}),
    Need.TWO_VALUED: frozenset({Method.KEEP, Method.MASK}),
    Need.INTEGER: frozenset({Method.KEEP, Method.PACK}),
    Need.INPUT: _VALUE_METHODS,
    Need.SHAPE: frozenset({Method.KEEP, Method.DROP}),
    Need.EXACT: frozenset({Method.KEEP}),
}


def is_sound(method: Method, need: Need) -> bool:
    """True if what a method leaves of a tensor satisfies the need."""
    return method in SOUND[need] or method is Method.SPILL


SMALL_BYTES = 4096  # smaller tensors are kept: their codes' headers and objects cost as much

# DAF's own operators, by the names of their packages.
CHUNKED = "chunked"
FUSED_OPERATORS = frozenset({"batch_norm", "row_norm", "activation", "linear_cross_entropy"})
PLANNED_OPERATORS = FUSED_OPERATORS | {CHUNKED}


@dataclass(frozen=True, slots=True)
class Site:
    """One place where autograd saves a tensor; stable from step to step."""

    module: str  # the path in ``model.named_modules()``
    operator: str  # the torch function's name
    call: int  # counts that operator within the module's call
    save: int  # counts this call's saves

    def __str__(self) -> str:
        return f"{self.module or '<model>'}:{self.operator}#{self.call}[{self.save}]"


@dataclass(frozen=True, slots=True)
class Policy:
    """A treatment for every kind of site, with exceptions for single sites.

    ``chunk_bytes``: the most of its input that a chunked operator decodes at a time, and the chunk
    of a kept input; None: a size of negligible cost, and a kept input is used whole.
    """

    name: str
    by_need: Mapping[Need, Treatment]
    by_site: Mapping[Site, Treatment] = field(default_factory=lambda: MappingProxyType({}))
    rederive: bool = True  # one code may serve a normalisation, its activation and what follows
    operators: frozenset[str] = frozenset()  # the fused and chunked ones that replace PyTorch's
    weights: Mapping[Site, float] = field(default_factory=lambda: MappingProxyType({}))
    replayed: frozenset[str] = frozenset()  # modules that keep inputs only; backward runs them
    chunk_bytes: int | None = None
    recomputes: bool = False  # what is kept: from what is kept anyway, where that is cheap
    is_planned: bool = False  # ``by_site`` is of what profiling saw

    @property
    def fused(self) -> bool:
        """True if any operator is fused."""
        return bool(self.operators - {CHUNKED})

    @property
    def chunked(self) -> bool:
        """True if large operators process their batch in chunks."""
        return CHUNKED in self.operators

    @property
    def records_values(self) -> bool:
        """True if any tensor may be recomputed, so that forward's operations must be known."""
        return self.recomputes or RECOMPUTE in self.by_site.values()

    @property
    def on_host(self) -> bool:
        """True if any code may wait in host memory."""
        return any(each.on_host for each in (*self.by_need.values(), *self.by_site.values()))

    def weight(self, site: Site) -> float:
        """Return the harm of relative error at a site (default 1), which decides on eviction."""
        return self.weights.get(site, 1.0)

    def changed(self, change: Callable[[Treatment], Treatment]) -> "Policy":
        """Return the policy with every treatment changed."""
        by_need = {need: change(each) for need, each in self.by_need.items()}
        by_site = {site: change(each) for site, each in self.by_site.items()}
        return replace(self, by_need=MappingProxyType(by_need), by_site=MappingProxyType(by_site))

    def treatment(self, need: Need, site: Site) -> Treatment:
        """Return the treatment of one site.

        What a plan chose for the site is left where it is unsound: its operator goes another way
        than when it was measured (attention of fewer examples, say, is not chunked), and saves
        something else there. What anybody else asked for is returned, and refused as unsound.
        """
        if (chosen := self.by_site.get(site)) is None:
            return self.by_need.get(need, KEEP)
        is_left = self.is_planned and chosen != RECOMPUTE and not is_sound(chosen.method, need)
        return self.by_need.get(need, KEEP) if is_left else chosen

    def of_piece(self, examples: int, micro_batch: int) -> "Policy":
        """Return the policy with as many chunks in a smaller piece: operators go the same way."""
        if self.chunk_bytes is None or examples >= micro_batch:
            return self
        return replace(self, chunk_bytes=max(1, self.chunk_bytes * examples // micro_batch))


# Of which every bit comes back.
EXACT_CODES = MappingProxyType(
    {Need.TWO_VALUED: Treatment(Method.MASK, 1), Need.INTEGER: Treatment(Method.PACK)}
)
_EXACT = {**EXACT_CODES, Need.SIGN: Treatment(Method.MASK, 1), Need.SHAPE: Treatment(Method.DROP)}
DERIVED = {Need.LINEAR: Treatment(Method.REDERIVE)}  # exact if all that it is derived from is


@cache
def plain_policy() -> Policy:
    """Return the policy that keeps every saved tensor, as PyTorch does."""
    return Policy("plain", MappingProxyType({}), rederive=False)


def exact_policy() -> Policy:
    """Return the policy of treatments that keep every gradient bit."""
    return Policy("exact", MappingProxyType(dict(_EXACT)), rederive=False)


SCORE_BITS = 8
LEAST_SCORE_BITS = 4  # below, codes of q and k bias the gradient (design, section 4)


def coded_policy(bits: int, *, score_bits: int = SCORE_BITS) -> Policy:
    """Return ``bits`` (1 to 8) per element wherever a lossy code is sound, more where it must be.

    ``score_bits`` (4 to 8): of recomputed attention's q and k; fewer than the default only where
    their noise was measured. Raises UnknownNameError or ValueError if either is out of range.
    """
    if bits not in range(1, 9):
        raise UnknownNameError(f"asked for {bits!r} bits; codes have 1 to 8 bits, or 'exact'")
    if score_bits not in range(LEAST_SCORE_BITS, 9):
        raise ValueError(f"asked for {score_bits!r} bits of attention's q and k; they have 4 to 8")
    lossy = {
        Need.LINEAR: _value(bits),
        Need.NORM: _value(bits),
        Need.PRODUCT: _value(max(bits, 4)),
        Need.SCORE: replace(_value(score_bits), whole=score_bits <= 4),  # others stay whole anyway
        # Read twice: a coarser code's squared error would be a bias, which no sensitivity shows.
        Need.PROBABILITY: Treatment(Method.MINMAX, 8),
        Need.SMOOTH: Treatment(Method.DERIVATIVE, min(max(bits, 2), 4)),
    }
    return Policy(f"{bits}-bit", MappingProxyType(_EXACT | lossy))


def ranged_policy(bits: int, ranges: str) -> Policy:
    """Return ``coded_policy`` with min-max codes of the ``ranges`` "tensor" or "channel"."""

    def ranged(treatment: Treatment) -> Treatment:
        by_channel = ranges == "channel"
        return (
            Treatment(Method.RANGED, treatment.bits, by_channel) if treatment.is_code else treatment
        )

    return replace(coded_policy(bits).changed(ranged), name=f"{bits}-bit {ranges}s")


def with_fused_operators(policy: Policy, *, chunked: bool = True) -> Policy:
    """Return the policy with fused operators; an exact one also rederives from their inputs."""
    fused = replace(policy, operators=PLANNED_OPERATORS if chunked else FUSED_OPERATORS)
    if policy.name != exact_policy().name:
        return fused
    return replace(fused, by_need=MappingProxyType(_EXACT | DERIVED), rederive=True)


def with_chunked_operators(
    policy: Policy, chunk_bytes: int | None = None, *, chunked: bool = True
) -> Policy:
    """Return the policy with or without chunked operators; ``chunk_bytes`` as in ``Policy``."""
    others = policy.operators - {CHUNKED}
    operators = others | {CHUNKED} if chunked else others
    return replace(policy, operators=operators, chunk_bytes=chunk_bytes)


def with_planned_operators(policy: Policy, chunk_bytes: int) -> Policy:
    """Return the policy with the fused and chunked operators that plans assume."""
    return replace(policy, operators=PLANNED_OPERATORS, chunk_bytes=chunk_bytes)


def with_host_codes(policy: Policy) -> Policy:
    """Return the policy with all codes of GPU tensors in host memory."""
    return policy.changed(placed_on_host)


def placed_on_host(treatment: Treatment) -> Treatment:
    """Return the treatment with its code, if it has one, in host memory."""
    return replace(treatment, on_host=True) if treatment.method in _TRAVELLING else treatment


_TRAVELLING = frozenset(
    {Method.ROTATED, Method.MINMAX, Method.RANGED, Method.MASK, Method.DERIVATIVE, Method.PACK}
)


def _value(bits: int) -> Treatment:
    return Treatment(Method.ROTATED if bits <= 4 else Method.MINMAX, bits)


def policy_for(bits: int | str) -> Policy:
    """Return the policy of 1 to 8, plain, exact or ``"<n>-bit"``; UnknownNameError for others."""
    if bits == "plain":
        return plain_policy()
    if bits == "exact":
        return replace(exact_policy(), recomputes=True)
    if isinstance(bits, bool) or not isinstance(bits, (int, str)):
        raise UnknownNameError(f"asked for bits={bits!r}; give 1 to 8, 'exact', 'plain' or '4-bit'")
    if isinstance(bits, int):
        return coded_policy(bits)
    width, _, suffix = bits.partition("-")
    if suffix != "bit" or not width.isdigit():
        raise UnknownNameError(f"no policy is named {bits!r}; known: plain, exact, 1-bit ... 8-bit")
    return coded_policy(int(width))
