"""What is seen of one step: saves, module calls, moments and times; and what a watcher is told.

A *moment* begins with every operator of the forward pass and every tensor that backward reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from torch import Tensor

from daf.core.policy import Method, Need, Reading, Site, Treatment
from daf.saved_tensors.derivation import Derivation
from daf.saved_tensors.ledger import Source
from daf.saved_tensors.packed_tensor import PackedTensor, SavedTensor

NO_CALL = -1
SMALLEST_TIMED_BYTES = 1 << 18


@dataclass(slots=True)
class ObservedTensor:
    """One save: its site, what it needs and got, and the moments of its life.

    ``content`` numbers the part of that memory that was saved; one code serves all of it.
    ``dies``: the first moment at which only autograd holds its memory. ``beside_bytes``
    are held with it whatever the treatment. ``teller``: whose tensor, if that is kept, tells
    this one through a function that is not linear.
    """

    site: Site
    need: Need
    treatment: Treatment
    storage: int
    storage_bytes: int
    content: int
    tensor_bytes: int
    elements: int
    held_bytes: int
    treatable: bool
    parents: frozenset[Site] | None
    call: int
    saved: int
    dies: int = -1
    read: int = -1
    released: int = -1
    reading: Reading = Reading.WHOLE
    beside_bytes: int = 0
    teller: Site | None = None


@dataclass(slots=True)
class ModuleCall:
    """One call of a module; ``inputs`` are (storage or -1, bytes) of tensors that are computed.

    ``replayable``: none of its inputs was changed in place afterwards.
    """

    module: str
    parent: int
    first_moment: int
    last_moment: int = -1
    forward_ms: float = 0.0
    inputs: list[tuple[int, int]] = field(default_factory=list)
    output_bytes: int = 0
    replayable: bool = True

    @property
    def operators(self) -> int:
        """How many ran inside: each began a moment."""
        return self.last_moment - self.first_moment + 1


@dataclass(slots=True)
class MethodTime:
    """Bytes of tensors that went through a method, and how long that took.

    ``timed_bytes`` and ``timed_ms`` leave out tensors so small that calling takes most of it.
    """

    nbytes: int = 0
    ms: float = 0.0
    timed_bytes: int = 0
    timed_ms: float = 0.0

    def add(self, nbytes: int, ms: float) -> None:
        """One more tensor."""
        self.nbytes += nbytes
        self.ms += ms
        if nbytes >= SMALLEST_TIMED_BYTES:
            self.timed_bytes += nbytes
            self.timed_ms += ms


@dataclass(slots=True)
class Observation:
    """One observed step of ``examples`` examples (bytes; milliseconds).

    Per moment: the peak of what was alive beyond what was before the step
    (``peak_bytes``), and the gradients that existed when it began. The first
    ``forward`` moments are the forward pass. ``step_ms`` is forward and backward
    without ``coding_ms``, which encoding and decoding took, as far as no operator does it
    itself. ``chunk_bytes``: chunks of tensors that are read so had at most as many,
    ``part_bytes`` parts that a fused activation decodes, ``norm_part_bytes`` a normalisation's.
    ``process_bytes``: by how much the process's peak passed what it held before.
    """

    examples: int
    peak_bytes: list[int] = field(default_factory=list)
    gradient_bytes: list[int] = field(default_factory=list)
    saves: list[ObservedTensor] = field(default_factory=list)
    calls: list[ModuleCall] = field(default_factory=list)
    encode: dict[Method, MethodTime] = field(default_factory=dict)
    decode: dict[Method, MethodTime] = field(default_factory=dict)
    forward: int = 0
    step_ms: float = 0.0
    plain_bytes: int = 0
    chunk_bytes: int = 0
    part_bytes: int = 0
    norm_part_bytes: int = 0
    process_bytes: int = 0

    @property
    def coding_ms(self) -> float:
        """What encoding and decoding took."""
        return sum(each.ms for each in (*self.encode.values(), *self.decode.values()))


class Save(NamedTuple):
    """A tensor was saved and is stood for by ``held``, which took ``ms`` to make.

    ``ms`` is None where an operator made it while it did other things. ``is_over``: the
    tensor's memory already holds the operator's result. ``beside_bytes``: held with it
    whatever the treatment. ``tells``: what another saved tensor is of this one;
    ``told``: what this one is of another.
    """

    saved: SavedTensor
    tensor: Tensor
    held: PackedTensor
    site: Site
    need: Need
    treatment: Treatment
    sources: tuple[Source, ...]
    held_bytes: int
    ms: float | None
    treatable: bool
    is_over: bool = False
    beside_bytes: int = 0
    tells: Derivation | None = None
    told: Derivation | None = None


class Watcher(Protocol):
    """What a capture tells whoever watches it."""

    def now_s(self) -> float:
        """A clock, of which differences are told; seconds."""

    def moment(self) -> None:
        """An operator of the forward pass begins."""

    def saved(self, save: Save) -> None:
        """A tensor was saved."""

    def reading(self, saved: SavedTensor) -> None:
        """Backward reads it."""

    def has_read(self, saved: SavedTensor, ms: float) -> None:
        """It was read, which took ``ms``."""


def watched(
    unpack: Callable[[SavedTensor], Tensor], watcher: Watcher
) -> Callable[[SavedTensor], Tensor]:
    """The hook that autograd calls in backward, under a watcher's eyes."""

    def unpack_watched(saved: SavedTensor) -> Tensor:
        watcher.reading(saved)
        start_s = watcher.now_s()
        tensor = unpack(saved)
        watcher.has_read(saved, 1000.0 * (watcher.now_s() - start_s))
        return tensor

    return unpack_watched
