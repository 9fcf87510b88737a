"""Memory for decoded tensors, recycled once no tensor refers to it.

A decoded tensor lives for one operator; paging in fresh blocks costs several times what decoding
does. Where the allocator recycles blocks (``memory.recycling``), nothing is kept here.
"""

import math
import threading

import torch
from torch import Tensor

from daf._native import allocator
from daf.codecs.layout import Layout
from daf.torch_compat.autograd_graph import storage_holders

SMALLEST_BLOCK_BYTES = 1 << 20  # the system allocator itself keeps and reuses smaller ones
MOST_BLOCKS = 2  # a sum that is computed again has two terms


class Scratch:
    """A source of tensors on recycled memory: it keeps two blocks, the last that were needed."""

    def __init__(self) -> None:
        self._blocks: list[torch.UntypedStorage] = []  # the last needed behind
        self._lock = threading.Lock()  # several threads may run backward; one takes an idle block

    @property
    def held_bytes(self) -> int:
        """Bytes of the kept blocks, in use or not."""
        with self._lock:
            return sum(block.nbytes() for block in self._blocks)

    def empty(self, layout: Layout) -> Tensor:
        """Return a dense tensor of this geometry, content undefined."""
        nbytes = layout.dtype.itemsize * math.prod(layout.shape)
        recycled = allocator.is_installed()
        if nbytes < SMALLEST_BLOCK_BYTES or layout.device.type != "cpu" or recycled:
            return layout.empty()
        tensor = torch.empty(0, dtype=layout.dtype)
        with self._lock:
            return tensor.set_(self._idle(nbytes), 0, layout.shape, layout.stride)

    def _idle(self, nbytes: int) -> torch.UntypedStorage:
        fitting = [each for each in self._blocks if each.nbytes() >= nbytes and _is_idle(each)]
        if not fitting:
            # Idle memory is freed before more is asked for.
            used = [each for each in self._blocks if not _is_idle(each)]
            self._blocks = used[1 - MOST_BLOCKS :]
            del used
            fitting = [torch.UntypedStorage(nbytes)]  # type: ignore[no-untyped-call]
            self._blocks += fitting
        return min(fitting, key=torch.UntypedStorage.nbytes)

    def release(self) -> None:
        """Drop the blocks, from any thread; one in use lives on with its tensors."""
        with self._lock:
            self._blocks = []


def _is_idle(block: torch.UntypedStorage) -> bool:
    """True if ours is the only reference; every tensor and view on the block holds one more."""
    return storage_holders(block._cdata) == 1
