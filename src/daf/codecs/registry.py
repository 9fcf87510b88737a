"""Codecs registered by name from outside; ``Treatment(Method.REGISTERED, codec=name)`` uses one."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from daf.core.errors import CodecError


class RegisteredCode(Protocol):
    """What a registered codec holds in place of a tensor."""

    @property
    def nbytes(self) -> int:
        """Bytes held now."""

    @property
    def in_store(self) -> bool:
        """True if the store that the codec was given counts these bytes."""

    def decode(self, out: Tensor) -> None:
        """Write the values into a dense tensor of the encoded shape, strides and dtype."""


# (store of the tensor's device, dense tensor, treatment, 64-bit key) to a code, or None.
Encoder = Callable[..., RegisteredCode | None]

_encoders: dict[str, Encoder] = {}


def register_codec(name: str, encode: Encoder) -> None:
    """Register a codec for treatments, in place of any of the same name."""
    _encoders[name] = encode


def encoder_named(name: str) -> Encoder:
    """Return the encoder of a registered codec; CodecError if the name is unknown."""
    try:
        return _encoders[name]
    except KeyError:
        known = ", ".join(sorted(_encoders)) or "none"
        raise CodecError(f"asked for codec {name!r}; registered: {known}") from None
