"""Recipes: how a saved tensor is computed again from tensors that are held anyway.

A recipe's leaves are constants, tensors kept for other readers, or ones smaller than what they
yield. What lies between is computed again by the same aten operations, hence to the same bits:
``RecipeMaker`` proves that where a site has a recipe for the first time, and a fingerprint is
compared each time after.
"""

import weakref
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from daf.codecs.layout import is_dense
from daf.codecs.scratch import Scratch
from daf.core.errors import SavedTensorError
from daf.core.policy import SMALL_BYTES, Need, Site
from daf.recompute.fingerprint import Fingerprint
from daf.recompute.values import Geometry, Operand, Operation, Value, ValueRecorder, in_place
from daf.saved_tensors.ledger import Holding, Ledger, Source
from daf.saved_tensors.packed_tensor import Kept, PackedTensor
from daf.saved_tensors.packer import kept_holding
from daf.saved_tensors.state import SavedTensorState
from daf.torch_compat.autograd_graph import below_autograd
from daf.torch_compat.pytree import map_nest

# Bytes that a recipe writes, of its result's: a normalisation, an addition and a ReLU write three
# times as much. Longer chains are cut: each of their links would be computed from the start.
MOST_WORK = 11.0
# A result that another saved tensor is, one of so many saved before, is kept for its backward: that
# reads it next. Further apart it would be held for long, and is made once more.
NEAR = 8
# Constants up to this are copied: parameters of normalisations may change before backward.
MOST_COPIED_BYTES = 1 << 16
_CONCATENATE = torch.ops.aten.cat.default


@dataclass(eq=False, slots=True, weakref_slot=True)
class Leaf:
    """A tensor that is held; ``source``: its memory, None of a constant or a copy."""

    value: Value
    tensor: Tensor
    source: Source | None
    ledger: Ledger
    is_given: bool = False  # by the program, and no parameter
    version: int = -1
    holding: Holding | None = None
    content: Fingerprint | None = None  # of a large one that NumPy, say, may write unseen

    def hold(self) -> None:
        """Hold the tensor; of a small constant, which may change before backward, a copy."""
        self.version = self.tensor._version
        if self.is_given and self.value.nbytes > MOST_COPIED_BYTES:
            self.content = Fingerprint.whole(self.tensor)
        if self.source is not None:
            self.holding = kept_holding(self.source, self.ledger)
        elif self.value.nbytes <= MOST_COPIED_BYTES:
            self.copy()
        self.value.readers.append(weakref.ref(self))

    def copy(self) -> None:
        """Hold a copy from now on; autograd lets a program write over what only we hold."""
        if self.holding is None or self.source is not None:
            geometry, whole = Geometry.of(self.tensor), self.tensor
            if whole.nbytes < self.value.nbytes or not is_dense(whole):
                whole = torch.empty(0, dtype=geometry.dtype).set_(whole.untyped_storage())
            self.tensor = geometry.within(whole.clone())
            self.version, self.source = self.tensor._version, None
            self.holding = Holding(self.ledger, self.value.nbytes)

    def compute(self, _results: "_Results") -> Tensor:
        """Return the tensor; SavedTensorError if it has changed."""
        before, is_same = self.content, self.tensor._version == self.version
        if not is_same or (before and bool(Fingerprint.whole(self.tensor).differs(before))):
            raise SavedTensorError(
                f"a tensor {list(self.tensor.shape)} from which a saved one is computed again was "
                "changed in place between forward and backward, where DAF does not see it; clone "
                "it before, or train without recomputation (policy='plain')"
            )
        return self.tensor


@dataclass(eq=False, slots=True)
class CodedLeaf:
    """A code with every bit of a tensor, which something else holds for backward."""

    value: Value
    code: PackedTensor
    scratch: Scratch

    def compute(self, _results: "_Results") -> Tensor:
        """Return the decoded tensor."""
        return self.code.restore(self.scratch)


class _Input(NamedTuple):
    """A node's tensor, in the geometry in which the next step reads it."""

    of: "Node"
    geometry: Geometry


@dataclass(eq=False, slots=True)
class _Step:
    """An operation to run again; inputs stand for tensors in its nest of arguments."""

    operation: Operation
    inputs: Any
    reads: "tuple[Node, ...]"  # those inputs' nodes
    output: int
    geometry: Geometry
    yields: "list[weakref.ref[Recomputed]]" = field(default_factory=list)  # what is its result
    alive_bytes: int = 0  # beside leaves, when most are
    is_read: bool = False  # by another step
    overwrites: "_Step | None" = None  # whose result its own is written over

    def __post_init__(self) -> None:
        read, first = dict.fromkeys(self.reads), self.inputs[0][0] if self.inputs[0] else None
        if isinstance(first, _Input) and isinstance(first.of, _Step):
            is_alike = first.geometry == first.of.geometry == self.geometry
            if is_alike and self.reads.count(first.of) == 1 and in_place(self.operation.function):
                self.overwrites = first.of
        is_over = self.overwrites is not None and not self.overwrites.is_read
        alive = [sum(map(_made_bytes, read if is_over else (self, *read)))]
        for each in read:
            alive.append(each.alive_bytes if isinstance(each, _Step) else _made_bytes(each))
            if isinstance(each, _Step):
                each.is_read = True
        self.alive_bytes = max(alive)

    def compute(self, results: "_Results") -> Tensor:
        """Return the result, of the geometry that it had; ``results``: those of shared steps."""
        if self in results.known:
            return results.known[self]
        arguments, keywords = map_nest(_Input, results.of, self.inputs)
        function = self.operation.function
        if self.overwrites is not None and self.overwrites not in results.known:
            function = in_place(function) or function
        made = function(*arguments, **keywords)
        found: Tensor = made[self.output] if isinstance(made, (tuple, list)) else made
        if Geometry.of(found) != self.geometry:
            raise SavedTensorError(f"{self.operation.function} gave {Geometry.of(found)} this time")
        if results.shares(self, found) or results.readers[self] > 1:
            results.known[self] = found
        return found


Node = Leaf | CodedLeaf | _Step


@dataclass(eq=False, slots=True)
class _Results:
    """The results of one run that several steps read; ``of_saved``: what it is for, not proofs."""

    readers: Counter[Node]
    of_saved: "Recomputed | None" = None
    known: dict[_Step, Tensor] = field(default_factory=dict)

    def of(self, read: _Input) -> Tensor:
        """Return an input's tensor."""
        return read.geometry.within(read.of.compute(self))

    def shares(self, step: _Step, made: Tensor) -> bool:
        """True if the result of a step on the way is held for others from now on."""
        by = self.of_saved
        return by is not None and step is not by.step and by.share(made, step, is_compared=False)


class Recomputed(PackedTensor):
    """A saved tensor that its recipe computes again."""

    __slots__ = (
        *("_fingerprint", "_geometry", "_ledger", "_made"),
        *("_place", "_readers", "_site", "step"),
    )

    def __init__(
        self, made: _Step, readers: Counter[Node], tensor: Tensor, site: Site, ledger: Ledger
    ) -> None:
        super().__init__()
        self.step = made
        self._geometry = Geometry.of(tensor)
        # By another's run, for the next reading; true: that compared the same content.
        self._made: tuple[Tensor, Holding, bool] | None = None
        self._readers, self._site = readers, site
        self._ledger = ledger
        self._place = zlib.crc32(str(site).encode())
        self._fingerprint = Fingerprint.sampled(tensor, self._place)

    @property
    def leaves(self) -> list[Leaf]:
        """What it is computed from."""
        return [each for each in self._readers if isinstance(each, Leaf)]

    def restore(self, scratch: Scratch) -> Tensor:  # noqa: ARG002 - operations allocate themselves
        """Return the tensor; SavedTensorError if it is not the one saved."""
        (made, _, is_compared), self._made = self._made or (None, None, False), None
        if made is None:
            alive = Holding(self._ledger, self.step.alive_bytes)
            made = self.compute(self)
            del alive
        found = self._geometry.within(made)
        if not is_compared:
            self._compare(found)
            self.share(made, self.step, is_compared=True)
        return found

    def _compare(self, found: Tensor) -> None:
        if bool(Fingerprint.sampled(found, self._place).differs(self._fingerprint)):
            raise SavedTensorError(
                f"the tensor saved at {self._site} was computed again for backward, and is not "
                "what forward computed: an operation did something else the second time; train "
                "without recomputation (policy='plain')"
            )

    @below_autograd()
    def compute(self, of_saved: "Recomputed | None" = None) -> Tensor:
        """Run the recipe, whatever modes are in force; ``of_saved`` is as ``_Results`` has it."""
        return self._geometry.within(self.step.compute(_Results(self._readers, of_saved)))

    def share(self, made: Tensor, step: _Step, *, is_compared: bool) -> bool:
        """Hold what a step made until others that saved it are read; False: a new peak, or none."""
        alive = (each() for each in step.yields)
        others = [each for each in alive if each is not None and each is not self]
        nbytes = made.untyped_storage().nbytes()
        if not others or self._ledger.held_bytes + nbytes > self._ledger.held_peak_bytes:
            return False
        holding = Holding(self._ledger, nbytes)
        for other in others:
            is_twin = other._fingerprint is self._fingerprint
            other._made = made, holding, is_compared and is_twin
        return True

    def twin(self, tensor: Tensor, site: Site) -> "Recomputed | None":
        """Return what computes it again for another site that saved it, too; None: not this."""
        if Geometry.of(tensor) != self._geometry:
            return None
        found = copy(self)
        found._made, found._site = None, site
        return found


def _read_in(node: Node) -> Iterator[Node]:
    seen: set[Node] = set()
    todo = [node]
    while todo:
        each = todo.pop()
        yield each
        if isinstance(each, _Step) and each not in seen:
            seen.add(each)
            todo += each.reads


def _made_bytes(node: Node) -> int:
    if isinstance(node, _Step):
        return node.operation.made_bytes
    return node.value.nbytes if isinstance(node, CodedLeaf) else 0


@dataclass(eq=False)
class RecipeMaker:
    """Makes recipes in one step's forward pass; ``_is_constant``: tells whose memory stays.

    ``_shares``: what one recipe makes serves another, so that no reading's time is its own.
    """

    _recorder: ValueRecorder
    _state: SavedTensorState
    _is_constant: Callable[[Tensor], bool]
    _shares: bool

    def __post_init__(self) -> None:
        self._last: deque[tuple[Value, weakref.ref[Recomputed]]] = deque(maxlen=NEAR)
        self._codes: WeakValueDictionary[Value, PackedTensor] = WeakValueDictionary()
        self._signs: dict[Value, Site] = {}
        self._leaves: WeakValueDictionary[Value, Leaf] = WeakValueDictionary()

    @below_autograd()  # what is done here is not the program's, and not recorded
    def recomputed(self, tensor: Tensor, version: int, need: Need, site: Site) -> Recomputed | None:
        """Return what computes a saved tensor again; None: that does not pay, or differs."""
        if tensor._version != version or _is_kept(self._state.sources.of(tensor)):
            return None
        value = self._recorder.value_of(tensor)
        near = self.near(value)
        search = _Search(self, MOST_WORK * value.nbytes)
        made = (near and near.twin(tensor, site)) or self._new(search, value, tensor, site)
        if made is None or not self._shares:
            return made
        made.step.yields.append(weakref.ref(made))
        self._last.append((value, made.step.yields[-1]))
        for each in (value, *(e for e, node in search.known.items() if isinstance(node, _Step))):
            if self._signs.get(each, site) != site:
                self._state.sign_readers[self._signs[each]] = need, site
        return made

    def _new(
        self, search: "_Search", value: Value, tensor: Tensor, site: Site
    ) -> Recomputed | None:
        if (found := search.step(value)) is None:
            return None
        nodes = Counter(_read_in(found))
        leaves = [each for each in nodes if isinstance(each, Leaf)]
        more = {e.source for e in leaves if e.source is not None and not _is_kept(e.source)}
        # A concatenation's parts serve the next one too.
        most = value.nbytes if found.operation.function is _CONCATENATE else value.nbytes - 1
        if sum(each.nbytes for each in more) > most:
            return None
        for each in (leaf for leaf in leaves if leaf.version < 0):  # else another recipe holds it
            each.hold()
            if each.source is None and each.holding is None:
                self._state.parameter_reads.note(each.tensor, each)
        made = Recomputed(found, nodes, tensor, site, self._state.ledger)
        form = tuple(each.operation.function for each in nodes if isinstance(each, _Step))
        return made if self._repeats(made, (site, form), tensor) else None

    def note_code(self, tensor: Tensor, code: PackedTensor) -> None:
        """Note what holds every bit of a saved tensor: recipes may start from it."""
        if tensor.nbytes == tensor.untyped_storage().nbytes():
            self._codes[self._recorder.value_of(tensor)] = code

    def note_sign(self, tensor: Tensor, site: Site) -> None:
        """Note where signs alone are read: next time of what recipes make, if one makes it."""
        self._signs[self._recorder.value_of(tensor)] = site

    def coded(self, value: Value) -> CodedLeaf | None:
        """Return the code that is held of a value; None: none is."""
        code = self._codes.get(value)
        return None if code is None else CodedLeaf(value, code, self._state.scratch)

    def near(self, value: Value) -> Recomputed | None:
        """Return what makes a value for another saved tensor, one of the last few."""
        found = (reference() for other, reference in self._last if other is value)
        return next((each for each in found if each is not None), None)

    def _repeats(self, made: Recomputed, key: Any, tensor: Tensor) -> bool:
        """True if the recipe gives the saved tensor's bits, which is tried once a site and form."""
        proven = self._state.proven_recipes
        if key not in proven:
            try:
                again = Fingerprint.whole(made.compute())
                proven[key] = not bool(again.differs(Fingerprint.whole(tensor)))
            except (SavedTensorError, RuntimeError):  # another geometry, or types that do not mix
                proven[key] = False
        return proven[key]

    def leaf(self, operand: Operand) -> Leaf | None:
        """Return an operand as a leaf, if its memory lives and shows the same value still."""
        if not self._recorder.is_current(operand.value):
            return None
        known = self._leaves.get(operand.value)
        if known is not None and known.version in (-1, known.tensor._version):
            return known
        tensor, sources = operand.tensor(), self._state.sources
        is_given = tensor is not None and tensor.is_leaf and type(tensor) is not torch.nn.Parameter
        if tensor is None:
            kept = sources.kept_at(operand.value.address, Kept)
            tensor = None if kept is None else kept.tensor
        if tensor is None:
            return None
        source = None if self._is_constant(tensor) else sources.of(tensor)
        leaf = Leaf(operand.value, tensor.detach(), source, self._state.ledger, is_given)
        if source is not None:  # constants may change where nothing sees it
            self._leaves[operand.value] = leaf
        return leaf


class _Search:
    """Looks for one value's recipe within so many bytes of work."""

    def __init__(self, maker: RecipeMaker, most_work: float) -> None:
        self._maker, self._most_work = maker, most_work
        self._work_bytes = 0
        self.known: dict[Value, Node] = {}

    def step(self, value: Value) -> _Step | None:
        """Return how the value's own operation makes it again, cheaply; or None."""
        operation, geometry = value.operation, value.geometry
        if operation is None or geometry is None:
            return None
        before = self._work_bytes
        near = self._maker.near(value)
        steps = set(_read_in(near.step)) if near else ()
        made = [each.operation for each in steps if isinstance(each, _Step)] or [operation]
        self._work_bytes += sum(each.made_bytes for each in made)
        try:
            if self._work_bytes > self._most_work:
                raise _UnavailableError
            if near is not None:
                return near.step
            reads: list[Node] = []
            inputs = map_nest(Operand, partial(self._input, reads), operation.nest)
        except _UnavailableError:
            self._work_bytes = before
            return None
        return _Step(operation, inputs, tuple(reads), value.output, geometry)

    def _input(self, reads: list[Node], operand: Operand) -> _Input:
        if operand.value not in self.known:
            self.known[operand.value] = self._node(operand)
        reads.append(self.known[operand.value])
        return _Input(reads[-1], operand.geometry)

    def _node(self, operand: Operand) -> Node:
        leaf = self._maker.leaf(operand)
        is_small = operand.value.nbytes < SMALL_BYTES
        if leaf is not None and (is_small or leaf.source is None or _is_kept(leaf.source)):
            return leaf
        found = self.step(operand.value) or self._maker.coded(operand.value) or leaf
        if found is None:
            raise _UnavailableError
        return found


class _UnavailableError(Exception):
    """An operand is neither alive nor made again within the work allowed."""


def _is_kept(source: Source) -> bool:
    return source.recall("kept", Holding) is not None
