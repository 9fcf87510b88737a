"""The record of every call of a native kernel."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from daf import kernels
from daf.core.code_format import ElementType, block_count
from daf.core.errors import KernelError
from daf.kernels import normalisation as norms
from daf.kernels.cpu import checks
from daf.kernels.cpu.instruction_sets import chosen_instruction_set


class Job(NamedTuple):
    """The arguments of a native kernel, in the order of ``csrc/bindings/records.h``.

    ``affine`` applies to the values read, ``after`` to those written; addresses are ints. ``key``
    is in [0, 2**64), ``base`` an integer of 64 bits with or without a sign.

    A ``gradient`` is a pass of a normalisation's backward over normalised values v (float32); g is
    the gradient's element, 0 where the mask's bit is clear. With ``sums`` (of ``geometry``'s
    channels or a ``row_gradient``), it takes those of g and g * v, and writes g if asked. Without,
    it writes ``of_gradient`` of g, its scale alone, plus ``of_value`` of v, perhaps in place.
    """

    threads: int
    elements: int
    element_type: int = ElementType.FLOAT32
    source: int = 0
    affine: norms.Channels | None = None
    destination: int = 0
    after: norms.Channels | None = None
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
    emission: norms.NormOutput | None = None
    rows: kernels.RowMoments | None = None
    gradient: norms.MaskedGradient | None = None
    of_value: norms.Channels | None = None
    of_gradient: norms.Channels | None = None
    row_gradient: norms.RowBackward | None = None
    sums: norms.Sums | None = None  # of the source's elements and squares, or of gradients
    geometry: norms.Geometry | None = None
    workspace: Tensor | None = None  # of ``reductions.sums_workspace_bytes`` or rows'


def run(kernel: Callable[[str, Job], bool], job: Job, *needed: str) -> bool:
    """Check a job, whose ``needed`` fields are addresses, and run it; False: it cannot encode."""
    for masked in (job.emission, job.gradient):
        if masked is not None:
            job = job._replace(mask=fields_of(masked.mask))
    if job.base < 0:
        job = job._replace(base=job.base + 2**64)
    checks.check_call(job.elements, job.threads, **{name: getattr(job, name) for name in needed})
    _check_numbers(job)
    checks.check_mask(job.mask, job.elements)
    _check_emission(job.emission)
    _check_rows(job)
    _check_gradients(job)
    _check_channels(job)
    return kernel(chosen_instruction_set(), job)


def fields_of(planes: Any) -> kernels.PageFields | None:
    """Return where open or pinned planes lie, if there are any."""
    return None if planes is None else planes.fields


def _check_channels(job: Job) -> None:
    result = None if job.emission is None else job.emission.result
    for vectors in (job.affine, job.after, job.of_value, job.of_gradient, result):
        if vectors is not None:
            checks.check_channels(vectors.scale.numel(), vectors.inner)
            checks.check_places(scale=vectors.scale, shift=vectors.shift)
    if job.geometry is not None:
        checks.check_channels(job.geometry.channels, job.geometry.inner)


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


def _check_emission(emission: norms.NormOutput | None) -> None:
    if emission is None:
        return
    checks.check_places(destination=emission.out)
    if not emission.most > 0 or (emission.mask is None and emission.most != math.inf):
        raise KernelError(
            f"asked to let pass what is above 0 and below {emission.most}; give a bound above 0, "
            "and a mask"
        )


def _check_rows(job: Job) -> None:
    rows, affine = job.rows, job.affine
    if rows is None:
        return
    found = 0 if affine is None else affine.scale.numel() * affine.inner
    if found != job.elements:
        raise KernelError(
            f"asked to measure the rows of {job.elements} elements into affines of {found}; give "
            "room for the affine of each row, inner being a row's length"
        )
    if job.element_type != ElementType.FLOAT32 or not rows.epsilon >= 0:
        raise KernelError(
            f"asked to measure rows of {job.element_type!r} with epsilon {rows.epsilon}; rows are "
            "float32, epsilon 0 or more"
        )


def _check_gradients(job: Job) -> None:
    gradient, rows = job.gradient, job.row_gradient
    if gradient is not None and job.sums is None:
        if job.of_value is None or job.of_gradient is None:
            raise KernelError("asked for a gradient without its factors; give both, or sums")
        checks.check_places(destination=gradient.written)
    if gradient is not None and job.elements:
        checks.check_places(gradient=gradient.gradient)
    if rows is not None:
        checks.check_row_length(job.elements, rows.length)
        if job.elements:
            checks.check_places(gradient=rows.gradient, scale=rows.scale)
    if job.sums is not None:
        checks.check_places(**job.sums._asdict())
    if rows is not None or job.sums is not None:
        checks.check_places(workspace=job.workspace)
