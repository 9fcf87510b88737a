"""The record of every call of a native kernel."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from daf import kernels
from daf.core.code_format import ElementType, block_count
from daf.core.errors import KernelError
from daf.kernels.cpu import checks
from daf.kernels.cpu.instruction_sets import chosen_instruction_set


class Job(NamedTuple):
    """The arguments of a native kernel, in the order of ``csrc/bindings/records.h``.

    ``affine`` applies to the values read, ``after`` to those written; addresses are ints. ``key``
    is in [0, 2**64), ``base`` an integer of 64 bits with or without a sign.
    """

    threads: int
    elements: int
    element_type: int = ElementType.FLOAT32
    source: int = 0
    affine: kernels.ChannelAffine | None = None
    destination: int = 0
    after: kernels.ChannelAffine | None = None
    accumulate: bool = False
    blocks: tuple[int, int] | None = None
    pages: kernels.PageFields | None = None
    mask: kernels.PageFields | None = None
    key: int = 0
    thresholds: int = 0
    levels: int = 0
    level_factor: float = 0.0
    shorter_levels: int = 0
    shorter_level_factor: float = 0.0
    predicate: int = 0
    low: float = 0.0
    high: float = 0.0
    table: int = 0
    item_bytes: int = 0
    base: int = 0
    emission: kernels.Emission | None = None
    rows: kernels.RowMoments | None = None
    gradient: kernels.NormGradient | None = None
    sums: kernels.ChannelSums | None = None
    row_gradient: kernels.RowGradient | None = None


def run(kernel: Callable[[str, Job], bool], job: Job, *needed: str) -> bool:
    """Check a job, whose ``needed`` fields are addresses, and run it; False: it cannot encode."""
    if job.emission is not None:
        job = job._replace(mask=job.emission.mask)
    if job.gradient is not None:
        job = job._replace(mask=job.gradient.mask, sums=job.gradient.sums)
    if job.base < 0:
        job = job._replace(base=job.base + 2**64)
    checks.check_call(job.elements, job.threads, **{name: getattr(job, name) for name in needed})
    _check_numbers(job)
    checks.check_vectors(job.affine, job.after, job.sums)
    checks.check_mask(job.mask, job.elements)
    _check_emission(job.emission)
    _check_rows(job)
    _check_gradient(job)
    _check_row_gradient(job)
    return kernel(chosen_instruction_set(), job)


def _check_numbers(job: Job) -> None:
    if job.element_type not in tuple(ElementType):
        raise KernelError(
            f"asked for element type {job.element_type!r}; float32, bfloat16 and float16 exist"
        )
    checks.check_key(job.key)
    if job.blocks is not None:
        first, last = job.blocks
        total = block_count(job.elements)
        if not 0 <= first <= last <= total:
            raise KernelError(f"asked for blocks {first} to {last}; the tensor has {total}")


def _check_emission(emission: kernels.Emission | None) -> None:
    if emission is None:
        return
    checks.check_pointer("destination", emission.destination_pointer)
    checks.check_vectors(emission.affine)
    if not emission.most > 0 or (emission.mask is None and emission.most != math.inf):
        raise KernelError(
            f"asked to let pass what is above 0 and below {emission.most}; give a bound above 0, "
            "and a mask"
        )


def _check_rows(job: Job) -> None:
    rows, affine = job.rows, job.affine
    if rows is None:
        return
    if affine is None or affine.channels * affine.inner != job.elements:
        raise KernelError(
            f"asked to measure the rows of {job.elements} elements into {affine}; give room for "
            "the affine of each row, inner being a row's length"
        )
    if job.element_type != ElementType.FLOAT32 or not rows.epsilon >= 0:
        raise KernelError(
            f"asked to measure rows of {job.element_type!r} with epsilon {rows.epsilon}; rows are "
            "float32, epsilon 0 or more"
        )


def _check_gradient(job: Job) -> None:
    gradient = job.gradient
    if gradient is None:
        return
    if job.elements:
        checks.check_pointer("gradient", gradient.gradient_pointer)
    if gradient.sums is None:
        if gradient.of_value is None or gradient.of_gradient is None:
            raise KernelError("asked for a gradient without its factors; give both, or sums")
        checks.check_pointer("destination", gradient.destination_pointer)
    checks.check_vectors(gradient.of_value, gradient.of_gradient)


def _check_row_gradient(job: Job) -> None:
    gradient = job.row_gradient
    if gradient is None:
        return
    checks.check_row_length(job.elements, gradient.length)
    places = gradient._asdict()
    wanted = ("sums", "products") if gradient.sums_pointer or gradient.products_pointer else ()
    for name in (*wanted, "workspace", *(("gradient", "scale") if job.elements else ())):
        checks.check_pointer(name, places[f"{name}_pointer"])
