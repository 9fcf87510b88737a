"""Codecs that are registered from outside the library, by name.

A plan never chooses one; a policy does, through ``Treatment(Method.REGISTERED, codec=name)``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from daf.core.errors import CodecError


class RegisteredCode(Protocol):
    """What a registered codec holds instead of a tensor."""

    @property
    def nbytes(self) -> int:
        """Bytes held now."""

    @property
    def in_store(self) -> bool:
        """True if the store that the codec was given counts these bytes."""

    def decode(self, out: Tensor) -> None:
        """Write the values into a dense tensor of the coded shape, strides and dtype."""


# (store, dense tensor, treatment, 64-bit key) to a code; None keeps the tensor as it is. The store
# is that of the tensor's device: see ``daf.pool.store.Store`` for the host's.
Encoder = Callable[..., RegisteredCode | None]

_encoders: dict[str, Encoder] = {}


def register_codec(name: str, encode: Encoder) -> None:
    """Make a codec known to treatments; the same name again replaces it."""
    _encoders[name] = encode


def encoder_named(name: str) -> Encoder:
    """The encoder of a registered codec.

    Raises:
        CodecError: no codec of this name is registered.
    """
    try:
        return _encoders[name]
    except KeyError:
        known = ", ".join(sorted(_encoders)) or "none"
        raise CodecError(f"asked for codec {name!r}; registered: {known}") from None
