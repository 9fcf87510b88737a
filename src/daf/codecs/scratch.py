"""Memory that decoded tensors come to life in, used again once nobody looks at them.

A decoded tensor lives for one operator of backward. A fresh block for each
would be paged in anew every time, which costs several times what decoding
does; so blocks are kept and handed out again when the storage's reference
count says that the last tensor on it is gone. Where freed blocks are recycled
anyway (``memory.recycling``) nothing is kept here: a block that has become
idle serves whoever asks next.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from daf._native import allocator
from daf.codecs.layout import Layout
from daf.torch_compat.autograd_graph import storage_holders

# Below this, the system allocator itself keeps and reuses blocks.
SMALLEST_BLOCK_BYTES = 1 << 20
MOST_BLOCKS = 1


class Scratch:
    """Hands out tensors on recycled blocks; keeps at most ``MOST_BLOCKS`` of them."""

    def __init__(self) -> None:
        self._blocks: list[torch.UntypedStorage] = []
        # Several threads may run backward; between finding a block idle and using it, only one.
        self._lock = threading.Lock()

    @property
    def held_bytes(self) -> int:
        """Bytes of the blocks that are kept, in use or not."""
        return sum(block.nbytes() for block in self._blocks)

    def empty(self, layout: Layout) -> Tensor:
        """A dense tensor of this geometry with undefined content."""
        nbytes = layout.dtype.itemsize
        for size in layout.shape:
            nbytes *= size
        recycled = allocator.is_installed()
        if nbytes < SMALLEST_BLOCK_BYTES or layout.device.type != "cpu" or recycled:
            return layout.empty()
        tensor = torch.empty(0, dtype=layout.dtype)
        with self._lock:
            block = self._idle_block(nbytes) or self._new_block(nbytes)
            return tensor.set_(block, 0, layout.shape, layout.stride)

    def release(self) -> None:
        """Let go of every block, from any thread; those in use live on with their tensors."""
        with self._lock:
            self._blocks.clear()

    def _idle_block(self, nbytes: int) -> torch.UntypedStorage | None:
        fitting = (block for block in self._blocks if block.nbytes() >= nbytes and _is_idle(block))
        return min(fitting, key=torch.UntypedStorage.nbytes, default=None)

    def _new_block(self, nbytes: int) -> torch.UntypedStorage:
        """A new block; it takes the place of the smallest, since larger ones serve more tensors."""
        if len(self._blocks) == MOST_BLOCKS:
            self._blocks.remove(min(self._blocks, key=torch.UntypedStorage.nbytes))
        block = torch.UntypedStorage(nbytes)  # type: ignore[no-untyped-call]
        self._blocks.append(block)
        return block


def _is_idle(block: torch.UntypedStorage) -> bool:
    """Is ours the only reference? Every tensor and view on the block counts as one more."""
    return storage_holders(block._cdata) == 1
