"""The processor's half of collaborative packing: the bytes that the device would have made."""

from __future__ import annotations

import torch
from torch import Tensor

from daf.core.code_format import WORD_BYTES, code_bytes
from daf.core.policy import Method, Treatment
from daf.kernels import PageFields
from daf.kernels.backend import element_type
from daf.kernels.cpu import paged


def words_for(count: int, bits: int, *, pinned: bool) -> Tensor:
    """Allocate a code: int32 words, planes first, headers behind, as ``HostStore`` keeps them.

    Args:
        count: elements.
        bits: planes.
        pinned: True: a device can copy them by itself.

    Raises:
        RuntimeError: no pinned memory is left.
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
    fields = PageFields.flat(words.data_ptr(), count, treatment.bits)
    source = (tensor.data_ptr(), element_type(tensor.dtype), fields)
    if treatment.method is Method.ROTATED:
        paged.encode_rotated(*source, treatment.rounds, key, torch.get_num_threads())
    else:
        paged.encode_minmax(*source, key, torch.get_num_threads())
    return words
