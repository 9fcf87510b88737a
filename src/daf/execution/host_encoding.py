"""The processor's half of collaborative packing: the bytes that the device would have made."""

from __future__ import annotations

import torch
from torch import Tensor

from daf.kernels import block_count, cpu, header_bytes, plane_bytes, words_per_plane
from daf.plan import Treatment
from daf.store.codec import element_type


def code_bytes(count: int, bits: int) -> int:
    """Of planes and headers."""
    return plane_bytes(count, bits) + header_bytes(count)


def encode_on_host(tensor: Tensor, treatment: Treatment, key: int) -> Tensor:
    """The *rotated* code of a dense tensor on the host, on all of PyTorch's threads.

    Returns:
        int32 words, planes first, headers behind, as ``HostStore`` keeps them; pinned if the
        tensor is, so that a device copies them by itself.
    """
    count = tensor.numel()
    planes = treatment.bits * words_per_plane(count)
    pinned = tensor.is_pinned()
    words = torch.empty(planes + block_count(count), dtype=torch.int32, pin_memory=pinned)
    cpu.encode_rotated(
        *(tensor.data_ptr(), element_type(tensor.dtype), count),
        *(treatment.bits, treatment.rounds, key),
        *(words.data_ptr(), words[planes:].data_ptr(), torch.get_num_threads()),
    )
    return words
