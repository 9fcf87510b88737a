"""A channel normalisation's kernels: forward without a code, and both passes of backward.

With a code, forward is an encoder's ``emission`` (``daf.kernels.cpu.paged``). Backward reads planes
block by block; no decoded tensor exists. Values are float32, addresses ints; the caller pins memory
in pages. Each function raises KernelError when called outside its contract.
"""

from __future__ import annotations

import daf._native as _native
from daf.core.code_format import MINMAX_BITS
from daf.core.errors import KernelError
from daf.kernels import (
    ChannelAffine,
    ChannelSums,
    Emission,
    GradientFactors,
    NormGradient,
    PageFields,
    RowMoments,
    RunningMoments,
)
from daf.kernels.cpu.checks import check_channels, check_pointer, check_whole
from daf.kernels.cpu.job import Job, run
from daf.kernels.cpu.paged import rotated_code


def emit(
    source: int,
    count: int,
    affine: ChannelAffine | None,
    emission: Emission,
    threads: int,
    rows: RowMoments | None = None,
) -> None:
    """Carry out the emission for ``affine`` (with ``rows`` measured first) of the elements."""
    job = Job(threads, count, source=source, affine=affine, emission=emission, rows=rows)
    run(_native.read_blocks, job, "source")


def derive(
    source: int,
    count: int,
    affine: ChannelAffine | None,
    result: ChannelAffine | None,
    destination: int,
    threads: int,
    mask: PageFields | None = None,
    accumulate: bool = False,
    blocks: tuple[int, int] | None = None,
) -> None:
    """Write again what ``emit`` wrote: ``result`` of the values ``affine`` of ``count`` elements.

    ``accumulate`` adds what the destination holds, as the addend; then ``mask``, as ``emit`` wrote
    it, zeroes. With ``blocks`` (first, last) the destination holds only these blocks of 256.
    """
    job = Job(
        *(threads, count),
        source=source,
        affine=affine,
        destination=destination,
        after=result,
        mask=mask,
        accumulate=accumulate,
        blocks=blocks,
    )
    run(_native.copy_blocks, job, "source", "destination")


def backward_kept(
    source: int, count: int, affine: ChannelAffine | None, gradient: NormGradient, threads: int
) -> None:
    """Run one pass of backward over the values ``affine`` of ``count`` elements."""
    job = Job(threads, count, source=source, affine=affine, gradient=gradient)
    run(_native.copy_blocks, job, "source")


def backward_rotated(
    fields: PageFields, rounds: int, key: int, gradient: NormGradient, threads: int
) -> None:
    """Run one pass of backward over a ``rotated`` code, from the planes it has left."""
    code = rotated_code(fields, rounds, key)
    run(_native.decode_rotated, Job(threads, fields.elements, gradient=gradient, **code))


def backward_minmax(fields: PageFields, gradient: NormGradient, threads: int) -> None:
    """Run one pass of backward over a ``minmax`` code."""
    pages = check_whole(fields, MINMAX_BITS)
    run(_native.decode_minmax, Job(threads, fields.elements, gradient=gradient, pages=pages))


def statistics_of_sums(
    sums: ChannelSums,
    count: int,
    epsilon: float,
    mean: int,
    inverse_deviation: int,
    running: RunningMoments | None = None,
) -> None:
    """Write mean and inverse deviation, float32; ``running`` follow by the unbiased variance.

    Raises:
        KernelError: outside the contract, or fewer elements than 1 (2 with ``running``).
    """
    fewest = 1 if running is None else 2
    if count < fewest:
        raise KernelError(f"asked for statistics of {count} elements; the least is {fewest}")
    check_channels(sums.channels, sums.inner)
    where = (sums.sums_pointer, sums.squares_pointer, mean, inverse_deviation)
    for name, address in zip(("sums", "squares", "mean", "deviation"), where, strict=True):
        check_pointer(name, address)
    if running is not None:
        check_pointer("running mean", running.mean_pointer)
        check_pointer("running variance", running.variance_pointer)
    _native.statistics_of_sums(sums.channels, count, epsilon, where, running)


def factors_of_sums(channels: int, count: int, factors: GradientFactors) -> None:
    """Write backward's second factors from its first sums, of channels of ``count`` elements.

    Raises:
        KernelError: outside the contract, or no elements.
    """
    check_channels(channels, 1)
    if count < 1:
        raise KernelError(f"asked for factors of {count} elements; the least is 1")
    for name, address in zip(factors._fields, factors, strict=True):
        if address or name not in _OPTIONAL_FACTORS:
            check_pointer(name, address)
    _native.factors_of_sums(channels, count, factors)


_OPTIONAL_FACTORS = ("gamma_pointer", "of_gamma_pointer", "of_beta_pointer")
