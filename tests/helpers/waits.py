"""Who waits for a device: looks at elements, counted or refused."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Waits(TorchDispatchMode):
    """Counts looks at an element, each of which waits for what makes it; may refuse them."""

    def __init__(self, *, refused: bool = False) -> None:
        super().__init__()
        self.count = 0
        self._refused = refused

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default:
            assert not self._refused, "somebody waits for the device here"
            self.count += 1
        return function(*arguments, **(keywords or {}))


@contextmanager
def without_waiting(device: torch.device) -> Iterator[None]:
    """Inside, whoever waits for a device fails; a GPU's driver calls tell, or ``Waits``."""
    if device.type != "cuda":
        with Waits(refused=True):
            yield
        return
    try:
        with warnings.catch_warnings():  # it says that it misses some waits, after it is set
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
