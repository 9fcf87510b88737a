"""The observation of one step: saves, module calls, moments and times; and the watcher's interface.

A *moment* begins with every operator of the forward pass and every tensor that backward reads.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from torch import Tensor

from daf.core.policy import Method, Need, Reading, Site, Treatment
from daf.saved_tensors.ledger import Source
from daf.saved_tensors.packed_tensor import Derivation, PackedTensor, SavedTensor

NO_CALL = -1
SMALLEST_TIMED_BYTES = 1 << 18


class ObservedRecipe(NamedTuple):
    """What a recomputed tensor was computed from, when backward read it."""

    leaves: dict[int, int]  # bytes by the number of their storage; constants do not count
    copied_bytes: int  # of small constants, and of what forward has written over since
    alive_bytes: int  # beside the result while it is computed


@dataclass(slots=True)
class ObservedTensor:
    """One save: its site, need and treatment, and the moments of its life."""

    site: Site
    need: Need
    treatment: Treatment
    storage: int
    storage_bytes: int
    content: int  # numbers the saved part of the memory; one code serves all of it
    tensor_bytes: int
    elements: int
    held_bytes: int
    treatable: bool
    parents: frozenset[Site] | None
    call: int
    saved: int
    dies: int = -1  # the first moment at which only autograd holds its memory
    read: int = -1
    released: int = -1
    reading: Reading = Reading.WHOLE
    beside_bytes: int = 0  # held with it whatever the treatment
    teller: Site | None = None  # whose tensor, if kept, yields this one by a nonlinear function
    recipe: ObservedRecipe | None = None
    read_ms: float = 0.0


@dataclass(slots=True)
class ModuleCall:
    """One call of a module; ``inputs`` are (storage or -1, bytes) of computed tensors."""

    module: str
    parent: int
    first_moment: int
    last_moment: int = -1
    forward_ms: float = 0.0
    inputs: list[tuple[int, int]] = field(default_factory=list)
    output_bytes: int = 0
    replayable: bool = True
    replay_refusal: str = ""  # why it is not replayable

    def refuse(self, reason: str) -> None:
        """Note why the call must not be replayed."""
        self.replayable, self.replay_refusal = False, self.replay_refusal or reason

    @property
    def operators(self) -> int:
        """The operators that ran inside: each began a moment."""
        return self.last_moment - self.first_moment + 1


@dataclass(slots=True)
class MethodTime:
    """Bytes through a method, and their time; ``timed_*``: from ``SMALLEST_TIMED_BYTES`` up."""

    nbytes: int = 0
    ms: float = 0.0
    timed_bytes: int = 0
    timed_ms: float = 0.0

    def add(self, nbytes: int, ms: float) -> None:
        """Add one tensor."""
        self.nbytes += nbytes
        self.ms += ms
        if nbytes >= SMALLEST_TIMED_BYTES:
            self.timed_bytes += nbytes
            self.timed_ms += ms


@dataclass(slots=True)
class Observation:
    """One observed step of ``examples`` examples."""

    examples: int
    peak_bytes: list[int] = field(default_factory=list)  # per moment, beyond those before the step
    gradient_bytes: list[int] = field(default_factory=list)  # that existed when each moment began
    saves: list[ObservedTensor] = field(default_factory=list)
    calls: list[ModuleCall] = field(default_factory=list)
    encode: dict[Method, MethodTime] = field(default_factory=dict)
    decode: dict[Method, MethodTime] = field(default_factory=dict)
    forward: int = 0  # the first moments, those of the forward pass
    step_ms: float = 0.0  # forward and backward, without encoding and decoding
    coded_ms: float = 0.0  # with both
    recording_ms: float = 0.0  # of the graph of values
    plain_bytes: int = 0
    chunk_bytes: int = 0  # decoded at a time, at most
    part_bytes: int = 0  # likewise of a fused activation
    norm_part_bytes: int = 0  # likewise of a normalisation
    process_bytes: int = 0  # the process's peak less what it held before

    @property
    def held_bytes(self) -> int:
        """The bytes that were held instead of saved tensors."""
        return sum(each.held_bytes for each in self.saves)


class Save(NamedTuple):
    """One save of a tensor, with ``held`` in its place."""

    saved: SavedTensor
    tensor: Tensor
    held: PackedTensor
    site: Site
    need: Need
    treatment: Treatment
    sources: tuple[Source, ...]
    held_bytes: int
    ms: float | None  # it took to make; None: an operator made it while it did other things
    treatable: bool
    is_over: bool = False  # the tensor's memory already holds the operator's result
    beside_bytes: int = 0  # held with it whatever the treatment
    derives: Derivation | None = None  # the function of this tensor that another saved one is
    derived_by: Derivation | None = None  # the function of another that this one is


class Watcher(Protocol):
    """What a capture reports operators, saves and reads to."""

    def now_s(self) -> float:
        """Return a clock's seconds, of which only differences count."""

    def moment(self) -> None:
        """Note that an operator of the forward pass begins."""

    def saved(self, save: Save) -> None:
        """Note a save."""

    def recorded(self, ms: float) -> None:
        """Note the time that recording the graph of values took, when forward is over."""

    def reading(self, saved: SavedTensor) -> None:
        """Note that backward begins to read a save."""

    def has_read(self, saved: SavedTensor, ms: float) -> None:
        """Note that a save was read, which took ``ms``."""


def watched(
    unpack: Callable[[SavedTensor], Tensor], watcher: Watcher
) -> Callable[[SavedTensor], Tensor]:
    """Return the hook that autograd calls in backward, which reports to ``watcher``."""

    def unpack_watched(saved: SavedTensor) -> Tensor:
        watcher.reading(saved)
        start_s = watcher.now_s()
        tensor = unpack(saved)
        watcher.has_read(saved, 1000.0 * (watcher.now_s() - start_s))
        return tensor

    return unpack_watched
