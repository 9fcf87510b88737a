"""The native kernels: raw addresses in, every argument checked, the GIL released while they run.

Addresses are ints (``tensor.data_ptr()``); what lies there is described in
``daf.kernels``. Nothing is allocated here: callers bring every buffer. Each
function raises KernelError when called outside its contract. ``threads`` is
the most threads to use, the caller's among them; small inputs use one, and
the bytes never depend on it. ``key`` is a 64-bit seed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise

from daf.errors import KernelError
from daf.kernels import MINMAX_BITS, ROTATED_BITS, ChannelAffine, ElementType, Predicate
from daf.kernels.tables import rotated_level_factor, rotated_levels, rotated_thresholds

try:
    import daf._native as _native
except ImportError as problem:  # a checkout that was never built
    raise KernelError(
        "asked for the native kernels, found none (daf._native); install DAF again to build them"
    ) from problem

DERIVATIVE_BITS = range(1, 9)
INTEGER_BITS = range(1, 65)

_forced_set: ContextVar[str] = ContextVar("forced_instruction_set", default="")


def instruction_sets() -> tuple[str, ...]:
    """Instruction sets that this processor runs and this build has, widest first."""
    return tuple(_native.instruction_sets())


@contextmanager
def use_instruction_set(name: str) -> Iterator[None]:
    """Run the kernels of this context (thread, task) with one instruction set; for tests.

    Raises:
        KernelError: the processor or the build does not have it.
    """
    if name not in instruction_sets():
        raise KernelError(
            f"asked for instruction set {name!r}, found {', '.join(instruction_sets())}"
        )
    token = _forced_set.set(name)
    try:
        yield
    finally:
        _forced_set.reset(token)


# --- rotated and minmax ---------------------------------------------------------------------


def encode_rotated(
    source: int,
    element_type: ElementType,
    count: int,
    bits: int,
    rounds: int,
    key: int,
    planes: int,
    headers: int,
    threads: int,
    affine: ChannelAffine | None = None,
) -> None:
    """Write ``bits`` planes and the headers of ``count`` elements (of ``affine`` of them)."""
    _check_call(count, threads, source=source, planes=planes, headers=headers)
    _check_member("bits", bits, ROTATED_BITS)
    _check_rotation(rounds, key)
    _native.encode_rotated(
        _forced_set.get(),
        source,
        _element_type(element_type),
        count,
        bits,
        rounds,
        key,
        planes,
        headers,
        rotated_thresholds(bits).ctypes.data,
        rotated_levels(bits, bits).ctypes.data,
        threads,
        _affine(affine),
    )


def decode_rotated(
    planes: int,
    headers: int,
    count: int,
    bits: int,
    kept_bits: int,
    rounds: int,
    key: int,
    destination: int,
    element_type: ElementType,
    threads: int,
    affine: ChannelAffine | None = None,
    mask: int = 0,
    accumulate: bool = False,
) -> None:
    """Decode from the first ``kept_bits`` of ``bits`` planes; only these need to exist.

    Then, in this order: ``affine``, ``accumulate`` onto the destination, ``mask``
    (address of one plane of words, or 0: a clear bit gives +0), rounding.
    """
    _check_call(count, threads, planes=planes, headers=headers, destination=destination)
    _check_member("bits", bits, ROTATED_BITS)
    _check_member("kept_bits", kept_bits, range(1, bits + 1))
    _check_rotation(rounds, key)
    _native.decode_rotated(
        _forced_set.get(),
        planes,
        headers,
        count,
        kept_bits,
        rounds,
        key,
        rotated_levels(bits, kept_bits).ctypes.data,
        rotated_level_factor(bits, kept_bits),
        destination,
        _element_type(element_type),
        threads,
        _affine(affine),
        mask,
        accumulate,
    )


def encode_minmax(
    source: int,
    element_type: ElementType,
    count: int,
    bits: int,
    key: int,
    planes: int,
    headers: int,
    threads: int,
    affine: ChannelAffine | None = None,
) -> None:
    """Write ``bits`` planes and the headers, rounding stochastically."""
    _check_call(count, threads, source=source, planes=planes, headers=headers)
    _check_member("bits", bits, MINMAX_BITS)
    _check_key(key)
    _native.encode_minmax(
        _forced_set.get(),
        source,
        _element_type(element_type),
        count,
        bits,
        key,
        planes,
        headers,
        threads,
        _affine(affine),
    )


def decode_minmax(
    planes: int,
    headers: int,
    count: int,
    bits: int,
    destination: int,
    element_type: ElementType,
    threads: int,
    affine: ChannelAffine | None = None,
    mask: int = 0,
    accumulate: bool = False,
) -> None:
    """Decode all planes; the options are those of ``decode_rotated``."""
    _check_call(count, threads, planes=planes, headers=headers, destination=destination)
    _check_member("bits", bits, MINMAX_BITS)
    _native.decode_minmax(
        _forced_set.get(),
        planes,
        headers,
        count,
        bits,
        destination,
        _element_type(element_type),
        threads,
        _affine(affine),
        mask,
        accumulate,
    )


# --- mask, derivative, integers -------------------------------------------------------------


def encode_mask(
    source: int,
    element_type: ElementType,
    count: int,
    predicate: Predicate,
    low: float,
    high: float,
    words: int,
    threads: int,
) -> None:
    """Write one plane of ``predicate``; bounds are rounded to float32."""
    _check_call(count, threads, source=source, words=words)
    _check_member("predicate", predicate, tuple(Predicate))
    kind = _element_type(element_type)
    _native.encode_mask(
        _forced_set.get(), source, kind, count, int(predicate), low, high, words, threads
    )


def decode_mask(
    words: int,
    count: int,
    off_value: float,
    on_value: float,
    destination: int,
    element_type: ElementType,
    threads: int,
) -> None:
    """Write ``on_value`` where the bit is set and ``off_value`` elsewhere."""
    _check_call(count, threads, words=words, destination=destination)
    kind = _element_type(element_type)
    _native.decode_mask(
        _forced_set.get(), words, count, off_value, on_value, destination, kind, threads
    )


def encode_derivative(
    source: int,
    element_type: ElementType,
    count: int,
    bits: int,
    borders: int,
    planes: int,
    threads: int,
) -> bool:
    """Write, for every element, how many borders lie strictly below it.

    ``borders`` is the address of ``2**bits - 1`` ascending float32 numbers.
    Returns False, the planes then being worthless, if any element is not finite.
    """
    _check_call(count, threads, source=source, planes=planes)
    _check_member("bits", bits, DERIVATIVE_BITS)
    _check_borders(borders, 2**bits - 1)
    kind = _element_type(element_type)
    coded: bool = _native.encode_derivative(
        _forced_set.get(), source, kind, count, bits, borders, planes, threads
    )
    return coded


def decode_derivative(
    planes: int,
    count: int,
    bits: int,
    levels: int,
    destination: int,
    element_type: ElementType,
    threads: int,
) -> None:
    """Write the level of every code; ``levels`` is the address of ``2**bits`` float32 numbers."""
    _check_call(count, threads, planes=planes, destination=destination)
    _check_member("bits", bits, DERIVATIVE_BITS)
    _check_pointer("levels", levels)
    kind = _element_type(element_type)
    _native.decode_derivative(
        _forced_set.get(), planes, count, bits, levels, destination, kind, threads
    )


def encode_integers(
    source: int, item_bytes: int, count: int, bits: int, base: int, planes: int, threads: int
) -> None:
    """Write ``value - base`` losslessly; items are signed (or bool) of 1, 2, 4 or 8 bytes.

    Raises:
        KernelError: also when a difference does not fit ``bits``.
    """
    _check_integers(item_bytes, bits)
    _check_call(count, threads, source=source, planes=planes)
    fits = _native.encode_integers(
        _forced_set.get(), source, item_bytes, count, bits, base & (2**64 - 1), planes, threads
    )
    if not fits:
        raise KernelError(
            f"asked for {bits}-bit codes from {base} up; some item needs more bits: "
            "measure the range first"
        )


def decode_integers(
    planes: int, count: int, bits: int, base: int, destination: int, item_bytes: int, threads: int
) -> None:
    """Write ``code + base`` into signed items of ``item_bytes`` bytes."""
    _check_integers(item_bytes, bits)
    _check_call(count, threads, planes=planes, destination=destination)
    _native.decode_integers(
        _forced_set.get(), planes, count, bits, base & (2**64 - 1), destination, item_bytes, threads
    )


def copy(source: int, destination: int, size_bytes: int, threads: int) -> None:
    """The C library's copy, split over threads as the kernels are: the benchmarks' yardstick."""
    _check_call(size_bytes, threads, source=source, destination=destination)
    _native.copy(source, destination, size_bytes, threads)


# --- contract -------------------------------------------------------------------------------


def _check_call(count: int, threads: int, **pointers: int) -> None:
    if count < 0:
        raise KernelError(f"asked for {count} elements; a count is 0 or more")
    if threads < 1:
        raise KernelError(f"asked for {threads} threads; the least is 1")
    for name, address in pointers.items():
        if count > 0 or address < 0:
            _check_pointer(name, address)


def _check_pointer(name: str, address: int) -> None:
    if not 0 < address < 2**64:
        raise KernelError(f"asked for {name} at address {address}; give a tensor's data_ptr()")


def _check_member(name: str, value: int, allowed: range | tuple[int, ...]) -> None:
    if value not in allowed:
        raise KernelError(f"asked for {name} {value!r}; {allowed[0]} to {allowed[-1]} exist")


def _check_key(key: int) -> None:
    if not 0 <= key < 2**64:
        raise KernelError(f"asked for key {key}; a key has 64 bits and no sign")


def _check_rotation(rounds: int, key: int) -> None:
    _check_member("rounds", rounds, (1, 2))
    _check_key(key)


def _check_integers(item_bytes: int, bits: int) -> None:
    if item_bytes not in (1, 2, 4, 8):
        raise KernelError(f"asked for items of {item_bytes} bytes; 1, 2, 4 and 8 exist")
    _check_member("bits", bits, INTEGER_BITS)


def _check_borders(address: int, count: int) -> None:
    _check_pointer("borders", address)
    borders = (ctypes.c_float * count).from_address(address)
    if not all(low < high for low, high in pairwise(borders)) or borders[0] != borders[0]:
        raise KernelError(f"asked for borders {list(borders)}; they must ascend")


def _element_type(element_type: ElementType) -> int:
    try:
        return int(ElementType(element_type))
    except ValueError as problem:
        raise KernelError(
            f"asked for element type {element_type!r}; float32, bfloat16 and float16 exist"
        ) from problem


def _affine(affine: ChannelAffine | None) -> ChannelAffine | tuple[()]:
    if affine is None:
        return ()
    if affine.channels < 1 or affine.inner < 1:
        raise KernelError(
            f"asked for {affine.channels} channels, {affine.inner} elements each; the least is 1"
        )
    _check_pointer("scale", affine.scale_pointer)
    _check_pointer("shift", affine.shift_pointer)
    return affine
