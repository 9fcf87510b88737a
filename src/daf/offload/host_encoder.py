"""The processor's half of collaborative packing: the bytes that the device would have made."""

from __future__ import annotations

import torch
from torch import Tensor

from daf.core.code_format import WORD_BYTES, code_bytes, words_per_plane
from daf.core.policy import Method, Treatment
from daf.kernels.backend import element_type
from daf.kernels.cpu import flat


def words_for(count: int, bits: int, *, pinned: bool) -> Tensor:
    """Room for a code: int32 words, planes first, headers behind, as ``HostStore`` keeps them.

    Args:
        count: elements.
        bits: planes.
        pinned: so that a device copies them by itself.

    Raises:
        RuntimeError: no pinned memory is left.
    """
    words = code_bytes(count, bits) // WORD_BYTES
    return torch.empty(words, dtype=torch.int32, pin_memory=pinned)


def encode_on_host(
    tensor: Tensor, treatment: Treatment, key: int, words: Tensor | None = None
) -> Tensor:
    """The *rotated* or *minmax* code of a dense tensor on the host, on all of PyTorch's threads.

    Into ``words`` of ``words_for``, or new ones; returns them.
    """
    count = tensor.numel()
    planes = treatment.bits * words_per_plane(count)
    if words is None:
        words = words_for(count, treatment.bits, pinned=False)
    source = (tensor.data_ptr(), element_type(tensor.dtype), count, treatment.bits)
    target = (words.data_ptr(), words[planes:].data_ptr(), torch.get_num_threads())
    if treatment.method is Method.ROTATED:
        flat.encode_rotated(*source, treatment.rounds, key, *target)
    else:
        flat.encode_minmax(*source, key, *target)
    return words
