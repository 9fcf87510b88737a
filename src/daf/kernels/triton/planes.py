"""Where a code's planes and headers lie on a device: flat, or in pages behind a page table."""

from typing import NamedTuple

import torch
from torch import Tensor

from daf.core.code_format import HEADER_BYTES_PER_BLOCK, block_count, words_per_plane
from daf.core.errors import KernelError
from daf.kernels import PageFields


class PlaneWords(NamedTuple):
    """Planes and headers as kernels take them; see :class:`DevicePlanes`."""

    region: Tensor | None
    headers: Tensor | None
    table: Tensor | None
    runs: int
    page_words: int


# A kernel asks for its region: comparing a tuple with None is an error in Triton before 3.7.
NO_PLANES = PlaneWords(None, None, None, 1, 1)


class DevicePlanes(NamedTuple):
    """:class:`daf.kernels.PageFields` with device tensors for addresses; contiguous, int32 words.

    ``table`` (int64) gives each page's start in words from ``region``'s, perhaps in other tensors,
    which the caller keeps. Flat planes are one run with a page per plane. ``headers`` may be None.
    """

    region: Tensor
    headers: Tensor | None
    table: Tensor | None
    elements: int
    runs: int
    full_runs: int
    bits: int
    kept: int
    page_words: int

    @property
    def words(self) -> PlaneWords:
        """The planes as kernels take them."""
        return PlaneWords(self.region, self.headers, self.table, self.runs, self.page_words)

    @property
    def is_whole(self) -> bool:
        """True if every plane of every run is resident."""
        return self.kept == self.bits and self.full_runs == self.runs


def flat_planes(planes: Tensor, headers: Tensor | None, count: int, bits: int) -> DevicePlanes:
    """Return the first planes of a ``bits``-bit code: (kept, words) int32; headers (blocks,) int32.

    KernelError: a tensor does not have the shape that ``count`` requires.
    """
    words = words_per_plane(count)
    _check_words("planes", planes, planes.shape[0] * words)
    if headers is not None:
        _check_words("headers", headers, HEADER_BYTES_PER_BLOCK * block_count(count) // 4)
    return DevicePlanes(planes, headers, None, count, 1, 1, bits, planes.shape[0], words)


def paged_planes(region: Tensor, table: Tensor, fields: PageFields) -> DevicePlanes:
    """Return planes in pages, which ``table`` (int64) places in words from ``region``'s start.

    Only the numbers of ``fields`` are read. KernelError: the table is too short for them.
    """
    least = fields.bits * fields.runs
    if table.numel() < least or table.dtype != torch.int64:
        raise KernelError(
            f"asked for {fields.bits} planes of {fields.runs} runs, found a page table of "
            f"{table.numel()} {table.dtype}; it needs at least {least} int64 entries"
        )
    numbers = fields[3:]  # elements to kept
    return DevicePlanes(region, region, table, *numbers, fields.page_bytes // 4)


def _check_words(name: str, tensor: Tensor, words: int) -> None:
    if tensor.dtype != torch.int32 or not tensor.is_contiguous() or tensor.numel() != words:
        raise KernelError(
            f"asked for {name} of {words} words, found {tuple(tensor.shape)} of {tensor.dtype}; "
            "give a contiguous int32 tensor of so many elements"
        )
