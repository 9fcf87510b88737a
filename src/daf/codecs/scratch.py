"""Memory for decoded tensors, recycled once no tensor refers to it.

A decoded tensor lives for one operator of backward; paging in a fresh block for each costs several
times what decoding does. Where the allocator recycles freed blocks (``memory.recycling``), nothing
is kept here.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from daf._native import allocator
from daf.codecs.layout import Layout
from daf.torch_compat.autograd_graph import storage_holders

SMALLEST_BLOCK_BYTES = 1 << 20  # the system allocator itself keeps and reuses smaller ones
MOST_BLOCKS = 1


class Scratch:
    """A source of tensors on recycled blocks; keeps at most ``MOST_BLOCKS`` of them."""

    def __init__(self) -> None:
        self._blocks: list[torch.UntypedStorage] = []
        self._lock = threading.Lock()  # several threads may run backward; one takes an idle block

    @property
    def held_bytes(self) -> int:
        """Bytes of the kept blocks, in use or not."""
        return sum(block.nbytes() for block in self._blocks)

    def empty(self, layout: Layout) -> Tensor:
        """Return a dense tensor of this geometry, content undefined."""
        nbytes = layout.dtype.itemsize
        for size in layout.shape:
            nbytes *= size
        recycled = allocator.is_installed()
        if nbytes < SMALLEST_BLOCK_BYTES or layout.device.type != "cpu" or recycled:
            return layout.empty()
        tensor = torch.empty(0, dtype=layout.dtype)
        with self._lock:
            fitting = (each for each in self._blocks if each.nbytes() >= nbytes and _is_idle(each))
            block = min(fitting, key=torch.UntypedStorage.nbytes, default=None)
            block = block or self._new_block(nbytes)
            return tensor.set_(block, 0, layout.shape, layout.stride)

    def release(self) -> None:
        """Drop every block, from any thread; blocks in use live on with their tensors."""
        with self._lock:
            self._blocks.clear()

    def _new_block(self, nbytes: int) -> torch.UntypedStorage:
        """Allocate a block in place of the smallest, since larger ones serve more tensors."""
        if len(self._blocks) == MOST_BLOCKS:
            self._blocks.remove(min(self._blocks, key=torch.UntypedStorage.nbytes))
        block = torch.UntypedStorage(nbytes)  # type: ignore[no-untyped-call]
        self._blocks.append(block)
        return block


def _is_idle(block: torch.UntypedStorage) -> bool:
    """True if ours is the only reference; every tensor and view on the block holds one more."""
    return storage_holders(block._cdata) == 1
