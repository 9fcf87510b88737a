"""The native kernels of planes and of blocks: a :class:`Job` each, checked and completed.

Nothing is allocated here; the caller pins pages. ``Job.threads`` bounds the threads used, the
caller's included. Small inputs use one, and the bytes never depend on it. A job with a ``gradient``
or ``row_gradient`` runs a pass of backward over the values that are read, a block or a row at a
time, in place of writing them. Each function raises KernelError when called outside its contract.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

import daf._native as _native
from daf.core.code_format import Predicate
from daf.core.code_tables import (
    DERIVATIVE_PIECES,
    rotated_level_factor,
    rotated_levels,
    rotated_thresholds,
)
from daf.core.errors import KernelError
from daf.kernels import CODEC_BITS, Codec, PageFields
from daf.kernels.cpu import checks
from daf.kernels.cpu.job import Job, run

_ENCODERS = {codec: getattr(_native, f"encode_{codec}") for codec in Codec}
_DECODERS = {codec: getattr(_native, f"decode_{codec}") for codec in Codec}


def encode(codec: Codec, job: Job) -> bool:
    """Write the planes that each run of ``job.pages`` has, and the headers, of the source.

    False: an element is not finite (planes of derivative codes are worthless then, blocks of values
    NaN). KernelError: also if an integer's difference from the base does not fit.
    """
    pages = _checked(codec, job)
    if codec is Codec.ROTATED:
        job = job._replace(**_encoding_tables(pages.bits))
    elif codec is Codec.DERIVATIVE:
        checks.check_borders(job.table, DERIVATIVE_PIECES - 1)
    elif codec is Codec.MASK:
        checks.check_member("predicate", job.predicate, tuple(Predicate))
    done = run(_ENCODERS[codec], job, "source")
    if codec is Codec.INTEGERS and not done:
        raise KernelError(
            f"asked for {pages.bits}-bit codes from {job.base} up; some item needs more bits: "
            "measure the range first"
        )
    return done


def decode(codec: Codec, job: Job) -> None:
    """Write the values, ``rotated`` ones from the planes that each run has left.

    In this order: ``after``, ``accumulate`` onto the destination, ``mask`` (of equal count, pages
    of any size: a clear bit gives +0), rounding. With ``blocks`` (first, last), the destination
    holds only these blocks of 256; all else is the whole tensor's.
    """
    pages = _checked(codec, job)
    if codec is Codec.ROTATED:
        is_even = pages.full_runs == pages.runs
        job = job._replace(**_decoding_tables(pages.bits, pages.kept, is_even))
    elif codec is Codec.DERIVATIVE:
        checks.check_pointer("levels", job.table)
    run(_DECODERS[codec], job, *_written(job))


def read(job: Job) -> None:
    """Read the source's blocks, after ``affine``, for the job's ``emission`` or ``sums``.

    Sums and sums of squares of channels are float64's in the format's order; canonical NaN.
    """
    run(_native.read_blocks, job, "source")


def copy(job: Job) -> None:
    """Write ``affine`` of the source, with the options of ``decode``."""
    run(_native.copy_blocks, job, "source", *_written(job))


def _checked(codec: Codec, job: Job) -> PageFields:
    assert job.pages is not None
    if codec is Codec.INTEGERS and job.item_bytes not in (1, 2, 4, 8):
        raise KernelError(f"asked for items of {job.item_bytes} bytes; 1, 2, 4 and 8 exist")
    pages = checks.check_fields(job.pages, CODEC_BITS[codec])
    if codec is not Codec.ROTATED:
        checks.check_resident(pages)
    return pages


def _written(job: Job) -> tuple[str, ...]:
    return () if job.gradient or job.row_gradient else ("destination",)


# Tables live as long as the process; asking NumPy for an address takes microseconds.
@cache
def _encoding_tables(bits: int) -> Mapping[str, Any]:
    thresholds, levels = rotated_thresholds(bits), rotated_levels(bits, bits)
    return {"thresholds": thresholds.ctypes.data, "levels": levels.ctypes.data}


@cache
def _decoding_tables(bits: int, kept: int, is_even: bool) -> Mapping[str, Any]:
    """Return the merged-cell tables of ``kept`` planes and, unless runs are even, of one less."""
    levels, factor = rotated_levels(bits, kept).ctypes.data, rotated_level_factor(bits, kept)
    found = {"levels": levels, "level_factor": factor}
    if is_even:
        return found
    shorter, factor = rotated_levels(bits, kept - 1), rotated_level_factor(bits, kept - 1)
    return found | {"shorter_levels": shorter.ctypes.data, "shorter_level_factor": factor}
