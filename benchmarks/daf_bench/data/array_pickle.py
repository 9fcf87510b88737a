"""Pickles of arrays and plain containers only: a pickle can run any code, and fill any memory."""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import warnings
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

MOST_BYTES = 50 * 10**6  # a published batch of CIFAR-10 has 31 MB
# What it raises for bytes that are no pickle, or a damaged one.
UNREADABLE = (
    *(OSError, EOFError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError),
    *(MemoryError, RecursionError, pickle.UnpicklingError),
)
_MOST_OPERATIONS = 10**6  # and 50,000; CIFAR-100's training images 200,000
_TEXTS = frozenset(
    (
        *("BINBYTES", "SHORT_BINBYTES", "STRING", "BINSTRING", "SHORT_BINSTRING"),
        *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE"),
    )
)
_PUTS = frozenset(("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"))
_GETS = frozenset(("GET", "BINGET", "LONG_BINGET"))
_NAMES = frozenset(("GLOBAL", "STACK_GLOBAL", "REDUCE"))  # of these none makes a tuple
_NUMBERS = frozenset(
    ("NONE", "NEWTRUE", "NEWFALSE", "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1")
)
_CONTAINERS = frozenset(
    (
        *("EMPTY_DICT", "DICT", "SETITEM", "SETITEMS", "EMPTY_LIST", "LIST", "APPEND", "APPENDS"),
        *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "BUILD"),
    )
)
_FRAMES = frozenset(("PROTO", "FRAME", "MARK", "STOP"))
_ALLOWED = _TEXTS | _PUTS | _GETS | _NAMES | _NUMBERS | _CONTAINERS | _FRAMES


def load_arrays(data: bytes, most_bytes: int = MOST_BYTES) -> Any:
    """Return what ``data`` pickle, texts as bytes, arrays of bytes as uint8.

    ``most_bytes``: more are refused, unread. Raises one of ``UNREADABLE``.
    """
    if len(data) > most_bytes:
        raise pickle.UnpicklingError(f"it has {len(data)} bytes; a batch has at most {most_bytes}")
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        try:
            _refuse_unusual(data)
            return _plain(_ArrayUnpickler(io.BytesIO(data), encoding="bytes").load())
        except DeprecationWarning as error:  # Python reads escapes that nobody writes
            raise pickle.UnpicklingError(f"it is no usual pickle: {error}") from error


def _refuse_unusual(data: bytes) -> None:
    """Refuse what makes little data take much memory or time."""
    shareable: set[int] = set()
    before, puts, operations = "", 0, 0
    for operation, argument, _ in pickletools.genops(data):
        name, operations = operation.name, operations + 1
        if name not in _ALLOWED or operations > _MOST_OPERATIONS:
            _refuse(f"it has {name} or too much of it, which no image data need")
        if name in _PUTS:
            place = puts if argument is None else int(argument)
            # The memo is as long as the largest place.
            if place > _MOST_OPERATIONS:
                _refuse(f"it has a place {place}")
            if before in _TEXTS | _NAMES:
                shareable.add(place)
            puts += 1
        # To hash a tuple that holds one tuple twice, and that another twice, takes for ever.
        elif name in _GETS and int(argument) not in shareable:
            _refuse("it shares tuples or containers")
        before = name


def _refuse(reason: str) -> NoReturn:
    raise pickle.UnpicklingError(reason)


class _Array:
    """An array in the making: NumPy's own would trust its state."""

    content: NDArray[np.uint8] | None = None

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, fortran, content = state
        if not isinstance(kind, _Kind) or not isinstance(content, bytes):
            _refuse("an array is none of bytes")
        if any(type(each) is not int or each < 0 for each in shape):
            _refuse(f"an array's shape is {shape!r:.80}")
        if math.prod(shape) != len(content):
            _refuse(f"an array of shape {shape!r:.80} has {len(content)} bytes")
        order = "F" if fortran else "C"
        self.content = np.frombuffer(content, np.uint8).reshape(shape, order=order)


class _Kind:
    """The type uint8."""

    def __init__(self, name: object, *_: object) -> None:
        if name not in (b"u1", "u1", b"uint8", "uint8"):
            _refuse(f"an array is of type {name!r:.80}")

    def __setstate__(self, state: object) -> None:
        """Ignore byte order and alignment."""


def _reconstruct(*_: object) -> _Array:
    return _Array()


def _encode_latin1(text: str, encoding: str) -> bytes:
    if encoding not in ("latin1", b"latin1"):
        _refuse(f"it asks for the codec {encoding!r:.80}")
    return text.encode("latin1")


class _Name:
    """Stands for the class ``numpy.ndarray``, which is named and never called."""


_KNOWN: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy", "ndarray"): _Name(),
    ("numpy", "dtype"): _Kind,
    ("_codecs", "encode"): _encode_latin1,  # how Python 3 writes bytes for Python 2
}


class _ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            _refuse(f"it asks to run {module}.{name}, which no image data needs")
        return _KNOWN[module, name]


def _plain(value: Any) -> Any:
    """Return ``value``, or its entries if it is a dict, with arrays as NumPy's."""
    if isinstance(value, dict):
        return {key: each.content if type(each) is _Array else each for key, each in value.items()}
    return value
