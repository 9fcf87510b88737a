"""What was measured of a model's step, in words that the planner reads: no torch, no device.

A step is a row of *moments*: the stretch between two events, an event being that
autograd saves a tensor (forward) or reads one back (backward). For every
moment the :class:`Timeline` knows the bytes alive beside parameters, gradients
and saved tensors; every :class:`Saving` knows from which moment to which it is
alive. Both are affine in the batch, so two small measured steps tell the peak
of a large one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from daf.core.policy import LOSSY, Method, Need, Reading, Site
from daf.core.reports import FusionReport


@dataclass(frozen=True, slots=True)
class Affine:
    """``fixed + per_example * examples``."""

    fixed: float
    per_example: float

    def at(self, examples: int) -> float:
        """The value at a batch of ``examples``."""
        return self.fixed + self.per_example * examples

    @staticmethod
    def through(points: Iterable[tuple[int, float]]) -> Affine:
        """The line through the two largest of (examples, value); through one, in proportion.

        A line that falls is noise: more examples never need less.
        """
        ordered = sorted(points)
        (last, high) = ordered[-1]
        if len(ordered) == 1:
            return Affine(0.0, high / last)
        (first, low) = ordered[-2]
        slope = max(0.0, (high - low) / (last - first))
        return Affine(high - slope * last, slope)


ZERO = Affine(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Saving:
    """One tensor that autograd saves in a step; moments are indices into the timeline.

    ``storage`` numbers the memory that it lies in, which several savings may
    share; ``storage_bytes`` is all of it, ``content`` numbers the part that this is: one code
    serves all savings of it. ``dies``: the moment in whose course
    the program itself lets go of that memory. It is read first in moment
    ``read`` and let go in the course of ``released``. ``call`` is the innermost
    module call around it (-1: none). ``parents``: with codes at these sites
    backward computes the tensor from them (design, section 4); None where it
    cannot. ``packed_bits`` per element is what integers packed to (0: unknown).
    ``reading``: how backward reads what stands for it, if that is a code. ``beside_bytes``
    are held with it whatever its treatment (a fused operator's mask). ``teller``: whose tensor
    tells this one if it is kept as it is, through a function that is not linear (a fused
    activation's input).
    """

    site: Site
    need: Need
    storage: int
    storage_bytes: Affine
    content: int
    elements: Affine
    tensor_bytes: Affine
    saved: int
    dies: int
    read: int
    released: int
    call: int
    treatable: bool = True
    parents: frozenset[Site] | None = None
    packed_bits: float = 0.0
    reading: Reading = Reading.WHOLE
    beside_bytes: Affine = ZERO
    teller: Site | None = None

    @property
    def may_follow(self) -> bool:
        """May it be computed from codes as narrow as theirs are? Attention's q and k may not."""
        return self.parents is not None and self.need is not Need.SCORE


def decoded_bytes(
    reading: Reading, tensor_bytes: float, chunk_bytes: int, part_bytes: float = 0.0
) -> float:
    """What reading a code brings to life beside what the operator itself takes.

    What is read in place is decoded ``part_bytes`` at a time, next to none on the processor.

    PyTorch's operators do not write over their result's gradient, as fused ones were seen to.
    A chunk is decoded while the gradient of the one before is copied away. A tensor that is one
    chunk has a gradient of its own, instead of one that is written over the result's.
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
    """One call of a module; ``parent`` is the index of the call that made it (-1: none).

    Moments ``first_forward`` to ``last_forward`` passed inside it. Its inputs
    are (storage, bytes); a storage of -1 is one that autograd never saved.
    ``replayable``: it can be run again, because its inputs stay as they are. ``operators``: how
    many ran inside, the module's own and those of modules inside it.
    """

    module: str
    parent: int
    forward_ms: Affine
    first_forward: int
    last_forward: int
    inputs: tuple[tuple[int, Affine], ...] = ()
    output_bytes: Affine = ZERO
    replayable: bool = True
    operators: int = 1


@dataclass(frozen=True, slots=True)
class DeviceSpeeds:
    """Measured speeds, in bytes of the uncoded tensor per second.

    One number per method whatever its width: widths differ by less than two
    measurements of one of them do. ``link``: between a device's memory and the host's (0:
    there is none, and nothing travels).
    """

    encode: Mapping[Method, float]
    decode: Mapping[Method, float]
    copy: float
    disk_write: float
    disk_read: float
    link: float = 0.0

    def encode_ms(self, method: Method, nbytes: float) -> float:
        """How long coding ``nbytes`` takes (milliseconds)."""
        return 1000.0 * nbytes / self.encode.get(method, self.copy)

    def decode_ms(self, method: Method, nbytes: float) -> float:
        """How long restoring ``nbytes`` takes (milliseconds)."""
        return 1000.0 * nbytes / self.decode.get(method, self.copy)

    def link_ms(self, nbytes: float) -> float:
        """How long ``nbytes`` travel one way (milliseconds)."""
        return 1000.0 * nbytes / (self.link or self.copy)


@dataclass(frozen=True, slots=True)
class Timeline:
    """Per moment the bytes alive beside what the planner decides on.

    ``transient``: neither parameters, nor gradients that existed when the
    moment began, nor saved tensors, but whatever the program itself still
    holds. ``gradient_bytes``: gradients that existed when the moment began.
    The first ``forward`` moments are the forward pass.
    """

    transient: tuple[Affine, ...]
    gradient_bytes: tuple[int, ...]
    forward: int


@dataclass(frozen=True, slots=True)
class Profile:
    """What a few small measured steps told about a model, a loss and a batch (bytes, ms).

    ``resident_bytes``: the process between two steps, without gradients and
    without the ``optimizer_bytes`` of state that do not exist yet.
    ``micro_batch_ms`` holds (examples, milliseconds) of forward and backward with
    everything kept, at growing sizes. ``weights`` says how much relative error
    at a site harms the gradient, beside other sites; sites not named count 1. A weight of 1
    with an error of 1 adds ``noise_per_weight`` of the batch's own noise (0: not
    measured). ``split_refusal``
    says why the batch must not be split, or is empty. ``update_bytes``:
    what the optimizer's own step holds in passing. ``passing_bytes``: the most that libraries may
    take in passing, beside tensors. ``recycles``: freed blocks
    are recycled under a hard limit (``memory.keeper``). ``part_bytes``: the most that a fused
    normalisation decodes at a time (0: next to nothing). ``chunk_bytes``: measured with fused
    operators, and with chunks of so many bytes where the whole batch is larger (0: without).
    ``fusions`` says which operators are fused, and why others are not.
    """

    floor_bytes: int
    resident_bytes: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    batch_size: int
    savings: tuple[Saving, ...]
    calls: tuple[CallProfile, ...]
    timeline: Timeline
    micro_batch_ms: tuple[tuple[int, float], ...]
    update_ms: float
    speeds: DeviceSpeeds
    weights: Mapping[Site, float]
    noise_per_weight: float = 0.0
    update_bytes: int = 0
    passing_bytes: Affine = ZERO
    split_refusal: str = ""
    recycles: bool = False
    chunk_bytes: int = 0
    part_bytes: int = 0
    fusions: tuple[FusionReport, ...] = ()

    @property
    def is_fused(self) -> bool:
        """Was it measured with fused and chunked operators?"""
        return self.chunk_bytes > 0

    @property
    def score_sites(self) -> frozenset[Site]:
        """Where q and k are saved of attention whose weights are computed again."""
        return frozenset(each.site for each in self.savings if each.need is Need.SCORE)

    @property
    def lossy_sites(self) -> frozenset[Site]:
        """Where codes may lose something."""
        lossy = (each for each in self.savings if each.need in LOSSY and each.treatable)
        return frozenset(each.site for each in lossy)

    @property
    def gains_by_fusing(self) -> bool:
        """Is any operator fused, or read in chunks?"""
        chunked = any(saving.reading is Reading.CHUNKS for saving in self.savings)
        return chunked or any(fusion.pattern for fusion in self.fusions)

    def forward_backward_ms(self, examples: int) -> float:
        """A piece's time with everything kept: between measured sizes straight, beyond on a line.

        Below the smallest measured size a piece is taken to be as long as that one's
        share by examples and fixed part together, never below in proportion.
        """
        points = sorted(self.micro_batch_ms)
        if examples <= points[0][0] or len(points) == 1:
            return points[0][1] * max(1.0, examples / points[0][0])
        for (first, low), (last, high) in pairwise(points):
            if examples <= last:
                return low + (high - low) * (examples - first) / (last - first)
        return max(points[-1][1], Affine.through(points).at(examples))

    def step_ms(self, micro_batch: int) -> float:
        """A whole step with everything kept, in pieces of ``micro_batch``, and its update."""
        whole, rest = divmod(self.batch_size, micro_batch)
        total = whole * self.forward_backward_ms(micro_batch)
        return self.update_ms + total + (self.forward_backward_ms(rest) if rest else 0.0)

    def passing_bytes_at(self, examples: int) -> int:
        """The most that libraries may take in passing, in a step of so many examples."""
        return max(0, int(self.passing_bytes.at(examples)))

    def weight(self, site: Site) -> float:
        """How much relative error at ``site`` counts."""
        return self.weights.get(site, 1.0)
