"""Checks of a native kernel's arguments; each raises KernelError."""

import ctypes
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from daf.core.errors import KernelError
from daf.kernels import PageFields

_MOST_CHANNELS = 2**32
_MOST_INNER = 2**63

Widths = range | tuple[int, ...]


def check_call(count: int, threads: int, **pointers: int) -> None:
    """Check a count, threads, and addresses, which may be 0 only if nothing is there."""
    if count < 0:
        raise KernelError(f"asked for {count} elements; a count is 0 or more")
    if threads < 1:
        raise KernelError(f"asked for {threads} threads; the least is 1")
    for name, address in pointers.items():
        if count > 0 or address < 0:
            check_pointer(name, address)


def check_pointer(name: str, address: int) -> None:
    """Check an address: 64 bits, not 0."""
    if not 0 < address < 2**64:
        raise KernelError(f"asked for {name} at address {address}; give a tensor's data_ptr()")


def check_member(name: str, value: int, allowed: Widths) -> None:
    """Check that a value is one of ``allowed``."""
    if value not in allowed:
        raise KernelError(f"asked for {name} {value!r}; {allowed[0]} to {allowed[-1]} exist")


def check_key(key: int) -> None:
    """Check a seed of 64 bits."""
    if not 0 <= key < 2**64:
        raise KernelError(f"asked for key {key}; a key has 64 bits and no sign")


def check_borders(address: int, count: int) -> None:
    """Check ``count`` ascending float32 numbers at an address."""
    check_pointer("borders", address)
    borders = (ctypes.c_float * count).from_address(address)
    if not all(low < high for low, high in pairwise(borders)) or borders[0] != borders[0]:
        raise KernelError(f"asked for borders {list(borders)}; they must ascend")


def checked_table(name: str, table: Tensor | None, entries: int) -> Tensor:
    """Return a table that is contiguous float32 of so many entries; KernelError if it is not."""
    if (
        table is None
        or table.dtype != torch.float32
        or table.numel() != entries
        or not table.is_contiguous()
    ):
        found = "none" if table is None else f"{tuple(table.shape)} of {table.dtype}"
        raise KernelError(
            f"asked for {entries} {name}, found {found}; give a contiguous float32 tensor"
        )
    return table


def check_channels(channels: int, inner: int) -> None:
    """Check that ``(i // inner) % channels`` is valid and fits the native numbers."""
    if not (1 <= channels < _MOST_CHANNELS and 1 <= inner < _MOST_INNER):
        raise KernelError(
            f"asked for {channels} channels, {inner} elements each; both are 1 or more, "
            f"channels below {_MOST_CHANNELS}"
        )


def check_row_length(count: int, length: int) -> None:
    """Check that rows of ``length`` make up ``count`` elements."""
    if length < 1 or count % length:
        raise KernelError(
            f"asked for rows of {length} in {count} elements; give a length that divides them"
        )


def check_places(**tensors: Tensor | None) -> None:
    """Check that each tensor is there and has memory."""
    for name, tensor in tensors.items():
        check_pointer(name, 0 if tensor is None else tensor.data_ptr())


def check_fields(fields: PageFields, widths: Widths) -> PageFields:
    """Check the width, the addresses, and at least one plane in every run."""
    check_member("bits", fields.bits, widths)
    check_call(fields.elements, 1, region=fields.region, table=fields.table)
    least = fields.kept if fields.full_runs == fields.runs else fields.kept - 1
    if not 1 <= least <= fields.kept <= fields.bits:
        raise KernelError(
            f"asked to read {least} of {fields.bits} planes; at least one must be left"
        )
    return fields


def check_resident(planes: Any) -> None:
    """Check that no plane is evicted; ``planes`` are PageFields or a device's."""
    if not planes.is_whole:
        raise KernelError(
            f"asked for all {planes.bits} planes of a tensor, some of them evicted; "
            "only rotated codes can be read from fewer"
        )


def check_mask(mask: Any, count: int) -> None:
    """Check one whole plane of ``count`` elements: PageFields or a device's; None: no mask."""
    if mask is not None and not (mask.is_whole and (mask.elements, mask.bits) == (count, 1)):
        raise KernelError(
            f"asked to mask {count} elements by {mask.elements} of {mask.bits} planes; "
            "a mask has one plane and a bit for every element"
        )
