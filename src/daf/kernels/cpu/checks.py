"""What a call of a native kernel must keep to: each check raises KernelError where it does not."""

from __future__ import annotations

import ctypes
from itertools import pairwise
from math import prod

from daf.core.code_format import ElementType, block_count
from daf.core.errors import KernelError
from daf.kernels import ChannelAffine, ChannelSums, StridedView
from daf.kernels.cpu.strided_views import VIEW_DIMENSIONS, merged

INTEGER_BITS = range(1, 65)
_MOST_CHANNELS = 2**32
_MOST_INNER = 2**63


def check_call(count: int, threads: int, **pointers: int) -> None:
    """A count, threads, and addresses; these may be 0 only where there is nothing at them."""
    if count < 0:
        raise KernelError(f"asked for {count} elements; a count is 0 or more")
    if threads < 1:
        raise KernelError(f"asked for {threads} threads; the least is 1")
    for name, address in pointers.items():
        if count > 0 or address < 0:
            check_pointer(name, address)


def check_pointer(name: str, address: int) -> None:
    """An address of 64 bits, not 0."""
    if not 0 < address < 2**64:
        raise KernelError(f"asked for {name} at address {address}; give a tensor's data_ptr()")


def check_member(name: str, value: int, allowed: range | tuple[int, ...]) -> None:
    """One of the values that exist."""
    if value not in allowed:
        raise KernelError(f"asked for {name} {value!r}; {allowed[0]} to {allowed[-1]} exist")


def check_key(key: int) -> None:
    """A seed of 64 bits."""
    if not 0 <= key < 2**64:
        raise KernelError(f"asked for key {key}; a key has 64 bits and no sign")


def check_rotation(rounds: int, key: int) -> None:
    """Rounds and key of ``rotated``."""
    check_member("rounds", rounds, (1, 2))
    check_key(key)


def check_integers(item_bytes: int, bits: int) -> None:
    """Item size and code width of packed integers."""
    if item_bytes not in (1, 2, 4, 8):
        raise KernelError(f"asked for items of {item_bytes} bytes; 1, 2, 4 and 8 exist")
    check_member("bits", bits, INTEGER_BITS)


def check_borders(address: int, count: int) -> None:
    """``count`` ascending float32 numbers at an address."""
    check_pointer("borders", address)
    borders = (ctypes.c_float * count).from_address(address)
    if not all(low < high for low, high in pairwise(borders)) or borders[0] != borders[0]:
        raise KernelError(f"asked for borders {list(borders)}; they must ascend")


def element_type_number(element_type: ElementType) -> int:
    """The native number of an element type."""
    try:
        return int(ElementType(element_type))
    except ValueError as problem:
        raise KernelError(
            f"asked for element type {element_type!r}; float32, bfloat16 and float16 exist"
        ) from problem


def affine_fields(affine: ChannelAffine | None) -> ChannelAffine | tuple[()]:
    """An affine as the native code takes it: its fields, or nothing."""
    if affine is None:
        return ()
    check_channels(affine.channels, affine.inner)
    check_pointer("scale", affine.scale_pointer)
    check_pointer("shift", affine.shift_pointer)
    return affine


def check_channels(channels: int, inner: int) -> None:
    """``(i // inner) % channels`` makes sense and fits the native numbers."""
    if not (1 <= channels < _MOST_CHANNELS and 1 <= inner < _MOST_INNER):
        raise KernelError(
            f"asked for {channels} channels, {inner} elements each; both are 1 or more, "
            f"channels below {_MOST_CHANNELS}"
        )


def sums_fields(sums: ChannelSums | None) -> ChannelSums | tuple[()]:
    """Sums as the native code takes them: their fields, or nothing."""
    if sums is None:
        return ()
    check_channels(sums.channels, sums.inner)
    check_pointer("sums", sums.sums_pointer)
    check_pointer("squares", sums.squares_pointer)
    check_pointer("workspace", sums.workspace_pointer)
    return sums


def block_range(count: int, blocks: tuple[int, int] | None) -> tuple[int, int]:
    """First and last (exclusive) of the blocks asked for; all where none are."""
    total = block_count(count)
    first, last = blocks or (0, total)
    if not 0 <= first <= last <= total:
        raise KernelError(f"asked for blocks {first} to {last}; the tensor has {total}")
    return first, last


def view_fields(view: StridedView | None, count: int) -> StridedView | tuple[()]:
    """A view as the native code takes it, its dimensions merged, or nothing."""
    if view is None or count == 0:
        return ()
    if prod(view.sizes) != count or len(view.sizes) != len(view.strides) or min(view.sizes) < 1:
        raise KernelError(
            f"asked for {count} elements of sizes {view.sizes}, strides {view.strides}; "
            "they must agree"
        )
    found = merged(view)
    if len(found.sizes) > VIEW_DIMENSIONS or any(abs(stride) >= 2**62 for stride in found.strides):
        raise KernelError(
            f"asked for a view of sizes {found.sizes}, strides {found.strides} after merging; "
            f"at most {VIEW_DIMENSIONS} dimensions exist: copy it first"
        )
    return found
