"""The native codecs: encoders and decoders of planes in pages.

Addresses are ints (``tensor.data_ptr()``); :class:`daf.kernels.PageFields` carries planes, headers
and counts. Nothing is allocated here; the caller pins pages. ``rotated`` codes use the planes that
each run has; all other codes need every plane. ``threads`` bounds the threads used, the caller's
included. Small inputs use one, and the bytes never depend on it. ``key`` is an int in [0, 2**64).
Each function raises KernelError when called outside its contract.
"""

from __future__ import annotations

from typing import Any

import daf._native as _native
from daf.core.code_format import MINMAX_BITS, ROTATED_BITS, ElementType, Predicate
from daf.core.code_tables import rotated_level_factor, rotated_levels, rotated_thresholds
from daf.core.errors import KernelError
from daf.kernels import ChannelAffine, Emission, PageFields, RowMoments
from daf.kernels.cpu.checks import (
    INTEGER_BITS,
    check_borders,
    check_fields,
    check_item_bytes,
    check_member,
    check_pointer,
    check_whole,
    is_whole,
)
from daf.kernels.cpu.job import Job, run

DERIVATIVE_BITS = range(1, 9)


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
    """Write the headers and the planes that each run has, the first of its ``bits``.

    ``rows`` measure the affine just before; ``emission`` is computed from the encoded values.
    """
    job = Job(
        *(threads, fields.elements, element_type, source, affine),
        pages=check_fields(fields, ROTATED_BITS),
        rounds=rounds,
        key=key,
        thresholds=rotated_thresholds(fields.bits).ctypes.data,
        levels=rotated_levels(fields.bits, fields.bits).ctypes.data,
        emission=emission,
        rows=rows,
    )
    run(_native.encode_rotated, job, "source")


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

    In this order: ``affine``, ``accumulate`` onto the destination, ``mask`` (of equal count, pages
    of any size: a clear bit gives +0), rounding. With ``blocks`` (first, last), ``destination``
    holds only these blocks of 256; all else is the whole tensor's.
    """
    job = Job(
        *(threads, fields.elements, element_type),
        **rotated_code(fields, rounds, key),
        destination=destination,
        after=affine,
        mask=mask,
        accumulate=accumulate,
        blocks=blocks,
    )
    run(_native.decode_rotated, job, "destination")


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
    """Write all planes and headers, rounding stochastically; options as in ``encode_rotated``."""
    pages = check_whole(fields, MINMAX_BITS)
    job = Job(threads, fields.elements, element_type, source, affine, pages=pages, key=key)
    run(_native.encode_minmax, job._replace(emission=emission, rows=rows), "source")


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
    """Decode all planes; options as in ``decode_rotated``."""
    job = Job(
        *(threads, fields.elements, element_type),
        pages=check_whole(fields, MINMAX_BITS),
        destination=destination,
        after=affine,
        mask=mask,
        accumulate=accumulate,
        blocks=blocks,
    )
    run(_native.decode_minmax, job, "destination")


def encode_steps(
    source: int,
    element_type: ElementType,
    fields: PageFields,
    key: int,
    threads: int,
    affine: ChannelAffine | None = None,
) -> None:
    """Write every plane of the numbers of steps that ``affine`` gives, rounding stochastically.

    Numbers beyond ``0 … 2**bits - 1`` become the nearer end, NaN 0; there are no headers.
    """
    pages = check_whole(fields, MINMAX_BITS)
    job = Job(threads, fields.elements, element_type, source, affine, pages=pages, key=key)
    run(_native.encode_steps, job, "source")


def decode_steps(
    fields: PageFields,
    destination: int,
    element_type: ElementType,
    threads: int,
    affine: ChannelAffine | None = None,
) -> None:
    """Write every number of steps, after ``affine``."""
    pages = check_whole(fields, MINMAX_BITS)
    job = Job(threads, fields.elements, element_type, destination=destination, after=affine)
    run(_native.decode_steps, job._replace(pages=pages), "destination")


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
    check_member("predicate", predicate, tuple(Predicate))
    job = Job(threads, fields.elements, element_type, source, pages=check_whole(fields, (1,)))
    run(_native.encode_mask, job._replace(predicate=predicate, low=low, high=high), "source")


def decode_mask(
    fields: PageFields,
    off_value: float,
    on_value: float,
    destination: int,
    element_type: ElementType,
    threads: int,
) -> None:
    """Write ``on_value`` where the bit is set and ``off_value`` elsewhere."""
    job = Job(
        *(threads, fields.elements, element_type),
        destination=destination,
        pages=check_whole(fields, (1,)),
        low=off_value,
        high=on_value,
    )
    run(_native.decode_mask, job, "destination")


def encode_derivative(
    source: int, element_type: ElementType, fields: PageFields, borders: int, threads: int
) -> bool:
    """Write how many borders lie strictly below each element; False if one is not finite."""
    pages = check_whole(fields, DERIVATIVE_BITS)
    check_borders(borders, 2**fields.bits - 1)
    job = Job(threads, fields.elements, element_type, source, pages=pages, table=borders)
    return run(_native.encode_derivative, job, "source")


def decode_derivative(
    fields: PageFields, levels: int, destination: int, element_type: ElementType, threads: int
) -> None:
    """Write the level of every code; ``levels`` is the address of ``2**bits`` float32 numbers."""
    pages = check_whole(fields, DERIVATIVE_BITS)
    check_pointer("levels", levels)
    job = Job(threads, fields.elements, element_type, destination=destination, pages=pages)
    run(_native.decode_derivative, job._replace(table=levels), "destination")


def encode_integers(
    source: int, item_bytes: int, fields: PageFields, base: int, threads: int
) -> None:
    """Write ``value - base`` losslessly; items are signed (or bool) of 1, 2, 4 or 8 bytes.

    Raises:
        KernelError: also if a difference does not fit the planes.
    """
    job = Job(threads, fields.elements, source=source, **integers(fields, item_bytes, base))
    if not run(_native.encode_integers, job, "source"):
        raise KernelError(
            f"asked for {fields.bits}-bit codes from {base} up; some item needs more bits: "
            "measure the range first"
        )


def decode_integers(
    fields: PageFields, base: int, destination: int, item_bytes: int, threads: int
) -> None:
    """Write ``code + base`` into signed items of ``item_bytes`` bytes."""
    code = integers(fields, item_bytes, base)
    job = Job(threads, fields.elements, destination=destination, **code)
    run(_native.decode_integers, job, "destination")


def rotated_code(fields: PageFields, rounds: int, key: int) -> dict[str, Any]:
    """Return what a decoder of ``rotated`` reads, with the tables of both widths that runs have."""
    check_fields(fields, ROTATED_BITS)
    found: dict[str, Any] = {"pages": fields, "rounds": rounds, "key": key}
    found["levels"], found["level_factor"] = _levels(fields, fields.kept)
    if not is_whole(fields):
        shorter = _levels(fields, fields.kept - 1)
        found["shorter_levels"], found["shorter_level_factor"] = shorter
    return found


def _levels(fields: PageFields, kept_bits: int) -> tuple[int, float]:
    address = int(rotated_levels(fields.bits, kept_bits).ctypes.data)
    return address, rotated_level_factor(fields.bits, kept_bits)


def integers(fields: PageFields, item_bytes: int, base: int) -> dict[str, Any]:
    """Return a job's planes of integers, their item size and base."""
    pages = check_whole(fields, INTEGER_BITS)
    check_item_bytes(item_bytes)
    return {"pages": pages, "item_bytes": item_bytes, "base": base & (2**64 - 1)}
