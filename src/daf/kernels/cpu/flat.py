"""The native kernels: raw addresses in, every argument checked, the GIL released while they run.

Addresses are ints (``tensor.data_ptr()``); what lies there is described in
``daf.kernels``. Nothing is allocated here: callers bring every buffer. Each
function raises KernelError when called outside its contract. ``threads`` is
the most threads to use, the caller's among them; small inputs use one, and
the bytes never depend on it. ``key`` is a 64-bit seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from daf.core.code_format import MINMAX_BITS, ROTATED_BITS, ElementType, Predicate
from daf.core.code_tables import rotated_level_factor, rotated_levels, rotated_thresholds
from daf.core.errors import KernelError
from daf.kernels import ChannelAffine, ChannelSums, StridedView
from daf.kernels.cpu.checks import (
    affine_fields,
    block_range,
    check_borders,
    check_call,
    check_integers,
    check_key,
    check_member,
    check_pointer,
    check_rotation,
    element_type_number,
    sums_fields,
    view_fields,
)

try:
    import daf._native as _native
except ImportError as problem:  # a checkout that was never built
    raise KernelError(
        "asked for the native kernels, found none (daf._native); install DAF again to build them"
    ) from problem

DERIVATIVE_BITS = range(1, 9)

_forced_set: ContextVar[str] = ContextVar("forced_instruction_set", default="")


def instruction_sets() -> tuple[str, ...]:
    """Instruction sets that this processor runs and this build has, widest first."""
    return tuple(_native.instruction_sets())


def chosen_instruction_set() -> str:
    """The one that this context was told to use; empty for the widest."""
    return _forced_set.get()


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
    view: StridedView | None = None,
    sums: ChannelSums | None = None,
    blocks: tuple[int, int] | None = None,
) -> None:
    """Write ``bits`` planes and the headers of ``count`` elements (of ``affine`` of them).

    ``source`` holds the elements one after the other, or is where those of
    ``view`` begin, which are read without a copy. With ``sums``, the sums and
    sums of squares of the values coded (after ``affine``) are taken while these
    are read. With ``blocks`` (first, last), only these blocks of 256 are coded:
    ``source`` then holds their elements alone unless it is a view, ``count``,
    ``planes`` and ``headers`` being the whole tensor's all the same.
    """
    check_call(count, threads, source=source, planes=planes, headers=headers)
    check_member("bits", bits, ROTATED_BITS)
    check_rotation(rounds, key)
    _native.encode_rotated(
        _forced_set.get(),
        source,
        element_type_number(element_type),
        count,
        bits,
        rounds,
        key,
        planes,
        headers,
        rotated_thresholds(bits).ctypes.data,
        rotated_levels(bits, bits).ctypes.data,
        threads,
        affine_fields(affine),
        _extras(count, view, sums, blocks),
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
    blocks: tuple[int, int] | None = None,
) -> None:
    """Decode from the first ``kept_bits`` of ``bits`` planes; only these need to exist.

    Then, in this order: ``affine``, ``accumulate`` onto the destination, ``mask``
    (address of one plane of words, or 0: a clear bit gives +0), rounding.
    With ``blocks`` (first, last), ``destination`` holds the elements of these
    blocks of 256 alone; all else, ``mask`` included, is the whole tensor's.
    """
    check_call(count, threads, planes=planes, headers=headers, destination=destination)
    check_member("bits", bits, ROTATED_BITS)
    check_member("kept_bits", kept_bits, range(1, bits + 1))
    check_rotation(rounds, key)
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
        element_type_number(element_type),
        threads,
        affine_fields(affine),
        mask,
        accumulate,
        *block_range(count, blocks),
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
    view: StridedView | None = None,
    sums: ChannelSums | None = None,
    blocks: tuple[int, int] | None = None,
) -> None:
    """Write ``bits`` planes and the headers, rounding stochastically.

    The options are those of ``encode_rotated``.
    """
    check_call(count, threads, source=source, planes=planes, headers=headers)
    check_member("bits", bits, MINMAX_BITS)
    check_key(key)
    _native.encode_minmax(
        _forced_set.get(),
        source,
        element_type_number(element_type),
        count,
        bits,
        key,
        planes,
        headers,
        threads,
        affine_fields(affine),
        _extras(count, view, sums, blocks),
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
    blocks: tuple[int, int] | None = None,
) -> None:
    """Decode all planes; the options are those of ``decode_rotated``."""
    check_call(count, threads, planes=planes, headers=headers, destination=destination)
    check_member("bits", bits, MINMAX_BITS)
    _native.decode_minmax(
        _forced_set.get(),
        planes,
        headers,
        count,
        bits,
        destination,
        element_type_number(element_type),
        threads,
        affine_fields(affine),
        mask,
        accumulate,
        *block_range(count, blocks),
    )


def encode_steps(
    source: int,
    element_type: ElementType,
    count: int,
    bits: int,
    key: int,
    planes: int,
    threads: int,
    affine: ChannelAffine | None = None,
) -> None:
    """Write ``bits`` planes of what ``affine`` makes numbers of steps, rounded stochastically.

    What lies beyond ``0 … 2**bits - 1`` is its nearer end, NaN is 0; there are no headers.
    """
    check_call(count, threads, source=source, planes=planes)
    check_member("bits", bits, MINMAX_BITS)
    check_key(key)
    kind, fields = element_type_number(element_type), affine_fields(affine)
    _native.encode_steps(_forced_set.get(), source, kind, count, bits, key, planes, threads, fields)


def decode_steps(
    planes: int,
    count: int,
    bits: int,
    destination: int,
    element_type: ElementType,
    threads: int,
    affine: ChannelAffine | None = None,
) -> None:
    """Write every number of steps, after ``affine``."""
    check_call(count, threads, planes=planes, destination=destination)
    check_member("bits", bits, MINMAX_BITS)
    kind, fields = element_type_number(element_type), affine_fields(affine)
    _native.decode_steps(_forced_set.get(), planes, count, bits, destination, kind, threads, fields)


def _extras(
    count: int,
    view: StridedView | None,
    sums: ChannelSums | None,
    blocks: tuple[int, int] | None,
) -> tuple[int, int, StridedView | tuple[()], ChannelSums | tuple[()]]:
    if sums is not None and blocks is not None:
        raise KernelError("asked for sums of some blocks; they are taken of whole tensors only")
    return *block_range(count, blocks), view_fields(view, count), sums_fields(sums)


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
    check_call(count, threads, source=source, words=words)
    check_member("predicate", predicate, tuple(Predicate))
    kind = element_type_number(element_type)
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
    check_call(count, threads, words=words, destination=destination)
    kind = element_type_number(element_type)
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
    check_call(count, threads, source=source, planes=planes)
    check_member("bits", bits, DERIVATIVE_BITS)
    check_borders(borders, 2**bits - 1)
    kind = element_type_number(element_type)
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
    check_call(count, threads, planes=planes, destination=destination)
    check_member("bits", bits, DERIVATIVE_BITS)
    check_pointer("levels", levels)
    kind = element_type_number(element_type)
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
    check_integers(item_bytes, bits)
    check_call(count, threads, source=source, planes=planes)
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
    check_integers(item_bytes, bits)
    check_call(count, threads, planes=planes, destination=destination)
    _native.decode_integers(
        _forced_set.get(), planes, count, bits, base & (2**64 - 1), destination, item_bytes, threads
    )


def copy(source: int, destination: int, size_bytes: int, threads: int) -> None:
    """The C library's copy, split over threads as the kernels are: the benchmarks' yardstick."""
    check_call(size_bytes, threads, source=source, destination=destination)
    _native.copy(source, destination, size_bytes, threads)
