"""What was measured of a model's step, for the planner.

A step is a row of *moments*, the stretches between events; an event is autograd saving a tensor
(forward) or reading one (backward). The :class:`Timeline` has each moment's bytes beside
parameters, gradients and saved tensors; a :class:`Saving` has the moments of its life. Both are
affine in the batch, so two small measured steps predict a large one's peak.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from daf.core.plan import Plan
from daf.core.policy import LOSSY, Method, Need, Reading, Site
from daf.core.reports import FusionReport


@dataclass(frozen=True, slots=True)
class Affine:
    """``fixed + per_example * examples``."""

    fixed: float
    per_example: float

    def at(self, examples: int) -> float:
        """Return the value at a batch of ``examples``."""
        return self.fixed + self.per_example * examples

    @staticmethod
    def through(points: Iterable[tuple[int, float]]) -> "Affine":
        """Return the rising line through the two largest points; through one, in proportion."""
        ordered = sorted(points)
        (last, high) = ordered[-1]
        if len(ordered) == 1:
            return Affine(0.0, high / last)
        (first, low) = ordered[-2]
        slope = max(0.0, (high - low) / (last - first))
        return Affine(high - slope * last, slope)


ZERO = Affine(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How cheap operations compute a saved tensor again."""

    kept: frozenset[Site]  # whose tensors they start from
    held: tuple[tuple[int, Affine], ...]  # number and bytes of others, one for all recipes
    beside_bytes: Affine  # held for this one alone
    alive_bytes: Affine  # beside the result while it is computed
    ms: Affine


@dataclass(frozen=True, slots=True)
class Saving:
    """One tensor that autograd saves in a step; moments are indices into the timeline."""

    site: Site
    need: Need
    storage: int  # the number of its memory, which several savings may share
    storage_bytes: Affine  # of all that memory
    content: int  # the number of its part; one code serves all savings of one content
    elements: Affine
    tensor_bytes: Affine
    saved: int
    dies: int  # the moment in which the program itself frees the memory
    read: int  # the moment of its first read
    released: int  # the moment in which autograd releases it
    call: int  # the innermost module call (-1: none)
    treatable: bool = True
    parents: frozenset[Site] | None = None  # sites whose codes yield it (design, section 4)
    packed_bits: float = 0.0  # of packed integers, per element (0: unknown)
    reading: Reading = Reading.WHOLE  # how backward reads its code
    beside_bytes: Affine = ZERO  # held under every treatment (a fused operator's mask)
    teller: Site | None = None  # whose kept tensor yields it (a fused activation's input)
    recipe: Recipe | None = None  # None: no cheap operations compute it again

    @property
    def may_follow(self) -> bool:
        """True if codes as narrow as its parents' may replace it; not for attention's q and k."""
        return self.parents is not None and self.need is not Need.SCORE


def decoded_bytes(
    reading: Reading, tensor_bytes: float, chunk_bytes: int, part_bytes: float = 0.0
) -> float:
    """Return the bytes that reading a code allocates beside what the operator itself takes.

    In place, ``part_bytes`` are decoded at a time, next to none on the CPU. PyTorch's operators do
    not write over their result's gradient, as fused ones do. A chunk is decoded while the gradient
    of the one before is copied; a single chunk has a gradient of its own.
    """
    if reading is Reading.IN_PLACE:
        return part_bytes
    if reading is Reading.WHOLE:
        return tensor_bytes
    if reading is Reading.APART:
        return 2 * tensor_bytes
    return 2 * tensor_bytes / max(1, math.ceil(tensor_bytes / chunk_bytes))


@dataclass(frozen=True, slots=True)
class CallProfile:
    """One call of a module, in the moments ``first_forward`` to ``last_forward``."""

    module: str
    parent: int  # the index of the caller's call (-1: none)
    forward_ms: Affine
    first_forward: int
    last_forward: int
    inputs: tuple[tuple[int, Affine], ...] = ()  # (storage, bytes); -1: autograd never saved it
    output_bytes: Affine = ZERO
    replayable: bool = True  # proven to do the same again from inputs that stay unchanged
    operators: int = 1  # how many ran inside, nested modules included
    replay_refusal: str = ""  # why it is not replayable


@dataclass(frozen=True, slots=True)
class DeviceSpeeds:
    """Measured speeds, in bytes of the uncoded tensor per second."""

    encode: Mapping[Method, float]  # by method: widths differ by less than two measurements of one
    decode: Mapping[Method, float]
    copy: float
    disk_write: float
    disk_read: float
    link: float = 0.0  # between device and host memory (0: none, so nothing travels)

    def encode_ms(self, method: Method, nbytes: float) -> float:
        """Return the time of coding or writing ``nbytes``."""
        if method is Method.RANGED:  # one pass more, for the range
            return self.encode_ms(Method.MINMAX, nbytes) + 1000.0 * nbytes / self.copy
        own = self.disk_write if method is Method.SPILL else self.encode.get(method, self.copy)
        return 0.0 if method is Method.DROP else 1000.0 * nbytes / own

    def decode_ms(self, method: Method, nbytes: float) -> float:
        """Return the time of decoding or reading ``nbytes``."""
        own = self.disk_read if method is Method.SPILL else self.decode.get(method, self.copy)
        return 0.0 if method is Method.DROP else 1000.0 * nbytes / own

    def link_ms(self, nbytes: float) -> float:
        """Return the time of moving ``nbytes`` one way."""
        return 1000.0 * nbytes / (self.link or self.copy)


@dataclass(frozen=True, slots=True)
class Timeline:
    """Per moment, the bytes alive beside what the planner decides on."""

    transient: tuple[Affine, ...]  # all but parameters, saved tensors and ``gradient_bytes``
    gradient_bytes: tuple[int, ...]  # of gradients that existed when the moment began
    forward: int  # how many moments, the first ones, are the forward pass


@dataclass(frozen=True, slots=True)
class Profile:
    """What a few small measured steps yield of a model, a loss and a batch (bytes, ms)."""

    floor_bytes: int
    resident_bytes: int  # between steps, without gradients and ``optimizer_bytes``
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int  # of state that does not exist yet
    batch_size: int
    savings: tuple[Saving, ...]
    calls: tuple[CallProfile, ...]
    timeline: Timeline
    micro_batch_ms: tuple[tuple[int, float], ...]  # (examples, ms) of both passes, everything kept
    update_ms: float
    speeds: DeviceSpeeds
    weights: Mapping[Site, float]  # harm of relative error by site (default 1)
    noise_per_weight: float = 0.0  # of error 1 at weight 1, over the batch's own (0: not measured)
    update_bytes: int = 0  # the optimizer step's transient
    passing_bytes: Affine = ZERO  # the most that libraries take in passing, beside tensors
    split_refusal: str = ""  # why the batch must not be split
    proof_bytes: int = 0  # the least budget with room to show that it may be; 0: none is needed
    least_micro_batch: int = 1  # examples that run together
    grows_evenly: bool = False  # surely: so small steps foretell the whole batch
    recycles: bool = False  # freed blocks, under a hard limit (``memory.process_limit``)
    chunk_bytes: int = 0  # of the whole batch with fused operators (0: measured without)
    part_bytes: int = 0  # the most that a fused normalisation decodes at a time
    recording_ms: float = 0.0  # of the graph of values, in a micro-batch that recomputes
    fusions: tuple[FusionReport, ...] = ()  # which operators are fused, and why others are not

    @property
    def is_fused(self) -> bool:
        """True if measured with fused and chunked operators."""
        return self.chunk_bytes > 0

    @property
    def replay_refusals(self) -> dict[str, str]:
        """Why modules, by path, are not replayed."""
        return {each.module: each.replay_refusal for each in self.calls if each.replay_refusal}

    @property
    def score_sites(self) -> frozenset[Site]:
        """The sites of recomputed attention's q and k."""
        return frozenset(each.site for each in self.savings if each.need is Need.SCORE)

    @property
    def lossy_savings(self) -> list[Saving]:
        """The savings whose codes may lose something."""
        return [each for each in self.savings if each.need in LOSSY and each.treatable]

    @property
    def lossy_sites(self) -> frozenset[Site]:
        """The sites where codes may lose something."""
        return frozenset(each.site for each in self.lossy_savings)

    @property
    def gains_by_fusing(self) -> bool:
        """True if any operator is fused or reads in chunks."""
        chunked = any(saving.reading is Reading.CHUNKS for saving in self.savings)
        return chunked or any(fusion.pattern for fusion in self.fusions)

    @property
    def plain_saved_bytes(self) -> int:
        """What plain PyTorch would save of the whole batch."""
        storages = {each.storage: each.storage_bytes for each in self.savings}
        return int(sum(each.at(self.batch_size) for each in storages.values()))

    def forward_backward_ms(self, examples: int) -> float:
        """Return a micro-batch's time with everything kept, interpolated between measured sizes."""
        points = sorted(self.micro_batch_ms)
        if examples <= points[0][0] or len(points) == 1:
            return points[0][1] * max(1.0, examples / points[0][0])
        for (first, low), (last, high) in pairwise(points):
            if examples <= last:
                return low + (high - low) * (examples - first) / (last - first)
        return max(points[-1][1], Affine.through(points).at(examples))

    def step_ms(self, micro_batch: int) -> float:
        """Return a whole step's time in micro-batches with everything kept, update included."""
        whole, rest = divmod(self.batch_size, micro_batch)
        total = whole * self.forward_backward_ms(micro_batch)
        return self.update_ms + total + (self.forward_backward_ms(rest) if rest else 0.0)

    def passing_bytes_at(self, examples: int) -> int:
        """Return the most that libraries take in passing at ``examples``."""
        return max(0, int(self.passing_bytes.at(examples)))

    def weight(self, site: Site) -> float:
        """Return the harm of relative error at ``site``, relative to other sites."""
        return self.weights.get(site, 1.0)


@dataclass(frozen=True, slots=True)
class Profiles:
    """The profile of PyTorch's own operators, and that of fused ones where it was measured."""

    own: Profile
    fused: Profile | None = None

    @property
    def every(self) -> tuple[Profile, ...]:
        """The profiles that there are."""
        return (self.own,) if self.fused is None else (self.own, self.fused)

    def of(self, plan: Plan) -> Profile:
        """Return the profile of the operators that a plan runs."""
        return self.fused if plan.policy.fused and self.fused is not None else self.own

    def changed(self, change: Callable[[Profile], Profile]) -> "Profiles":
        """Return both with a change."""
        return Profiles(*map(change, self.every))

    def beside(self, nbytes: int) -> "Profiles":
        """Return both of steps beside which so many more bytes are held."""
        return self.changed(lambda each: replace(each, resident_bytes=each.resident_bytes + nbytes))
