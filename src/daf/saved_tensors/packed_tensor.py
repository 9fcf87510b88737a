"""What autograd holds instead of a saved tensor, and how the tensor comes back."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from daf.codecs.codes import DerivativeCode, IntegerCode, MaskCode, RangedCode, Values, elements_in
from daf.codecs.layout import Layout, layout_of
from daf.codecs.registry import RegisteredCode
from daf.codecs.scratch import Scratch
from daf.core.code_format import BLOCK_ELEMENTS
from daf.core.errors import SavedTensorError
from daf.core.policy import Need, Site
from daf.kernels.normalisation import Channels
from daf.offload.spill import SpillRecord, SpillStore
from daf.saved_tensors.derivation import Derivation
from daf.saved_tensors.ledger import Holding, Ledger, Plain


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...
    @property
    def in_store(self) -> bool: ...


Content = TypeVar("Content", bound=_Sized, covariant=True)


class Stored(Holding, Generic[Content]):
    """Something with bytes, counted once however many hold it."""

    __slots__ = ("content",)

    def __init__(self, ledger: Ledger, content: Content) -> None:
        super().__init__(ledger, content.nbytes, in_store=content.in_store)
        self.content = content


class Term(NamedTuple):
    """One step of a recipe: add ``channels(code)`` to the sum so far, then zero by ``mask``.

    A term with a ``derivation`` is a recipe's only one.
    """

    code: Stored[Values]
    channels: Stored[Channels] | None = None
    mask: Stored[MaskCode] | None = None
    derivation: Derivation | None = None


Recipe = tuple[Term, ...]


class PackedTensor(ABC):
    """Stands for one saved tensor."""

    __slots__ = ("__weakref__", "recipe")

    def __init__(self) -> None:
        # How to compute the *result* of the operator that saved this, where that is known.
        self.recipe: Recipe | None = None

    @abstractmethod
    def restore(self, scratch: Scratch) -> Tensor:
        """The tensor for backward, on ``scratch``'s memory; may be called any number of times."""


class Kept(PackedTensor):
    """The tensor itself, without its graph; refuses if it was changed in place since.

    ``holdings`` count its storages; there are none where someone else's memory is borrowed.
    """

    __slots__ = ("_holdings", "_site", "_tensor", "_version")

    def __init__(
        self, tensor: Tensor, version: int, site: Site, holdings: tuple[Holding, ...] = ()
    ) -> None:
        super().__init__()
        self._tensor = tensor.detach()
        self._version = version
        self._site = site
        self._holdings = holdings

    def restore(self, scratch: Scratch) -> Tensor:  # noqa: ARG002
        """The tensor as it was saved.

        Raises:
            SavedTensorError: it was changed in place since.
        """
        now = self._tensor._version
        if now != self._version:
            raise SavedTensorError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: {self._tensor.dtype} {list(self._tensor.shape)} saved at "
                f"{self._site} is at version {now}; expected version {self._version} instead. "
                "Do not change it in place between forward and backward, or clone it before"
            )
        return self._tensor

    def restore_part(self, first: int, last: int) -> Tensor:
        """Entries [first, last) of the first dimension, where they lie."""
        return self.restore(Scratch())[first:last]

    @property
    def layout(self) -> Layout:
        """Of the tensor."""
        return layout_of(self._tensor)


class Shape(PackedTensor):
    """Geometry only; the content is never read."""

    __slots__ = ("_layout",)

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self._layout = layout

    def restore(self, scratch: Scratch) -> Tensor:
        """A tensor of the right geometry with undefined content."""
        return scratch.empty(self._layout)


class TwoValues(PackedTensor):
    """A mask and the two values that its bits stand for."""

    __slots__ = ("_layout", "_off", "_on", "mask")

    def __init__(self, mask: Stored[MaskCode], layout: Layout, off: float, on: float) -> None:
        super().__init__()
        self.mask = mask
        self._layout = layout
        self._off = off
        self._on = on

    def restore(self, scratch: Scratch) -> Tensor:
        """A tensor of the two values."""
        out = scratch.empty(self._layout)
        self.mask.content.decode(out, self._off, self._on)
        return out


class Rederived(PackedTensor):
    """The sum that a recipe describes; a tensor with a code of its own has one term."""

    __slots__ = ("layout",)

    def __init__(self, recipe: Recipe, layout: Layout) -> None:
        super().__init__()
        self.recipe: Recipe = recipe
        self.layout = layout

    def restore(self, scratch: Scratch) -> Tensor:
        """Decode every term onto the sum of those before it."""
        out = scratch.empty(self.layout)
        self._decode(out, None)
        return out

    def restore_part(self, first: int, last: int) -> Tensor:
        """Entries [first, last) of the first dimension, which must be the outermost in memory."""
        shape, stride = self.layout.shape, self.layout.stride
        row = math.prod(shape[1:])
        start = first * row // BLOCK_ELEMENTS
        room = self.restore_blocks(start, -(-last * row // BLOCK_ELEMENTS))
        behind = first * row - start * BLOCK_ELEMENTS
        return room.as_strided((last - first, *shape[1:]), stride, behind)

    def restore_blocks(self, first: int, last: int) -> Tensor:
        """The elements of blocks [first, last) of 256, in memory order."""
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


class Ranged(PackedTensor):
    """Steps of a range, and of what."""

    __slots__ = ("code", "from_steps", "layout")

    def __init__(
        self, code: Stored[RangedCode], from_steps: Stored[Channels], layout: Layout
    ) -> None:
        super().__init__()
        self.code = code
        self.from_steps = from_steps
        self.layout = layout

    def restore(self, scratch: Scratch) -> Tensor:
        """The values that the steps stand for."""
        out = scratch.empty(self.layout)
        self.code.content.decode(out, self.from_steps.content)
        return out


class NormInput(PackedTensor):
    """Input of a normalisation, coded as ``(x - mean) * inverse_deviation``.

    ``mean`` and ``inverse_deviation`` are the operator's own saved statistics.
    """

    __slots__ = ("_inner", "_inverse_deviation", "_layout", "_mean", "code")

    def __init__(
        self,
        code: Stored[Values],
        layout: Layout,
        mean: Tensor,
        inverse_deviation: Tensor,
        inner: int,
    ) -> None:
        super().__init__()
        self.code = code
        self._layout = layout
        self._mean = mean
        self._inverse_deviation = inverse_deviation
        self._inner = inner

    def restore(self, scratch: Scratch) -> Tensor:
        """Undo the normalisation."""
        out = scratch.empty(self._layout)
        deviation = self._inverse_deviation.reciprocal()
        self.code.content.decode(out, Channels(deviation, self._mean, self._inner))
        return out


class Derivative(PackedTensor):
    """Per element one of a few representative inputs, at which h' is the coded level."""

    __slots__ = ("_code", "_layout", "_representatives")

    def __init__(
        self, code: Stored[DerivativeCode], layout: Layout, representatives: Tensor
    ) -> None:
        super().__init__()
        self._code = code
        self._layout = layout
        self._representatives = representatives

    def restore(self, scratch: Scratch) -> Tensor:
        """The representatives."""
        out = scratch.empty(self._layout)
        self._code.content.decode(out, self._representatives)
        return out


class Decoded(PackedTensor):
    """A code that is decoded from itself alone: packed integers, or a registered codec's."""

    __slots__ = ("_code", "_layout")

    def __init__(self, code: Stored[IntegerCode | RegisteredCode], layout: Layout) -> None:
        super().__init__()
        self._code = code
        self._layout = layout

    def restore(self, scratch: Scratch) -> Tensor:
        """The decoded tensor."""
        out = scratch.empty(self._layout)
        self._code.content.decode(out)
        return out


class Spilled(PackedTensor):
    """A view of a storage whose bytes are on disk; bit for bit, strides and offset included."""

    __slots__ = ("_dtype", "_geometry", "_ledger", "_record", "_store")

    def __init__(
        self, store: SpillStore, record: SpillRecord, tensor: Tensor, ledger: Ledger
    ) -> None:
        super().__init__()
        self._store = store
        self._record = record
        self._geometry = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        self._dtype = tensor.dtype
        self._ledger = ledger
        record.users += 1

    def restore(self, scratch: Scratch) -> Tensor:  # noqa: ARG002 - a storage of its own
        """The tensor as it was saved.

        Raises:
            SavedTensorError: it was changed in place since.
            SpillError: it cannot be read again.
        """
        storage = self._store.load(self._record)
        self._ledger.note_held()
        return torch.empty(0, dtype=self._dtype).set_(storage, *self._geometry)


class SavedTensor:
    """What pack gives to autograd for one tensor.

    ``tensor``, ``version``, ``node``, ``slot`` and ``need`` are there only from
    pack until the operator returns; from then on ``held`` stands for the tensor.
    ``plain`` keeps plain's bytes in the ledger for as long as autograd holds this;
    ``unmade_bytes`` are those of what PyTorch's own operator would have made and saved instead.
    """

    __slots__ = (
        "__weakref__",
        "held",
        "need",
        "node",
        "plain",
        "slot",
        "tensor",
        "unmade_bytes",
        "version",
    )

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        self.version: int = tensor._version
        self.node: Any = None
        self.slot = ""
        self.need = Need.EXACT
        self.unmade_bytes: int | None = None
        self.held: PackedTensor | None = None
        self.plain: tuple[Plain, ...] = ()

    def settle(self, held: PackedTensor, plain: tuple[Plain, ...] = ()) -> None:
        """From now on ``held`` stands for the tensor."""
        self.held = held
        self.plain = plain
        self.drop()

    def drop(self) -> None:
        """Forget an unsettled tensor; with its graph it would be a cycle that nothing frees."""
        self.tensor = None
        self.node = None

    def restore(self, scratch: Scratch) -> Tensor:
        """The tensor for backward.

        Raises:
            SavedTensorError: it was changed in place since, or its operator raised.
        """
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
        identified = _identified.get()
        if identified is not None:
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
