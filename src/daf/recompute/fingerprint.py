"""Fingerprints: a few bits of a tensor's content, by which a call's second run is compared.

A sample walks diagonally, so that it meets all rows and columns, and starts elsewhere for every
save. What differs in many elements is seen for certain: another mask of dropout, another layer,
another factor.
"""

import math
import zlib
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from daf.codecs.layout import is_dense
from daf.torch_compat.autograd_graph import is_strided, without_torch_function

WHOLE_BYTES = 4096  # smaller tensors are read whole
_LEAST_SAMPLE = 256
_SAMPLED_SHARE = 1 / 1024
_STARTS = 97  # prime: starts of consecutive saves lie far apart
_ADDED_BYTES = 1 << 16  # of larger ones, words are added before a checksum is taken
_ROW_BYTES = 4096
# Types that NumPy does not know, by the size of their elements.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Form(NamedTuple):
    """A tensor's shape, dtype and device."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> "Form":
        """Return a tensor's form."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device)

    def __str__(self) -> str:
        return f"a {str(self.dtype).removeprefix('torch.')} tensor {list(self.shape)}"


class Fingerprint(NamedTuple):
    """A tensor's form and a sum of content: a checksum, on a device the sample itself.

    None stands for content that cannot be compared: of sparse, nested and other unusual tensors,
    and of libraries' workspaces.
    """

    form: Form
    content: int | Tensor | None

    @classmethod
    def sampled(cls, tensor: Tensor, place: int) -> "Fingerprint":
        """Return a fingerprint of a sample; another ``place`` chooses other elements."""
        with without_torch_function():
            return cls(Form.of(tensor), _content(tensor, place, whole=False))

    @classmethod
    def whole(cls, tensor: Tensor) -> "Fingerprint":
        """Return a fingerprint of every element."""
        with without_torch_function():
            return cls(Form.of(tensor), _content(tensor, 0, whole=True))

    def differs(self, other: "Fingerprint") -> bool | Tensor:
        """Return whether contents differ that can be compared; on a device as a tensor."""
        if self.content is None or other.content is None:
            return False
        if isinstance(self.content, Tensor) and isinstance(other.content, Tensor):
            return (self.content != other.content).any()
        return self.content != other.content


def _content(tensor: Tensor, place: int, *, whole: bool) -> int | Tensor | None:
    if not _is_readable(tensor):
        return None
    is_sampled = not whole and tensor.nbytes > WHOLE_BYTES
    bits = _bits(_sample(tensor.detach(), place) if is_sampled else tensor.detach())
    is_large = not is_sampled and bits.nbytes > _ADDED_BYTES
    sample = _bits(_sample(tensor.detach(), place)) if is_large else bits
    if bits.device.type != "cpu":
        return torch.cat((_added_there(bits), sample)) if is_large else bits.clone()
    checksum = zlib.crc32(sample.numpy().data)
    return _added(bits.numpy()) ^ checksum if is_large else checksum


def _added(bits: NDArray[Any]) -> int:
    """Return a checksum that sees every bit, but no other order of rows, at memory's speed."""
    words = bits.view(np.uint8)
    whole = words.size // _ROW_BYTES * _ROW_BYTES
    rows = words[:whole].view(np.int64).reshape(-1, _ROW_BYTES // 8)
    return zlib.crc32(words[whole:].data, zlib.crc32(np.add.reduce(rows, axis=0).data))


def _added_there(bits: Tensor) -> Tensor:
    whole = bits.numel() // _ROW_BYTES * _ROW_BYTES
    rows = bits[:whole].view(-1, _ROW_BYTES).sum(0, dtype=torch.int64)
    return torch.cat((rows, bits[whole:].sum(dtype=torch.int64).view(1)))


def _is_readable(tensor: Tensor) -> bool:
    """True if this is an ordinary tensor; parts of a library's workspace (bytes) are undefined."""
    if type(tensor) not in (Tensor, torch.nn.Parameter) or not is_strided(tensor):
        return False
    if tensor.dtype is torch.uint8 and tensor.dim() == 1:
        return False
    is_odd = tensor.is_conj() or tensor.is_neg() or tensor.is_quantized
    return not is_odd and tensor.device.type != "meta"


def _bits(tensor: Tensor) -> Tensor:
    """Return the bits as integers, so that NaN equals itself."""
    flat = tensor.contiguous().reshape(-1)
    size = flat.element_size()
    return flat.view(_BITS[size]) if size in _BITS else flat.view(torch.int64)


def _sample(tensor: Tensor, place: int) -> Tensor:
    step, start, count = _places(tensor.numel(), tensor.shape[-1], place)
    if is_dense(tensor):
        offset = tensor.storage_offset() + start
        return torch.as_strided(tensor, (count,), (step,), offset)
    return torch.take(tensor, start + step * torch.arange(count, device=tensor.device))


@lru_cache(maxsize=4096)  # a model's shapes come again in every step
def _places(elements: int, row: int, place: int) -> tuple[int, int, int]:
    wanted = min(elements, max(_LEAST_SAMPLE, int(elements * _SAMPLED_SHARE)))
    step = max(1, elements // wanted)
    while step > 1 and math.gcd(step, row) > 1:
        step -= 1
    start = place * _STARTS % step
    return step, start, -(-(elements - start) // step)
