"""What autograd holds in place of a saved tensor, and how the tensor comes back."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from daf.codecs.codes import ElementsCode, Values, elements_in
from daf.codecs.layout import Layout, layout_of
from daf.codecs.scratch import Scratch
from daf.core.code_format import BLOCK_ELEMENTS
from daf.core.errors import SavedTensorError
from daf.core.policy import Need, Site
from daf.kernels.normalisation import Channels
from daf.offload.spill import SpillRecord, SpillStore
from daf.saved_tensors.ledger import Holding, Ledger, Plain
from daf.torch_compat.autograd_graph import detached, version_of


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...
    @property
    def in_store(self) -> bool: ...


Content = TypeVar("Content", bound=_Sized, covariant=True)


class Stored(Holding, Generic[Content]):
    """Content that the ledger counts once, however many hold it."""

    __slots__ = ("content",)

    def __init__(self, ledger: Ledger, content: Content) -> None:
        super().__init__(ledger, content.nbytes, in_store=content.in_store)
        self.content = content


@dataclass(slots=True, weakref_slot=True, eq=False)
class Derivation:
    """A function with f(0) = 0, applied in place to a recipe's only term."""

    _function: Callable[[Tensor], object]
    _scale: float = 1.0
    _unscaled: "Derivation | None" = None
    readers: int = 0  # saved tensors derived by it, scaled or not

    def apply_(self, tensor: Tensor) -> None:
        """Replace ``tensor`` by its function."""
        self._function(tensor)
        if self._scale != 1.0:
            tensor.mul_(self._scale)

    def scaled(self, factor: float) -> "Derivation":
        """Return ``factor`` times the function."""
        return Derivation(self._function, self._scale * factor, self)

    def note_reader(self) -> None:
        """Count one more saved tensor derived by it."""
        self.readers += 1
        if self._unscaled is not None:
            self._unscaled.note_reader()


class Term(NamedTuple):
    """Add ``channels(code)`` to the sum, then zero by ``mask``; a ``derivation`` stands alone."""

    code: Stored[Values]
    channels: Stored[Channels] | None = None
    mask: Stored[ElementsCode] | None = None
    derivation: Derivation | None = None


Recipe = tuple[Term, ...]


class PackedTensor(ABC):
    """What is held in place of one saved tensor."""

    __slots__ = ("__weakref__", "recipe")

    def __init__(self) -> None:
        self.recipe: Recipe | None = None  # of the *result* of the operator that saved this

    @abstractmethod
    def restore(self, scratch: Scratch) -> Tensor:
        """Return the tensor for backward, in ``scratch``'s memory; any number of times."""


class Kept(PackedTensor):
    """The tensor itself, without its graph; ``holdings``: none for memory that PyTorch holds."""

    __slots__ = ("_holdings", "_site", "_version", "tensor")

    def __init__(
        self, tensor: Tensor, version: int, site: Site, holdings: tuple[Holding, ...] = ()
    ) -> None:
        super().__init__()
        self.tensor = detached(tensor)  # as it is now
        self._version, self._site = version, site
        self._holdings = holdings

    def restore(self, scratch: Scratch) -> Tensor:  # noqa: ARG002
        """Return the tensor as saved; SavedTensorError if it was changed in place since."""
        now = version_of(self.tensor)
        if now != self._version:
            raise SavedTensorError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: {self.tensor.dtype} {list(self.tensor.shape)} saved at "
                f"{self._site} is at version {now}; expected version {self._version} instead. "
                "Do not change it in place between forward and backward, or clone it before"
            )
        return self.tensor

    def restore_part(self, first: int, last: int) -> Tensor:
        """Return entries [first, last) of the first dimension, a view."""
        return self.restore(Scratch())[first:last]

    @property
    def layout(self) -> Layout:
        """The tensor's geometry."""
        return layout_of(self.tensor)


class Shape(PackedTensor):
    """Geometry only; the content is never read."""

    __slots__ = ("_layout",)

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self._layout = layout

    def restore(self, scratch: Scratch) -> Tensor:
        """Return a tensor of undefined content."""
        return scratch.empty(self._layout)


class Decoded(PackedTensor):
    """A code that one call decodes, with ``arguments`` by keyword if it takes any."""

    __slots__ = ("arguments", "code", "layout")

    def __init__(self, code: Stored[Any], layout: Layout, **arguments: Any) -> None:
        super().__init__()
        self.code, self.layout = code, layout
        self.arguments = arguments

    def restore(self, scratch: Scratch) -> Tensor:
        """Return the decoded tensor; arguments in the ledger are taken out of their ``Stored``."""
        out = scratch.empty(self.layout)
        held = self.arguments.items()
        given = {name: each.content if isinstance(each, Stored) else each for name, each in held}
        self.code.content.decode(out, **given)
        return out


class Rederived(PackedTensor):
    """The sum that a recipe describes; a tensor with a code of its own has one term."""

    __slots__ = ("layout",)

    def __init__(self, recipe: Recipe, layout: Layout) -> None:
        super().__init__()
        self.recipe: Recipe = recipe
        self.layout = layout

    def restore(self, scratch: Scratch) -> Tensor:
        """Return the sum; each term is decoded onto those before it."""
        out = scratch.empty(self.layout)
        self._decode(out, None)
        return out

    def restore_part(self, first: int, last: int) -> Tensor:
        """Return entries [first, last) of the first dimension, the outermost in memory."""
        shape, stride = self.layout.shape, self.layout.stride
        row = math.prod(shape[1:])
        start = first * row // BLOCK_ELEMENTS
        room = self.restore_blocks(start, -(-last * row // BLOCK_ELEMENTS))
        behind = first * row - start * BLOCK_ELEMENTS
        return room.as_strided((last - first, *shape[1:]), stride, behind)

    def restore_blocks(self, first: int, last: int) -> Tensor:
        """Return the elements of blocks [first, last) of 256, in memory order."""
        shape, _, dtype, device = self.layout
        blocks = (first, last)
        room = torch.empty(elements_in(blocks, math.prod(shape)), dtype=dtype, device=device)
        self._decode(room, blocks)
        return room

    def _decode(self, out: Tensor, blocks: tuple[int, int] | None) -> None:
        for place, term in enumerate(self.recipe):
            term.code.content.decode(
                out,
                term.channels.content if term.channels else None,
                term.mask.content if term.mask else None,
                accumulate=place > 0,
                blocks=blocks,
            )
        if self.recipe[0].derivation is not None:
            self.recipe[0].derivation.apply_(out)


class Spilled(PackedTensor):
    """A view of a storage whose bytes are on disk; bit for bit, strides and offset included."""

    __slots__ = ("_dtype", "_geometry", "_ledger", "_record", "_store")

    def __init__(
        self, store: SpillStore, record: SpillRecord, tensor: Tensor, ledger: Ledger
    ) -> None:
        super().__init__()
        self._store, self._record = store, record
        self._geometry = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        self._dtype, self._ledger = tensor.dtype, ledger
        record.users += 1

    def restore(self, scratch: Scratch) -> Tensor:  # noqa: ARG002 - a storage of its own
        """Return the tensor; SavedTensorError: changed in place since; SpillError: unreadable."""
        storage = self._store.load(self._record)
        self._ledger.note_held()
        return torch.empty(0, dtype=self._dtype).set_(storage, *self._geometry)


@dataclass(slots=True, weakref_slot=True, eq=False, repr=False)
class SavedTensor:
    """What a pack hook returns: ``tensor`` to ``need`` while the operator runs, then ``held``."""

    tensor: Tensor | None
    version: int = -1
    node: Any = None
    slot: str = ""
    need: Need = Need.EXACT
    unmade_bytes: int | None = None  # what PyTorch's own operator would have made and saved
    held: PackedTensor | None = None
    plain: tuple[Plain, ...] = ()  # PyTorch's bytes in the ledger while autograd holds this

    def __post_init__(self) -> None:
        assert self.tensor is not None
        self.version = self.tensor._version

    def settle(self, held: PackedTensor, plain: tuple[Plain, ...] = ()) -> None:
        """Let ``held`` stand for the tensor from now on."""
        self.held, self.plain = held, plain
        self.drop()

    def drop(self) -> None:
        """Drop the tensor; with its graph it would be a cycle that nothing frees."""
        self.tensor, self.node = None, None

    def restore(self, scratch: Scratch) -> Tensor:
        """Return the tensor; SavedTensorError if changed in place, or its operator raised."""
        if self.held is not None:
            return self.held.restore(scratch)
        if self.tensor is not None:  # an operator that looks at its own saves before it returns
            return self.tensor.detach()
        raise SavedTensorError(
            "asked for a saved tensor whose operator raised an error before it returned; "
            "run the forward pass again"
        )


_identified: ContextVar[list[SavedTensor] | None] = ContextVar("identified", default=None)


def unpacker(scratch: Scratch) -> Callable[[SavedTensor], Tensor]:
    """Return the hook that autograd calls in backward; it decodes into ``scratch``'s memory."""

    def unpack(saved: SavedTensor) -> Tensor:
        if (identified := _identified.get()) is not None:
            identified.append(saved)
            return torch.empty(0)
        with torch.no_grad():
            return saved.restore(scratch)

    return unpack


def is_identifying() -> bool:
    """True inside ``saves_read_by``, where unpacking decodes nothing."""
    return _identified.get() is not None


def saves_read_by(read: Callable[[], object]) -> list[SavedTensor]:
    """Return the saves that ``read`` makes autograd unpack, in order, without decoding them."""
    identified: list[SavedTensor] = []
    token = _identified.set(identified)
    try:
        read()
    finally:
        _identified.reset(token)
    return identified
