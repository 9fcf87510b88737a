"""Static checkpointing and static accumulation, written by hand as a user would, without DAF."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from daf.step.microbatch import LossFunction, likely_cut, read_loss

Step = Callable[[Any], float]


def checkpoint_blocks(model: nn.Module, blocks: tuple[str, ...], share: float) -> None:
    """Make the first ``share`` of these modules recompute in backward what they compute.

    The first blocks hold the most where resolution falls along the network.
    """
    for path in blocks[: round(share * len(blocks))]:
        block = model.get_submodule(path)
        block.forward = partial(_checkpointed, block.forward)


def _checkpointed(forward: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    """Compute again from lists as they are now: DenseNet's grow after the call."""
    as_now = (tuple(each) if isinstance(each, list) else each for each in inputs)
    return checkpoint(forward, *as_now, use_reentrant=False, **options)


def accumulating_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss_fn: LossFunction, count: int
) -> Step:
    """A step over ``count`` pieces of the batch, each piece's mean weighted by its examples.

    With batch normalisation that is another computation: statistics are each piece's own.
    """

    def step(batch: Any) -> float:
        optimizer.zero_grad(set_to_none=True)
        examples, total = likely_cut(batch).size(batch), 0.0
        for piece in likely_cut(batch).parts(batch, -(-examples // count)):
            size = likely_cut(piece).size(piece)
            loss = read_loss(loss_fn(model, piece), size).mean * (size / examples)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        optimizer.step()
        return total

    return step
