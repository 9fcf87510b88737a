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


class Scratch:
    """A source of tensors on recycled memory: it keeps one block, the last that was needed."""

    def __init__(self) -> None:
        self._block: torch.UntypedStorage | None = None
        self._lock = threading.Lock()  # several threads may run backward; one takes the idle block

    @property
    def held_bytes(self) -> int:
        """Bytes of the kept block, in use or not."""
        block = self._block  # another thread may drop it
        return 0 if block is None else block.nbytes()

    def empty(self, layout: Layout) -> Tensor:
        """Return a dense tensor of this geometry, content undefined."""
        nbytes = layout.dtype.itemsize * math.prod(layout.shape)
        recycled = allocator.is_installed()
        if nbytes < SMALLEST_BLOCK_BYTES or layout.device.type != "cpu" or recycled:
            return layout.empty()
        tensor = torch.empty(0, dtype=layout.dtype)
        with self._lock:
            if self._block is None or self._block.nbytes() < nbytes or not _is_idle(self._block):
                self._block = None  # idle memory is freed before more is asked for
                self._block = torch.UntypedStorage(nbytes)  # type: ignore[no-untyped-call]
            return tensor.set_(self._block, 0, layout.shape, layout.stride)

    def release(self) -> None:
        """Drop the block, from any thread; one in use lives on with its tensors."""
        with self._lock:
            self._block = None


def _is_idle(block: torch.UntypedStorage) -> bool:
    """True if ours is the only reference; every tensor and view on the block holds one more."""
    return storage_holders(block._cdata) == 1
