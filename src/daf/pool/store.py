"""The store's interface: ask for planes, drop the last reference to free them."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypedDict, Unpack, get_args

import torch

from daf.core.code_format import code_bytes, plane_bytes
from daf.core.errors import OptionError
from daf.kernels import PageFields
from daf.pool.views import EvictedPlane, PlaneView

Evicts = Literal["planes", "activations"]


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """The pool that holds codes, each size as bytes or ``"200MB"``.

    OptionError: ``evicts`` is none of its values.
    """

    cap_bytes: str | int | None = None  # page tables and records included; None: no cap
    evicts: Evicts = "planes"  # the least significant, or whole activations; on a GPU, planes
    growth_bytes: str | int | None = None  # in DAF's paper steps of 100 MB; None: by demand

    def __post_init__(self) -> None:
        if self.evicts not in get_args(Evicts):
            raise OptionError(
                f"asked for a pool that evicts {self.evicts!r}; give 'planes' or 'activations'"
            )

    @classmethod
    def of(cls, asked: Any) -> "PoolOptions":
        """Return the options, of which the cap alone may be given."""
        return asked if isinstance(asked, cls) else cls(asked)


class PlaneOptions(TypedDict, total=False):
    """Options of planes."""

    minimum_bits: int | None  # planes that are never evicted; None: all of them
    # Harm per byte of losing each plane, most significant first. None: ``plane_importance`` of
    # weight 1 for up to 4 bits, else 0.
    importance: Sequence[float] | None
    weight: float | None  # harm of losing all of it; None: it stays, where activations go whole
    headers: bool  # two bf16 numbers for every block, never evicted; default True
    tag: int  # 64 bits, names the tensor in ``take_evictions``; default 0


class Planes(Protocol):
    """The planes and headers of one tensor, until the last reference is dropped.

    Write through ``view``, seal, read inside ``pinned``; in between, some may be evicted.
    """

    @property
    def nbytes(self) -> int:
        """Bytes that they take now."""

    @property
    def view(self) -> PlaneView:
        """Where to write; invalid once sealed."""

    def filling(self) -> AbstractContextManager[PlaneView]:
        """Yield where to write."""

    def seal(self) -> None:
        """End writing."""

    def pinned(self) -> AbstractContextManager[PlaneView]:
        """Yield the resident planes; none is evicted meanwhile."""


class Store(Protocol):
    """A source of planes that counts the bytes held."""

    @property
    def live_bytes(self) -> int:
        """Bytes held now."""

    @property
    def evicted_bytes(self) -> int:
        """Bytes of planes evicted since the store began."""

    def allocate_planes(self, count: int, bits: int, **options: Unpack[PlaneOptions]) -> Planes:
        """Allocate ``bits`` planes of ``count`` elements, content undefined."""

    def take_evictions(self) -> tuple[tuple[EvictedPlane, ...], int]:
        """Return the planes evicted since the last call, and how many more were not listed."""

    def give_back(self, nbytes: int) -> int:
        """Return at least ``nbytes`` to the system if possible; returns the bytes returned."""


class PlainStore:
    """A store of tensors of their own; nothing is ever evicted."""

    live_bytes = evicted_bytes = 0

    def allocate_planes(self, count: int, bits: int, **options: Unpack[PlaneOptions]) -> Planes:
        """Allocate exactly the bytes of the format, headers behind the planes."""
        size = code_bytes(count, bits, headers=options.get("headers", True))
        planes = _WholePlanes(self, size, count, bits)
        self.live_bytes += size
        return planes

    def take_evictions(self) -> tuple[tuple[EvictedPlane, ...], int]:
        """Return no evictions."""
        return (), 0

    def give_back(self, nbytes: int) -> int:  # noqa: ARG002
        """Return 0: the allocator already has the freed buffers."""
        return 0


class _WholePlanes:
    """Planes one behind the other: to kernels, a single run in pages of a plane each."""

    __slots__ = ("_bytes", "_fields", "_store", "nbytes")

    def __init__(self, store: PlainStore, nbytes: int, count: int, bits: int) -> None:
        self._store = store
        self.nbytes = 0  # the allocation may be refused
        self._bytes = torch.empty(nbytes, dtype=torch.uint8)
        self.nbytes = nbytes
        runs, fields = min(count, 1), PageFields.flat(self._bytes.data_ptr(), count, bits)
        self._fields = fields._replace(page_bytes=plane_bytes(count, 1), runs=runs, full_runs=runs)

    def __del__(self) -> None:
        self._store.live_bytes -= self.nbytes

    @property
    def view(self) -> PlaneView:
        return PlaneView(self._fields)

    def seal(self) -> None:
        """Do nothing."""

    def pinned(self) -> AbstractContextManager[PlaneView]:
        return nullcontext(PlaneView(self._fields))

    filling = pinned
