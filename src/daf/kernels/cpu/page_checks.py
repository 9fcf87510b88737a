"""What a call of a kernel over pages must keep to; each check raises KernelError."""

from __future__ import annotations

import math

from daf.core.code_format import ElementType
from daf.core.code_tables import rotated_level_factor, rotated_levels
from daf.core.errors import KernelError
from daf.kernels import ChannelAffine, Emission, PageFields, RowMoments
from daf.kernels.cpu.checks import affine_fields, check_call, check_member, check_pointer


def check_fields(
    fields: PageFields, threads: int, widths: range | tuple[int, ...], **pointers: int
) -> None:
    """A width that exists, addresses, and at least one plane everywhere."""
    check_member("bits", fields.bits, widths)
    check_call(fields.elements, threads, **pointers, region=fields.region, table=fields.table)
    least = fields.kept if is_whole(fields) else fields.kept - 1
    if not 1 <= least <= fields.kept <= fields.bits:
        raise KernelError(
            f"asked to read {least} of {fields.bits} planes; at least one must be left"
        )


def check_whole(
    fields: PageFields, threads: int, widths: range | tuple[int, ...], **pointers: int
) -> None:
    """The same, and no plane given up."""
    check_fields(fields, threads, widths, **pointers)
    if fields.kept < fields.bits or not is_whole(fields):
        raise KernelError(
            f"asked for all {fields.bits} planes of a tensor that has given some up; "
            "only rotated codes can be read from fewer"
        )


def is_whole(fields: PageFields) -> bool:
    """Does every run have the same planes?"""
    return fields.full_runs == fields.runs


def levels_of(fields: PageFields, kept_bits: int) -> tuple[int, float]:
    """Address of the merged-cell table, and its factor."""
    address = int(rotated_levels(fields.bits, kept_bits).ctypes.data)
    return address, rotated_level_factor(fields.bits, kept_bits)


def mask_fields(mask: PageFields | None, count: int) -> PageFields | tuple[()]:
    """A mask of as many elements as the native code takes it: its fields, or nothing."""
    if mask is None:
        return ()
    if mask.elements != count or (mask.bits, mask.kept, mask.full_runs) != (1, 1, mask.runs):
        raise KernelError(
            f"asked to mask {count} elements by {mask.elements} of {mask.bits} planes; "
            "a mask has one plane and a bit for every element"
        )
    return mask


_Emitted = tuple[int, int, ChannelAffine | tuple[()], float]


def emission_fields(
    emission: Emission | None, count: int
) -> tuple[_Emitted | tuple[()], PageFields | tuple[()]]:
    """An emission as the native code takes it: what is written, and the mask."""
    if emission is None:
        return (), ()
    check_pointer("destination", emission.destination_pointer)
    if not emission.most > 0 or (emission.mask is None and emission.most != math.inf):
        raise KernelError(
            f"asked to let pass what is above 0 and below {emission.most}; give a bound above 0, "
            "and a mask"
        )
    fields = (
        emission.destination_pointer,
        emission.addend_pointer,
        affine_fields(emission.affine),
        # To the kernel NaN is no bound: no number is as great.
        math.nan if emission.most == math.inf else emission.most,
    )
    return fields, mask_fields(emission.mask, count)


def row_fields(
    rows: RowMoments | None, affine: ChannelAffine | None, element_type: ElementType, count: int
) -> RowMoments | tuple[()]:
    """Rows to measure as the native code takes them, or nothing."""
    if rows is None:
        return ()
    if affine is None or affine.channels * affine.inner != count:
        raise KernelError(
            f"asked to measure the rows of {count} elements into {affine}; give room for the "
            "affine of each row, inner being a row's length"
        )
    if element_type is not ElementType.FLOAT32 or not rows.epsilon >= 0:
        raise KernelError(
            f"asked to measure rows of {element_type!r} with epsilon {rows.epsilon}; rows are "
            "float32, epsilon 0 or more"
        )
    return rows
