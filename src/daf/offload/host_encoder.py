"""The processor's half of collaborative packing: the bytes that the device would have made."""

from __future__ import annotations

import torch
from torch import Tensor

from daf.core.code_format import WORD_BYTES, code_bytes
from daf.core.policy import Treatment
from daf.kernels import PageFields
from daf.kernels.cpu.backend import CpuBackend
from daf.kernels.normalisation import CodedValues, Encoding
from daf.pool.views import PlaneView


def words_for(count: int, bits: int, *, pinned: bool) -> Tensor:
    """Allocate int32 words of a code: planes first, headers behind, as ``HostStore`` keeps them.

    A device can copy ``pinned`` ones by itself. RuntimeError: no pinned memory is left.
    """
    words = code_bytes(count, bits) // WORD_BYTES
    return torch.empty(words, dtype=torch.int32, pin_memory=pinned)


def encode_on_host(
    tensor: Tensor, treatment: Treatment, key: int, words: Tensor | None = None
) -> Tensor:
    """Encode a dense host tensor as *rotated* or *minmax* into ``words`` (None: new ones)."""
    count = tensor.numel()
    if words is None:
        words = words_for(count, treatment.bits, pinned=False)
    planes = PlaneView(PageFields.flat(words.data_ptr(), count, treatment.bits))
    CpuBackend().encode_values(CodedValues(planes, treatment, key, count), Encoding(tensor))
    return words
