"""By what factor ``torch.amp.GradScaler`` scaled a loss."""

from __future__ import annotations

from functools import wraps
from threading import get_ident
from typing import Any

from torch import Tensor
from torch.amp import GradScaler

from daf.core.replaced import Replaced


class ScaleWatch:
    """Notes the last factor of ``GradScaler.scale`` in this thread, while entered.

    ``factor``: a tensor of one element on the scaler's device, which is not waited for; None: no
    loss was scaled. Of several watches the innermost notes it. Nobody's class stays changed once
    every watch has been left.
    """

    def __init__(self) -> None:
        self.factor: Tensor | None = None
        self.thread = get_ident()

    def __enter__(self) -> ScaleWatch:
        _scale.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        _scale.remove(self)


@wraps(GradScaler.scale)
def _noting(self: GradScaler, outputs: Any) -> Any:
    scaled = _scale.original(self, outputs)
    ours = [each for each in _scale.listeners if each.thread == get_ident()]
    if ours and self.is_enabled() and self._scale is not None:
        ours[-1].factor = self._scale.detach().clone()
    return scaled


_scale: Replaced[ScaleWatch] = Replaced(GradScaler, "scale", _noting)
