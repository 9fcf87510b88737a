"""Backward of layer and root-mean-square normalisation, over rows.

Forward is an encoder's or :func:`daf.kernels.cpu.channel_norm.emit`, with ``rows``. Backward is one
pass over the values, decoded a row at a time. Values are float32, addresses ints; the caller pins
memory in pages. Each function raises KernelError when called outside its contract.
"""

from __future__ import annotations

import daf._native as _native
from daf.core.code_format import MINMAX_BITS
from daf.core.errors import KernelError
from daf.kernels import ChannelAffine, PageFields, RowGradient
from daf.kernels.cpu.checks import check_call, check_pointer, check_whole
from daf.kernels.cpu.job import Job, run
from daf.kernels.cpu.paged import rotated_code


def workspace_bytes(count: int, length: int, threads: int) -> int:
    """Return the workspace bytes of backward for ``count`` elements in rows of ``length``."""
    check_call(count, threads)
    _check_length(count, length)
    size: int = _native.rows_workspace_bytes(count, length, threads)
    return size


def backward_kept(
    source: int, count: int, affine: ChannelAffine | None, gradient: RowGradient, threads: int
) -> None:
    """Run backward over the values ``affine`` of ``count`` elements."""
    rows = _checked(gradient, count)
    job = Job(threads, count, source=source, affine=affine, row_gradient=rows)
    run(_native.copy_blocks, job, "source")


def backward_rotated(
    fields: PageFields, rounds: int, key: int, gradient: RowGradient, threads: int
) -> None:
    """Run backward over a ``rotated`` code, from the planes it has left."""
    code, rows = rotated_code(fields, rounds, key), _checked(gradient, fields.elements)
    run(_native.decode_rotated, Job(threads, fields.elements, row_gradient=rows, **code))


def backward_minmax(fields: PageFields, gradient: RowGradient, threads: int) -> None:
    """Run backward over a ``minmax`` code."""
    pages, rows = check_whole(fields, MINMAX_BITS), _checked(gradient, fields.elements)
    run(_native.decode_minmax, Job(threads, fields.elements, row_gradient=rows, pages=pages))


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
