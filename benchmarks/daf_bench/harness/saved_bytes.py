"""What autograd holds for backward in a loop without DAF, counted by hooks of our own.

Every storage counts once and whole, for as long as anything that was saved refers to it;
parameters, buffers and the caller's batch are left out (the design's *saved bytes*).
"""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from daf.torch_compat.pytree import tensors_in_batch


class _Held:
    """A saved tensor, in whose place autograd keeps this."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class SavedBytes:
    """Counts while its ``hooks`` are in force; ``peak_bytes`` is the most at any moment."""

    def __init__(self, model: nn.Module, batch: Any) -> None:
        known = [*model.parameters(), *model.buffers(), *tensors_in_batch(batch)]
        self._known = {_address(each) for each in known}
        self._users: Counter[int] = Counter()
        self._now_bytes = 0
        self.peak_bytes = 0

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """The context in which what is saved is counted."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda held: held.tensor)

    def note_beside(self, nbytes: int) -> None:
        """Somebody else holds so many bytes for backward beside what is counted, for a moment."""
        self.peak_bytes = max(self.peak_bytes, self._now_bytes + nbytes)

    def _pack(self, tensor: Tensor) -> _Held:
        held = _Held(tensor.detach())  # the tensor itself would keep its own graph alive
        address = _address(tensor)
        if address in self._known:
            return held
        nbytes = tensor.untyped_storage().nbytes()
        weakref.finalize(held, self._forget, address, nbytes).atexit = False
        self._users[address] += 1
        if self._users[address] == 1:
            self._now_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self._now_bytes)
        return held

    def _forget(self, address: int, nbytes: int) -> None:
        self._users[address] -= 1
        if not self._users[address]:
            self._now_bytes -= nbytes


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
