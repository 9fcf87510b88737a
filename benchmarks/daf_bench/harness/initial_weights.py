"""A model's first weights, kept on disk so that they take no memory while it is measured."""

from __future__ import annotations

import tempfile
import weakref

import numpy as np
import torch
from torch import nn


class FirstState:
    """Weights, buffers and torch's random state as they are now; ``restore`` brings them back."""

    def __init__(self, model: nn.Module) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  it lives as long as this does
        weakref.finalize(self, self._file.close)
        self._random = torch.get_rng_state()
        for tensor in model.state_dict().values():
            self._file.write(tensor.contiguous().numpy())  # one copy at a time, at most
        self._file.flush()

    def restore(self, model: nn.Module) -> None:
        """Write them back in place, layouts as they are."""
        self._file.seek(0)
        for tensor in model.state_dict().values():
            kind = torch.empty(0, dtype=tensor.dtype).numpy().dtype
            found = np.fromfile(self._file, kind, tensor.numel())
            tensor.copy_(torch.from_numpy(found).view(tensor.shape))
        torch.set_rng_state(self._random)
