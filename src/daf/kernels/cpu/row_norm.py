"""The backward of a normalisation of rows: layer and root-mean-square normalisation.

Its forward is an encoder's or :func:`daf.kernels.cpu.channel_norm.emit`, with ``rows``. One
pass over the values, which are decoded a row at a time. Values are float32,
addresses ints; memory in pages must be pinned by the caller. Each function
raises KernelError when called outside its contract.
"""

from __future__ import annotations

import daf._native as _native
from daf.core.code_format import MINMAX_BITS, ROTATED_BITS
from daf.core.errors import KernelError
from daf.kernels import ChannelAffine, PageFields, RowGradient
from daf.kernels.cpu.checks import affine_fields, check_call, check_pointer, check_rotation
from daf.kernels.cpu.flat import chosen_instruction_set
from daf.kernels.cpu.page_checks import check_fields, check_whole, is_whole, levels_of


def workspace_bytes(count: int, length: int, threads: int) -> int:
    """Bytes that backward works in for ``count`` elements in rows of ``length``."""
    check_call(count, threads)
    _check_length(count, length)
    size: int = _native.rows.workspace_bytes(count, length, threads)
    return size


def backward_kept(
    source: int, count: int, affine: ChannelAffine | None, gradient: RowGradient, threads: int
) -> None:
    """The values are ``affine`` of ``count`` elements."""
    check_call(count, threads, source=source)
    _native.rows.backward_kept(
        chosen_instruction_set(),
        source,
        count,
        threads,
        affine_fields(affine),
        _checked(gradient, count),
    )


def backward_rotated(
    fields: PageFields, rounds: int, key: int, gradient: RowGradient, threads: int
) -> None:
    """The values are those of a ``rotated`` code, whatever it has left."""
    check_fields(fields, threads, ROTATED_BITS)
    check_rotation(rounds, key)
    _native.rows.backward_rotated(
        chosen_instruction_set(),
        fields,
        rounds,
        key,
        *levels_of(fields, fields.kept),
        *((0, 0.0) if is_whole(fields) else levels_of(fields, fields.kept - 1)),
        threads,
        _checked(gradient, fields.elements),
    )


def backward_minmax(fields: PageFields, gradient: RowGradient, threads: int) -> None:
    """The values are those of a ``minmax`` code."""
    check_whole(fields, threads, MINMAX_BITS)
    _native.rows.backward_minmax(
        chosen_instruction_set(), fields, threads, _checked(gradient, fields.elements)
    )


def _checked(gradient: RowGradient, count: int) -> RowGradient:
    _check_length(count, gradient.length)
    places = gradient._asdict()
    wanted = ("sums", "products") if gradient.sums_pointer or gradient.products_pointer else ()
    for name in (*wanted, "workspace", *(("gradient", "scale") if count else ())):
        check_pointer(name, places[f"{name}_pointer"])
    return gradient


def _check_length(count: int, length: int) -> None:
    if length < 1 or count % length:
        raise KernelError(
            f"asked for rows of {length} in {count} elements; give a length that divides them"
        )
