"""The codecs on a GPU, through Triton: tensors in, tensors out, the oracle's bytes.

Each function raises KernelError when called outside its contract.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from daf.core.code_format import Predicate
from daf.core.code_tables import DERIVATIVE_PIECES
from daf.core.errors import KernelError
from daf.kernels import CODEC_BITS, Codec
from daf.kernels.cpu.checks import check_key, check_member, check_resident, checked_table
from daf.kernels.normalisation import Channels, CodedValues, Decoding, ElementCode
from daf.kernels.triton import bit_codecs, minmax, rotated
from daf.kernels.triton.launch import (
    Tile,
    affine_of,
    elements_in,
    halves,
    integer_items,
    launch,
    levels_on,
    magnitudes_on,
    mask_words,
    patterns,
)
from daf.kernels.triton.planes import NO_PLANES, DevicePlanes

_ELEMENTS_FOR_TURNS = 2**22  # a thousand programs
_DECODERS = {
    Codec.ROTATED: rotated.decode_rotated,
    Codec.MINMAX: minmax.decode_minmax,
    Codec.STEPS: minmax.decode_minmax,
    Codec.MASK: bit_codecs.decode_mask,
    Codec.DERIVATIVE: bit_codecs.decode_derivative,
    Codec.INTEGERS: bit_codecs.decode_integers,
}
_WITH_HEADERS = (Codec.ROTATED, Codec.MINMAX)


def encode_values(code: CodedValues, source: Tensor, affine: Channels | None) -> None:
    """Write the headers, and the planes that each run has, of ``affine`` of the source."""
    planes = _checked(code.codec, code.planes)
    if code.codec is Codec.MINMAX:
        _encode(minmax.encode_minmax, source, planes, code.key, affine, HAS_GRID=True)
        return
    options = {"table": magnitudes_on(source.device, planes.bits), **_runs(code)}
    passes, options["tile"] = [rotated.ALL_BLOCKS], Tile(blocks=2)
    if planes.elements >= _ELEMENTS_FOR_TURNS:
        passes = [rotated.USUAL_BLOCKS, rotated.UNUSUAL_BLOCKS]
        options["tile"] = Tile(blocks=2, turns=8, registers=80 if planes.bits < 3 else 128)
    for which in passes:
        options["WHICH"] = which.value
        _encode(rotated.encode_rotated, source, planes, code.key, affine, **options)


def decode_values(code: CodedValues, decoding: Decoding) -> None:
    """Decode ``blocks`` or all from the resident planes; then affine, accumulate, mask, round."""
    planes = _checked(code.codec, code.planes)
    out, channels, mask, accumulate, blocks = decoding
    options: dict[str, Any] = {"BITS": planes.bits, "ACCUMULATE": accumulate}
    options |= {"affine": affine_of(channels), "mask": mask_words(mask, planes.elements)}
    if code.codec is Codec.ROTATED:
        check_member("kept planes", planes.kept, range(1, planes.bits + 1))
        if planes.kept == 1 and planes.full_runs < planes.runs:
            raise KernelError("asked to decode runs without a plane; each needs its first at least")
        levels, factors = levels_on(out.device, planes.bits, planes.kept)
        check_key(code.key)
        options |= {"levels": levels, "factors": factors, **_runs(code), **halves("key", code.key)}
    else:
        options["HAS_GRID"] = True
    count, first = elements_in(blocks, planes.elements), blocks[0] if blocks else 0
    _run(_DECODERS[code.codec], planes, {"destination": out}, count, first_block=first, **options)


def _runs(code: CodedValues) -> dict[str, Any]:
    return {"full_runs": code.planes.full_runs, "KEPT": code.planes.kept}


def encode_elements(source: Tensor, planes: DevicePlanes, code: ElementCode) -> bool | Tensor:
    """Write every plane of each element's code; bounds of masks are rounded to float32.

    Returns () int32 on the device, nonzero if the planes are worthless: an element is not finite
    (derivative codes), or an integer (signed, or a boolean) is too far from the base. Else False.
    """
    _checked(code.codec, planes)
    if code.codec is Codec.STEPS:
        _encode(minmax.encode_minmax, source, planes, code.key, code.channels, HAS_GRID=False)
        return False
    if code.codec is Codec.MASK:
        check_member("predicate", code.predicate, tuple(Predicate))
        above = code.predicate is Predicate.ABOVE
        bounds: dict[str, Any] = {"low": float(code.low), "high": float(code.high), "ABOVE": above}
        _run(bit_codecs.encode_mask, planes, {"source": source}, **bounds)
        return False
    worthless = torch.zeros((), dtype=torch.int32, device=source.device)
    options: dict[str, Any] = {"worthless": worthless, "BITS": planes.bits}
    if code.codec is Codec.DERIVATIVE:
        options["lines"] = checked_table("lines' numbers", code.table, 3 * DERIVATIVE_PIECES - 1)
        check_key(code.key)
        options |= halves("key", code.key)
        _run(bit_codecs.encode_derivative, planes, {"source": source}, **options)
    else:
        options |= halves("base", code.base)
        _run(bit_codecs.encode_integers, planes, {"source": source}, **options)
    return worthless


def decode_elements(planes: DevicePlanes, destination: Tensor, code: ElementCode) -> None:
    """Write what each element's code stands for."""
    _checked(code.codec, planes)
    options: dict[str, Any] = {"BITS": planes.bits}
    if code.codec is Codec.STEPS:
        options |= {"affine": affine_of(code.channels), "mask": NO_PLANES}
        options |= {"ACCUMULATE": False, "HAS_GRID": False}
    elif code.codec is Codec.MASK:
        options = {"off_bits": _float32_bits(code.low), "on_bits": _float32_bits(code.high)}
    elif code.codec is Codec.DERIVATIVE:
        options["levels"] = checked_table("levels", code.table, 2**planes.bits)
    else:
        options |= halves("base", code.base)
    _run(_DECODERS[code.codec], planes, {"destination": destination}, **options)


def _float32_bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))


def apply_mask(planes: DevicePlanes, gradient: Tensor, destination: Tensor) -> None:
    """Write the gradient where the bit is set, +0 elsewhere; both may be one tensor."""
    _checked(Codec.MASK, planes)
    if gradient.dtype != destination.dtype:
        raise KernelError(f"asked for {destination.dtype} of {gradient.dtype}; give one type")
    places: dict[str, Any] = {"gradient": gradient, "destination": destination}
    _run(bit_codecs.apply_mask, planes, places)


def _encode(
    kernel: Any, x: Tensor, planes: DevicePlanes, key: int, affine: Channels | None, **options: Any
) -> None:
    check_key(key)
    options |= {"affine": affine_of(affine), "BITS": planes.bits, **halves("key", key)}
    _run(kernel, planes, {"source": x}, **options)


def _run(
    kernel: Any,
    planes: DevicePlanes,
    tensors: dict[str, Tensor],
    count: int | None = None,
    **options: Any,
) -> None:
    """Start a kernel over the elements of some tensors of one type, ``count`` each."""
    count = planes.elements if count is None else count
    for name, tensor in tensors.items():
        if "TYPE" in kernel.arg_names:
            options[name], options["TYPE"] = patterns(tensor, count)
        else:
            options[name] = integer_items(tensor, count)
    launch(kernel, count, planes=planes.words, **options)


def _checked(codec: Codec, planes: DevicePlanes) -> DevicePlanes:
    check_member("bits", planes.bits, CODEC_BITS[codec])
    if codec is not Codec.ROTATED:
        check_resident(planes)
    if codec in _WITH_HEADERS and planes.headers is None:
        raise KernelError("asked for a value code without headers; allocate them with the planes")
    return planes
