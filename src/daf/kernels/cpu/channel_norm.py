"""A normalisation's kernels: forward without a code, and both passes of backward.

With a code, forward is an encoder's ``emission`` (``daf.kernels.cpu.paged``).
Backward reads planes block by block; no decoded tensor exists. Values are
float32, addresses ints; memory in pages must be pinned by the caller. Each
function raises KernelError when called outside its contract.
"""

from __future__ import annotations

import daf._native as _native
from daf.core.code_format import MINMAX_BITS, ROTATED_BITS, ElementType
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
from daf.kernels.cpu.checks import (
    affine_fields,
    block_range,
    check_call,
    check_channels,
    check_pointer,
    check_rotation,
    sums_fields,
)
from daf.kernels.cpu.flat import chosen_instruction_set
from daf.kernels.cpu.page_checks import (
    check_fields,
    check_whole,
    emission_fields,
    is_whole,
    levels_of,
    mask_fields,
    row_fields,
)


def emit(
    source: int,
    count: int,
    affine: ChannelAffine | None,
    emission: Emission,
    threads: int,
    rows: RowMoments | None = None,
) -> None:
    """Carry out the emission from ``count`` elements, ``affine`` making values of them.

    With ``rows`` the affine is measured just before.
    """
    check_call(count, threads, source=source)
    if count:
        _native.norm.emit(
            chosen_instruction_set(),
            source,
            count,
            threads,
            affine_fields(affine),
            *emission_fields(emission, count),
            row_fields(rows, affine, ElementType.FLOAT32, count),
        )


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
    """Write again what ``emit`` wrote: ``result`` of the values, which are ``affine`` of ``count``
    elements.

    ``accumulate`` adds what lies at the destination, in the place of an addend; then ``mask``, as
    ``emit`` wrote it, zeroes the elements whose bit is clear. With ``blocks`` (first, last) the
    destination holds the elements of these blocks of 256 alone.
    """
    check_call(count, threads, source=source, destination=destination)
    _native.norm.derive(
        chosen_instruction_set(),
        source,
        count,
        threads,
        affine_fields(affine),
        destination,
        affine_fields(result),
        mask_fields(mask, count),
        accumulate,
        *block_range(count, blocks),
    )


def backward_kept(
    source: int, count: int, affine: ChannelAffine | None, gradient: NormGradient, threads: int
) -> None:
    """One pass of backward; the values are ``affine`` of ``count`` elements."""
    check_call(count, threads, source=source)
    _native.norm.backward_kept(
        chosen_instruction_set(),
        source,
        count,
        threads,
        affine_fields(affine),
        *_gradient_fields(gradient, count),
    )


def backward_rotated(
    fields: PageFields, rounds: int, key: int, gradient: NormGradient, threads: int
) -> None:
    """One pass of backward; the values are those of a ``rotated`` code, whatever it has left."""
    check_fields(fields, threads, ROTATED_BITS)
    check_rotation(rounds, key)
    _native.norm.backward_rotated(
        chosen_instruction_set(),
        fields,
        rounds,
        key,
        *levels_of(fields, fields.kept),
        *((0, 0.0) if is_whole(fields) else levels_of(fields, fields.kept - 1)),
        threads,
        *_gradient_fields(gradient, fields.elements),
    )


def backward_minmax(fields: PageFields, gradient: NormGradient, threads: int) -> None:
    """One pass of backward; the values are those of a ``minmax`` code."""
    check_whole(fields, threads, MINMAX_BITS)
    _native.norm.backward_minmax(
        chosen_instruction_set(),
        fields,
        threads,
        *_gradient_fields(gradient, fields.elements),
    )


def statistics_of_sums(
    sums: ChannelSums,
    count: int,
    epsilon: float,
    mean: int,
    inverse_deviation: int,
    running: RunningMoments | None = None,
) -> None:
    """Write mean and inverse deviation, float32, of channels of ``count`` elements each.

    ``running`` statistics follow in place, as PyTorch's do, by the unbiased variance.
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
    _native.norm.statistics_of_sums(sums.channels, count, epsilon, where, running or ())


def factors_of_sums(channels: int, count: int, factors: GradientFactors) -> None:
    """Write what backward's second pass multiplies by, from its first pass's sums.

    Channels have ``count`` elements each.
    """
    check_channels(channels, 1)
    if count < 1:
        raise KernelError(f"asked for factors of {count} elements; the least is 1")
    for name, address in zip(factors._fields, factors, strict=True):
        if address or name not in _OPTIONAL_FACTORS:
            check_pointer(name, address)
    _native.norm.factors_of_sums(channels, count, factors)


_OPTIONAL_FACTORS = ("gamma_pointer", "of_gamma_pointer", "of_beta_pointer")
_Affine = ChannelAffine | tuple[()]
_Gradient = tuple[int, int, _Affine, _Affine, ChannelSums | tuple[()]]


def _gradient_fields(
    gradient: NormGradient, count: int
) -> tuple[_Gradient, PageFields | tuple[()]]:
    if count:
        check_pointer("gradient", gradient.gradient_pointer)
    if gradient.sums is None:
        if gradient.of_value is None or gradient.of_gradient is None:
            raise KernelError("asked for a gradient without its factors; give both, or sums")
        check_pointer("destination", gradient.destination_pointer)
    fields = (
        gradient.gradient_pointer,
        gradient.destination_pointer,
        affine_fields(gradient.of_value),
        affine_fields(gradient.of_gradient),
        sums_fields(gradient.sums),
    )
    return fields, mask_fields(gradient.mask, count)
