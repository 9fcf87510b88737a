"""The native kernels over pages: what ``cpu`` does to planes at one address, run by run.

Planes, headers and counts come as :class:`daf.kernels.PageFields`; everything
else, the bytes included, is as in ``daf.kernels.cpu.flat``: with nothing given up,
the pages of a tensor hold what the flat kernels write. Memory must be pinned
by the caller. ``rotated`` codes are written to, and decoded from, the planes
that each run has; everything else needs every plane. Each function raises
KernelError when called outside its contract.
"""

from __future__ import annotations

import daf._native as _native
from daf.core.code_format import MINMAX_BITS, ROTATED_BITS, ElementType, Predicate
from daf.core.code_tables import rotated_levels, rotated_thresholds
from daf.core.errors import KernelError
from daf.kernels import ChannelAffine, Emission, PageFields, RowMoments
from daf.kernels.cpu.checks import (
    INTEGER_BITS,
    affine_fields,
    block_range,
    check_borders,
    check_integers,
    check_key,
    check_member,
    check_pointer,
    check_rotation,
    element_type_number,
)
from daf.kernels.cpu.flat import DERIVATIVE_BITS, chosen_instruction_set
from daf.kernels.cpu.page_checks import (
    check_fields,
    check_whole,
    emission_fields,
    is_whole,
    levels_of,
    mask_fields,
    row_fields,
)

# --- rotated and minmax ---------------------------------------------------------------------


def encode_rotated(
    source: int,
    element_type: ElementType,
    fields: PageFields,
    rounds: int,
    key: int,
    threads: int,
    affine: ChannelAffine | None = None,
    emission: Emission | None = None,
    rows: RowMoments | None = None,
) -> None:
    """Write the headers, and of every run the planes that it has: the first of its ``bits``.

    ``emission`` is computed from the values coded, while they are read; with ``rows`` the
    affine is measured just before.
    """
    check_fields(fields, threads, ROTATED_BITS, source=source)
    check_rotation(rounds, key)
    _native.pages.encode_rotated(
        chosen_instruction_set(),
        source,
        element_type_number(element_type),
        fields,
        rounds,
        key,
        rotated_thresholds(fields.bits).ctypes.data,
        rotated_levels(fields.bits, fields.bits).ctypes.data,
        threads,
        affine_fields(affine),
        *emission_fields(emission, fields.elements),
        row_fields(rows, affine, element_type, fields.elements),
    )


def decode_rotated(
    fields: PageFields,
    rounds: int,
    key: int,
    destination: int,
    element_type: ElementType,
    threads: int,
    affine: ChannelAffine | None = None,
    mask: PageFields | None = None,
    accumulate: bool = False,
    blocks: tuple[int, int] | None = None,
) -> None:
    """Decode every run from the planes it has, with the merged-cell table of that width.

    ``mask`` is a mask of equal count (its pages may be of another size); the
    other options are those of ``cpu.decode_rotated``.
    """
    check_fields(fields, threads, ROTATED_BITS, destination=destination)
    check_rotation(rounds, key)
    _native.pages.decode_rotated(
        chosen_instruction_set(),
        fields,
        rounds,
        key,
        *levels_of(fields, fields.kept),
        *((0, 0.0) if is_whole(fields) else levels_of(fields, fields.kept - 1)),
        destination,
        element_type_number(element_type),
        threads,
        affine_fields(affine),
        mask_fields(mask, fields.elements),
        accumulate,
        *block_range(fields.elements, blocks),
    )


def encode_minmax(
    source: int,
    element_type: ElementType,
    fields: PageFields,
    key: int,
    threads: int,
    affine: ChannelAffine | None = None,
    emission: Emission | None = None,
    rows: RowMoments | None = None,
) -> None:
    """Write every plane and the headers, rounding stochastically; options as above."""
    check_whole(fields, threads, MINMAX_BITS, source=source)
    check_key(key)
    kind = element_type_number(element_type)
    _native.pages.encode_minmax(
        chosen_instruction_set(),
        source,
        kind,
        fields,
        key,
        threads,
        affine_fields(affine),
        *emission_fields(emission, fields.elements),
        row_fields(rows, affine, element_type, fields.elements),
    )


def decode_minmax(
    fields: PageFields,
    destination: int,
    element_type: ElementType,
    threads: int,
    affine: ChannelAffine | None = None,
    mask: PageFields | None = None,
    accumulate: bool = False,
    blocks: tuple[int, int] | None = None,
) -> None:
    """Decode all planes; the options are those of ``decode_rotated``."""
    check_whole(fields, threads, MINMAX_BITS, destination=destination)
    _native.pages.decode_minmax(
        chosen_instruction_set(),
        fields,
        destination,
        element_type_number(element_type),
        threads,
        affine_fields(affine),
        mask_fields(mask, fields.elements),
        accumulate,
        *block_range(fields.elements, blocks),
    )


def encode_steps(
    source: int,
    element_type: ElementType,
    fields: PageFields,
    key: int,
    threads: int,
    affine: ChannelAffine | None = None,
) -> None:
    """Write every plane of what ``affine`` makes numbers of steps, rounding stochastically."""
    check_whole(fields, threads, MINMAX_BITS, source=source)
    check_key(key)
    kind, channels = element_type_number(element_type), affine_fields(affine)
    _native.pages.encode_steps(
        chosen_instruction_set(), source, kind, fields, key, threads, channels
    )


def decode_steps(
    fields: PageFields,
    destination: int,
    element_type: ElementType,
    threads: int,
    affine: ChannelAffine | None = None,
) -> None:
    """Write every number of steps, after ``affine``."""
    check_whole(fields, threads, MINMAX_BITS, destination=destination)
    kind, channels = element_type_number(element_type), affine_fields(affine)
    _native.pages.decode_steps(
        chosen_instruction_set(), fields, destination, kind, threads, channels
    )


# --- mask, derivative, integers -------------------------------------------------------------


def encode_mask(
    source: int,
    element_type: ElementType,
    fields: PageFields,
    predicate: Predicate,
    low: float,
    high: float,
    threads: int,
) -> None:
    """Write one plane of ``predicate``; bounds are rounded to float32."""
    check_whole(fields, threads, (1,), source=source)
    check_member("predicate", predicate, tuple(Predicate))
    kind = element_type_number(element_type)
    _native.pages.encode_mask(
        chosen_instruction_set(), source, kind, fields, int(predicate), low, high, threads
    )


def decode_mask(
    fields: PageFields,
    off_value: float,
    on_value: float,
    destination: int,
    element_type: ElementType,
    threads: int,
) -> None:
    """Write ``on_value`` where the bit is set and ``off_value`` elsewhere."""
    check_whole(fields, threads, (1,), destination=destination)
    kind = element_type_number(element_type)
    _native.pages.decode_mask(
        chosen_instruction_set(), fields, off_value, on_value, destination, kind, threads
    )


def encode_derivative(
    source: int, element_type: ElementType, fields: PageFields, borders: int, threads: int
) -> bool:
    """Write how many of the ``2**bits - 1`` borders lie strictly below each element.

    Returns False, the planes then being worthless, if any element is not finite.
    """
    check_whole(fields, threads, DERIVATIVE_BITS, source=source)
    check_borders(borders, 2**fields.bits - 1)
    kind = element_type_number(element_type)
    coded: bool = _native.pages.encode_derivative(
        chosen_instruction_set(), source, kind, fields, borders, threads
    )
    return coded


def decode_derivative(
    fields: PageFields, levels: int, destination: int, element_type: ElementType, threads: int
) -> None:
    """Write the level of every code; ``levels`` is the address of ``2**bits`` float32 numbers."""
    check_whole(fields, threads, DERIVATIVE_BITS, destination=destination)
    check_pointer("levels", levels)
    kind = element_type_number(element_type)
    _native.pages.decode_derivative(
        chosen_instruction_set(), fields, levels, destination, kind, threads
    )


def encode_integers(
    source: int, item_bytes: int, fields: PageFields, base: int, threads: int
) -> None:
    """Write ``value - base`` losslessly; items are signed (or bool) of 1, 2, 4 or 8 bytes.

    Raises:
        KernelError: also when a difference does not fit the planes.
    """
    check_integers(item_bytes, fields.bits)
    check_whole(fields, threads, INTEGER_BITS, source=source)
    fits = _native.pages.encode_integers(
        chosen_instruction_set(), source, item_bytes, fields, base & (2**64 - 1), threads
    )
    if not fits:
        raise KernelError(
            f"asked for {fields.bits}-bit codes from {base} up; some item needs more bits: "
            "measure the range first"
        )


def decode_integers(
    fields: PageFields, base: int, destination: int, item_bytes: int, threads: int
) -> None:
    """Write ``code + base`` into signed items of ``item_bytes`` bytes."""
    check_integers(item_bytes, fields.bits)
    check_whole(fields, threads, INTEGER_BITS, destination=destination)
    _native.pages.decode_integers(
        chosen_instruction_set(), fields, base & (2**64 - 1), destination, item_bytes, threads
    )
