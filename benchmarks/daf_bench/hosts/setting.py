"""What a host's process is told, and what a script is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from daf_bench.hosts.material import Rows, Shape, Texts

ACCUMULATED = 4  # batches to an update
# Acts on the first updates and not on later ones, so that a gradient of a wrong scale shows.
MOST_NORM = 3.0
LEARNING_RATE = 1e-4


@dataclass(frozen=True, slots=True)
class Setting:
    """One process: a host, alone (``budget_bytes`` None) or within a budget.

    ``data``: folder of the measuring data, or None. ``output``: a folder that the host may write
    in. ``tolerance`` None: the session's own.
    """

    host: str
    output: str
    updates: int
    data: str | None = None
    is_small: bool = False
    batch_size: int | None = None
    budget_bytes: int | None = None
    tolerance: float | None = None
    seed: int = 0

    @property
    def options(self) -> dict[str, Any]:
        """The session's, beside its budget (bytes)."""
        return {} if self.tolerance is None else {"tolerance": self.tolerance}


@dataclass(frozen=True, slots=True)
class Given:
    """What both scripts of a host begin with: one epoch is ``updates`` updates.

    ``batch_size``: windows of ``shape.length`` tokens. ``budget``: bytes.
    """

    model: nn.Module
    texts: Texts
    shape: Shape
    updates: int
    batch_size: int
    output: str
    budget: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def examples(self) -> int:
        """Windows of one epoch."""
        return self.updates * ACCUMULATED * self.batch_size

    def rows(self) -> Rows:
        """``input_ids`` and ``labels`` (int64 [length]) of every window of the epoch."""
        return Rows(self.texts, self.shape.length, self.examples)

    def loader(self) -> DataLoader[Any]:
        """Batches of the windows, in order."""
        return DataLoader(self.rows(), batch_size=self.batch_size)
