"""By what factor ``torch.amp.GradScaler`` scaled a loss."""

from __future__ import annotations

import threading
from functools import wraps
from typing import Any, ClassVar

from torch import Tensor
from torch.amp import GradScaler

from daf.core.replaced import Replaced


class ScaleWatch:
    """Notes the last factor of ``GradScaler.scale`` in this thread, while entered.

    ``factor``: a tensor of one element on the scaler's device, which is not waited for; None: no
    loss was scaled. Nobody's class stays changed once every watch has been left.
    """

    _of_thread: ClassVar[threading.local] = threading.local()

    def __init__(self) -> None:
        self.factor: Tensor | None = None
        self._outer: ScaleWatch | None = None

    def __enter__(self) -> ScaleWatch:
        self._outer = getattr(self._of_thread, "watch", None)
        self._of_thread.watch = self
        _scale.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._of_thread.watch = self._outer
        _scale.remove(self)

    @classmethod
    def note(cls, factor: Tensor | None) -> None:
        """Note a factor in this thread's watch, if there is one."""
        watch: ScaleWatch | None = getattr(cls._of_thread, "watch", None)
        if watch is not None and factor is not None:
            watch.factor = factor.detach().clone()


@wraps(GradScaler.scale)
def _noting(self: GradScaler, outputs: Any) -> Any:
    scaled = _scale.original(self, outputs)
    ScaleWatch.note(self._scale if self.is_enabled() else None)
    return scaled


_scale: Replaced[ScaleWatch] = Replaced(GradScaler, "scale", _noting)
