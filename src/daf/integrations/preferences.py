"""Batches of TRL's preference trainers: all chosen completions, then all rejected ones."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from daf.step.batch_cut import BatchSplit

_TRAINERS = frozenset({"DPOTrainer", "RewardTrainer"})


def are_preferences(trainer: object) -> bool:
    """Return whether a trainer's batches are pairs."""
    return not _TRAINERS.isdisjoint(kind.__name__ for kind in type(trainer).__mro__)


def _count(batch: Mapping[str, Any]) -> int:
    """Return the number of pairs; 1, which is not cut, where a tensor has other rows (images)."""
    pairs = len(batch.get("input_ids", ())) // 2
    rows = {len(each) for each in batch.values() if _has_rows(each)}
    return pairs if pairs and rows <= {pairs, 2 * pairs} else 1


def _has_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _take(batch: Mapping[str, Any], start: int, stop: int) -> dict[str, Any]:
    count = _count(batch)

    def taken(value: Any) -> Any:
        if count == 1 or not _has_rows(value):
            return value
        halves = (value,) if len(value) == count else value.chunk(2)
        return torch.cat([half[start:stop] for half in halves])

    return {name: taken(value) for name, value in batch.items()}


IN_PAIRS = BatchSplit(_count, _take)
