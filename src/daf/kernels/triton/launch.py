"""The start of a Triton kernel: element patterns, key halves, tables on the device, options."""

from contextlib import nullcontext
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from daf.core.code_format import BLOCK_ELEMENTS, block_count
from daf.core.code_tables import rotated_level_factor, rotated_levels, rotated_magnitudes
from daf.core.errors import KernelError
from daf.kernels.backend import element_type, is_codable
from daf.kernels.cpu.checks import check_mask
from daf.kernels.normalisation import Channels
from daf.kernels.triton.planes import NO_PLANES, DevicePlanes, PlaneWords

try:
    from triton.runtime.interpreter import InterpretedFunction
except ImportError as problem:  # an installation without the extra
    raise KernelError(
        "asked for the GPU kernels, found no triton; install DAF with its extra: daf-train[gpu]"
    ) from problem

_WARPS = 4  # of a program that is not of blocks
_INTERPRETER_BLOCKS = 64  # at most: the interpreter spends as much on calls as on elements


class Tile(NamedTuple):
    """What one program of a kernel of blocks does; it is one warp.

    What is summed and packed in a warp never leaves it, so no lane waits. Fewer blocks at once
    leave registers for more warps; in several turns they share what a program sets up.
    """

    blocks: int = 4  # of 256 elements, at once
    turns: int = 1
    registers: int | None = None  # at most, for a lane; None: as the compiler likes


_ONE_TURN = Tile()


class Affine(NamedTuple):
    """An affine as kernels take it."""

    scale: Tensor
    shift: Tensor
    channels: int
    inner: int


def affine_of(channels: Channels | None) -> Affine | None:
    """Return an affine as kernels take it; KernelError: not float32, contiguous, of one length."""
    if channels is None:
        return None
    scale, shift, inner = channels
    if scale.dtype != torch.float32 or shift.dtype != torch.float32:
        raise KernelError(f"asked for an affine of {scale.dtype}; give float32 vectors")
    if scale.numel() != shift.numel() or scale.numel() < 1 or inner < 1:
        raise KernelError(
            f"asked for {scale.numel()} scales, {shift.numel()} shifts, {inner} elements "
            "each; both counts must agree, and all be 1 or more"
        )
    if not (scale.is_contiguous() and shift.is_contiguous()):
        raise KernelError("asked for an affine of vectors with gaps; give contiguous ones")
    return Affine(scale, shift, scale.numel(), inner)


def elements_in(blocks: tuple[int, int] | None, count: int) -> int:
    """Return the elements of blocks [first, last) of ``count``, None: all; KernelError: outside."""
    if blocks is None:
        return count
    first, last = blocks
    if not 0 <= first < last <= block_count(count):
        raise KernelError(
            f"asked for blocks {first} to {last} of {block_count(count)}; give a range within"
        )
    return min(last * BLOCK_ELEMENTS, count) - first * BLOCK_ELEMENTS


def mask_words(mask: DevicePlanes | None, count: int) -> PlaneWords:
    """Return a mask of ``count`` elements as kernels take it; ``NO_PLANES`` for None."""
    check_mask(mask, count)
    return NO_PLANES if mask is None else mask.words


def halves(name: str, value: int) -> dict[str, int]:
    """Return 64 bits as two int32 patterns, arguments ``name_low`` and ``name_high``."""
    return {f"{name}_low": _signed(value), f"{name}_high": _signed(value >> 32)}


def double_bits(value: float) -> int:
    """Return a float64's bits: Triton would round a plain number to float32."""
    return int(np.float64(value).view(np.int64))


def _signed(value: int) -> int:
    low = value & 0xFFFFFFFF
    return low - 2**32 if low >= 2**31 else low


def patterns(tensor: Tensor, count: int) -> tuple[Tensor, int]:
    """Return the bit patterns of ``count`` floats and their type's number; else KernelError."""
    if not is_codable(tensor.dtype):
        raise KernelError(f"asked for elements of {tensor.dtype}; float32, bfloat16, float16 exist")
    _check_count(tensor, count)
    pattern = torch.int32 if tensor.itemsize == 4 else torch.int16
    return tensor.view(pattern), int(element_type(tensor.dtype))


def integer_items(tensor: Tensor, count: int) -> Tensor:
    """Return ``count`` signed items, booleans as bytes; else KernelError."""
    if tensor.is_floating_point() or tensor.is_complex():
        raise KernelError(f"asked to pack {tensor.dtype}; integers and booleans can be packed")
    _check_count(tensor, count)
    return tensor.view(torch.int8) if tensor.dtype == torch.bool else tensor


def _check_count(tensor: Tensor, count: int) -> None:
    if tensor.numel() != count or not tensor.is_contiguous():
        raise KernelError(
            f"asked for {count} elements, found {tuple(tensor.shape)} of stride "
            f"{tensor.stride()}; give them in memory order: tensor.as_strided((count,), (1,))"
        )


def launch(
    kernel: Any, count: int, first_block: int = 0, tile: Tile = _ONE_TURN, **arguments: Any
) -> None:
    """Run a kernel over the blocks of ``count`` elements, from ``first_block`` if it takes one."""
    if count == 0:
        return
    blocks, turns = tile.blocks, tile.turns
    if "TURNS" in kernel.arg_names:
        arguments["TURNS"] = turns
    if isinstance(kernel, InterpretedFunction):
        blocks = min(_INTERPRETER_BLOCKS, 1 << (block_count(count) - 1).bit_length())
    elif tile.registers is not None and torch.version.hip is None:
        arguments["maxnreg"] = tile.registers
    grid = (-(-block_count(count) // (blocks * turns)),)
    if "first_block" in kernel.arg_names:
        arguments["first_block"] = first_block
    count += first_block * BLOCK_ELEMENTS
    on_device(kernel, grid, 1, **arguments, count=count, BLOCKS=blocks)


def on_device(kernel: Any, grid: tuple[int, ...], warps: int = _WARPS, **arguments: Any) -> None:
    """Run programs on the tensors' GPU or interpreted, without FMA; KernelError: neither works."""
    device = next(each.device for each in arguments.values() if isinstance(each, Tensor))
    if device.type == "cpu" and not isinstance(kernel, InterpretedFunction):
        raise KernelError("asked for a GPU kernel on tensors of the CPU; use daf.kernels.cpu")
    with nullcontext() if device.type == "cpu" else torch.cuda.device(device):
        kernel[grid](**arguments, enable_fp_fusion=False, num_warps=warps)


@cache
def magnitudes_on(device: torch.device, bits: int) -> Tensor:
    """Return ``code_tables.rotated_magnitudes`` on a device."""
    return torch.from_numpy(rotated_magnitudes(bits).copy()).to(device)


@cache
def levels_on(device: torch.device, bits: int, kept: int) -> tuple[Tensor, Tensor]:
    """Return (2, 16) levels of ``kept`` planes and of one less, (2,) factors; float32."""
    widths = (kept, max(kept - 1, 1))
    levels = np.stack([rotated_levels(bits, width) for width in widths]).astype(np.float32)
    factors = np.array([rotated_level_factor(bits, width) for width in widths], np.float32)
    return torch.from_numpy(levels).to(device), torch.from_numpy(factors).to(device)
