"""The codecs on a GPU, through Triton: tensors in, tensors out, the oracle's bytes.

Elements are contiguous tensors of float32, bfloat16 or float16 in memory order;
planes are :class:`daf.kernels.triton.planes.DevicePlanes`. Everything runs on the
current stream of the tensors' device, and nothing waits for it: what a kernel
finds out comes back as a tensor. Each function raises KernelError when called
outside its contract. ``key`` is a 64-bit seed. Under Triton's interpreter
(``TRITON_INTERPRET=1`` before this module is imported) tensors are on the CPU.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from daf.core.code_format import MINMAX_BITS, ROTATED_BITS, Predicate
from daf.core.errors import KernelError
from daf.kernels.cpu.checks import INTEGER_BITS, check_key, check_member, check_rotation
from daf.kernels.normalisation import Channels
from daf.kernels.triton import bit_codecs as triton_bits
from daf.kernels.triton import minmax as triton_minmax
from daf.kernels.triton import rotated as triton_rotated
from daf.kernels.triton.launch import (
    affine_arguments,
    base_halves,
    elements_in,
    integer_items,
    key_halves,
    launch,
    levels_on,
    mask_arguments,
    patterns,
    plane_arguments,
    thresholds_on,
)
from daf.kernels.triton.planes import DevicePlanes

DERIVATIVE_BITS = range(1, 9)

# --- rotated and minmax ---------------------------------------------------------------------


def encode_rotated(
    source: Tensor, planes: DevicePlanes, rounds: int, key: int, affine: Channels | None = None
) -> None:
    """Write the headers and, of every run, the planes that it has."""
    check_member("bits", planes.bits, ROTATED_BITS)
    _check_headers(planes)
    check_rotation(rounds, key)
    elements, kind = patterns(source, planes.elements)
    launch(
        triton_rotated.encode_rotated,
        planes.elements,
        source.device,
        source=elements,
        headers=planes.headers,
        thresholds=thresholds_on(source.device, planes.bits),
        levels=levels_on(source.device, planes.bits, planes.bits)[0],
        full_runs=planes.full_runs,
        TYPE=kind,
        BITS=planes.bits,
        KEPT=planes.kept,
        ROUNDS=rounds,
        **key_halves(key),
        **affine_arguments(affine),
        **plane_arguments(planes),
    )


def decode_rotated(
    planes: DevicePlanes,
    rounds: int,
    key: int,
    destination: Tensor,
    affine: Channels | None = None,
    mask: DevicePlanes | None = None,
    accumulate: bool = False,
    blocks: tuple[int, int] | None = None,
) -> None:
    """Decode from the planes that are there; then affine, accumulate, mask, rounding.

    With ``blocks`` (first, last), ``destination`` holds the elements of these blocks alone.
    """
    check_member("bits", planes.bits, ROTATED_BITS)
    check_member("kept planes", planes.kept, range(1, planes.bits + 1))
    _check_headers(planes)
    check_rotation(rounds, key)
    if planes.kept == 1 and planes.full_runs < planes.runs:
        raise KernelError("asked to decode runs without a plane; each needs its first at least")
    count = elements_in(blocks, planes.elements)
    elements, kind = patterns(destination, count)
    levels, factors = levels_on(destination.device, planes.bits, planes.kept)
    launch(
        triton_rotated.decode_rotated,
        count,
        destination.device,
        first_block=blocks[0] if blocks else 0,
        destination=elements,
        headers=planes.headers,
        levels=levels,
        factors=factors,
        full_runs=planes.full_runs,
        TYPE=kind,
        BITS=planes.bits,
        KEPT=planes.kept,
        ROUNDS=rounds,
        ACCUMULATE=accumulate,
        **key_halves(key),
        **affine_arguments(affine),
        **mask_arguments(mask, planes.elements),
        **plane_arguments(planes),
    )


def encode_minmax(
    source: Tensor, planes: DevicePlanes, key: int, affine: Channels | None = None
) -> None:
    """Write every plane and the headers, rounding stochastically."""
    _check_whole(planes, MINMAX_BITS)
    _check_headers(planes)
    check_key(key)
    elements, kind = patterns(source, planes.elements)
    launch(
        triton_minmax.encode_minmax,
        planes.elements,
        source.device,
        source=elements,
        headers=planes.headers,
        TYPE=kind,
        BITS=planes.bits,
        **key_halves(key),
        **affine_arguments(affine),
        **plane_arguments(planes),
    )


def decode_minmax(
    planes: DevicePlanes,
    destination: Tensor,
    affine: Channels | None = None,
    mask: DevicePlanes | None = None,
    accumulate: bool = False,
    blocks: tuple[int, int] | None = None,
) -> None:
    """Decode all planes; the options are those of ``decode_rotated``."""
    _check_whole(planes, MINMAX_BITS)
    _check_headers(planes)
    count = elements_in(blocks, planes.elements)
    elements, kind = patterns(destination, count)
    launch(
        triton_minmax.decode_minmax,
        count,
        destination.device,
        first_block=blocks[0] if blocks else 0,
        destination=elements,
        headers=planes.headers,
        TYPE=kind,
        BITS=planes.bits,
        ACCUMULATE=accumulate,
        **affine_arguments(affine),
        **mask_arguments(mask, planes.elements),
        **plane_arguments(planes),
    )


def encode_steps(
    source: Tensor, planes: DevicePlanes, key: int, affine: Channels | None = None
) -> None:
    """Write every plane of what ``affine`` makes numbers of steps, rounding stochastically."""
    _check_whole(planes, MINMAX_BITS)
    check_key(key)
    elements, kind = patterns(source, planes.elements)
    launch(
        triton_minmax.encode_steps,
        planes.elements,
        source.device,
        source=elements,
        TYPE=kind,
        BITS=planes.bits,
        **key_halves(key),
        **affine_arguments(affine),
        **plane_arguments(planes),
    )


def decode_steps(planes: DevicePlanes, destination: Tensor, affine: Channels | None = None) -> None:
    """Write every number of steps, after ``affine``."""
    _check_whole(planes, MINMAX_BITS)
    elements, kind = patterns(destination, planes.elements)
    launch(
        triton_minmax.decode_steps,
        planes.elements,
        destination.device,
        destination=elements,
        TYPE=kind,
        BITS=planes.bits,
        **affine_arguments(affine),
        **plane_arguments(planes),
    )


# --- mask, derivative, integers -------------------------------------------------------------


def encode_mask(
    source: Tensor, planes: DevicePlanes, predicate: Predicate, low: float, high: float
) -> None:
    """Write one plane of ``predicate``; bounds are rounded to float32."""
    _check_whole(planes, (1,))
    check_member("predicate", predicate, tuple(Predicate))
    elements, kind = patterns(source, planes.elements)
    launch(
        triton_bits.encode_mask,
        planes.elements,
        source.device,
        source=elements,
        low=float(low),
        high=float(high),
        TYPE=kind,
        ABOVE=predicate is Predicate.ABOVE,
        **plane_arguments(planes),
    )


def decode_mask(
    planes: DevicePlanes, off_value: float, on_value: float, destination: Tensor
) -> None:
    """Write ``on_value`` where the bit is set and ``off_value`` elsewhere."""
    _check_whole(planes, (1,))
    elements, kind = patterns(destination, planes.elements)
    launch(
        triton_bits.decode_mask,
        planes.elements,
        destination.device,
        destination=elements,
        off_bits=_float32_bits(off_value),
        on_bits=_float32_bits(on_value),
        TYPE=kind,
        **plane_arguments(planes),
    )


def _float32_bits(value: float) -> int:
    """The pattern of a number in float32, as a signed integer."""
    return int(np.float32(value).view(np.int32))


def apply_mask(planes: DevicePlanes, gradient: Tensor, destination: Tensor) -> None:
    """The gradient where the bit is set, +0 elsewhere; both may be one tensor."""
    _check_whole(planes, (1,))
    incoming, kind = patterns(gradient, planes.elements)
    outgoing, other_kind = patterns(destination, planes.elements)
    if kind != other_kind:
        raise KernelError(f"asked for {destination.dtype} of {gradient.dtype}; give one type")
    launch(
        triton_bits.apply_mask,
        planes.elements,
        gradient.device,
        gradient=incoming,
        destination=outgoing,
        TYPE=kind,
        **plane_arguments(planes),
    )


def encode_derivative(source: Tensor, planes: DevicePlanes, borders: Tensor) -> Tensor:
    """Write, for every element, how many of the ``2**bits - 1`` ascending borders lie below it.

    Returns:
        () int32 on the device: not 0 if an element was not finite, the planes then being worthless.
    """
    _check_whole(planes, DERIVATIVE_BITS)
    _check_table("borders", borders, 2**planes.bits - 1)
    elements, kind = patterns(source, planes.elements)
    broken = torch.zeros((), dtype=torch.int32, device=source.device)
    launch(
        triton_bits.encode_derivative,
        planes.elements,
        source.device,
        source=elements,
        borders=borders,
        broken=broken,
        TYPE=kind,
        BITS=planes.bits,
        **plane_arguments(planes),
    )
    return broken


def decode_derivative(planes: DevicePlanes, levels: Tensor, destination: Tensor) -> None:
    """Write the level of every code; ``levels`` holds ``2**bits`` float32 numbers."""
    _check_whole(planes, DERIVATIVE_BITS)
    _check_table("levels", levels, 2**planes.bits)
    elements, kind = patterns(destination, planes.elements)
    launch(
        triton_bits.decode_derivative,
        planes.elements,
        destination.device,
        destination=elements,
        levels=levels,
        TYPE=kind,
        BITS=planes.bits,
        **plane_arguments(planes),
    )


def encode_integers(source: Tensor, planes: DevicePlanes, base: int) -> Tensor:
    """Write ``value - base`` losslessly; items are signed integers or booleans.

    Returns:
        () int32 on the device: not 0 if a difference needed more bits, the planes then being
        worthless.
    """
    _check_whole(planes, INTEGER_BITS)
    too_wide = torch.zeros((), dtype=torch.int32, device=source.device)
    launch(
        triton_bits.encode_integers,
        planes.elements,
        source.device,
        source=integer_items(source, planes.elements),
        too_wide=too_wide,
        BITS=planes.bits,
        **base_halves(base),
        **plane_arguments(planes),
    )
    return too_wide


def decode_integers(planes: DevicePlanes, base: int, destination: Tensor) -> None:
    """Write ``code + base`` into signed items or booleans."""
    _check_whole(planes, INTEGER_BITS)
    launch(
        triton_bits.decode_integers,
        planes.elements,
        destination.device,
        destination=integer_items(destination, planes.elements),
        BITS=planes.bits,
        **base_halves(base),
        **plane_arguments(planes),
    )


# --- checks ---------------------------------------------------------------------------------


def _check_whole(planes: DevicePlanes, widths: range | tuple[int, ...]) -> None:
    check_member("bits", planes.bits, widths)
    if not planes.is_whole:
        raise KernelError(
            f"asked for all {planes.bits} planes of a tensor that has given some up; "
            "only rotated codes can be read from fewer"
        )


def _check_headers(planes: DevicePlanes) -> None:
    if planes.headers is None:
        raise KernelError("asked for a value code without headers; allocate them with the planes")


def _check_table(name: str, table: Tensor, entries: int) -> None:
    if table.dtype != torch.float32 or table.numel() != entries or not table.is_contiguous():
        raise KernelError(
            f"asked for {entries} {name}, found {tuple(table.shape)} of {table.dtype}; "
            "give a contiguous float32 tensor"
        )
