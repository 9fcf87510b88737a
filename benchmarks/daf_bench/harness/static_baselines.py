"""Static checkpointing and static accumulation, written by hand as a user would, without DAF."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from daf.step.microbatch import LossFunction, likely_cut, read_loss
from daf_bench.harness.saved_bytes import SavedBytes

Step = Callable[[Any], float]


class CheckpointedBlocks:
    """Modules that compute in backward again what they computed in forward.

    ``counted`` is told what a block holds for its own backward while it is computed again: hooks
    from outside do not see that. Where it is None, nothing is counted, which costs nothing.
    """

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        self.counted: SavedBytes | None = None
        for block in blocks:
            block.forward = partial(self._forward, block, block.forward)

    def _forward(
        self, block: nn.Module, forward: Callable[..., Any], *inputs: Any, **options: Any
    ) -> Any:
        # From lists as they are now: DenseNet's grow after the call.
        as_now = [tuple(each) if isinstance(each, list) else each for each in inputs]
        compute = forward
        if self.counted is not None:
            held = _saved_bytes_of(block, forward, as_now, options)
            compute = _Counting(forward, self.counted, held)
        return checkpoint(compute, *as_now, use_reentrant=False, **options)


class _Counting:
    """A block's forward, whose every call but the first is a recomputation."""

    def __init__(self, forward: Callable[..., Any], counted: SavedBytes, held_bytes: int) -> None:
        self._forward, self._counted, self._held_bytes = forward, counted, held_bytes
        self._is_first = True

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        if not self._is_first:
            self._counted.note_beside(self._held_bytes)
        self._is_first = False
        return self._forward(*inputs, **options)


def _saved_bytes_of(
    block: nn.Module, forward: Callable[..., Any], inputs: list[Any], options: dict[str, Any]
) -> int:
    """What this call holds for backward beside its inputs, found by making it once more."""
    counted = SavedBytes(block, (inputs, options))
    with torch.random.fork_rng(devices=[]), counted.hooks():
        forward(*inputs, **options)
    return counted.peak_bytes


def checkpoint_blocks(
    model: nn.Module, blocks: tuple[str, ...], share: float
) -> CheckpointedBlocks:
    """Make the first ``share`` of these modules recompute in backward what they compute.

    The first blocks hold the most where resolution falls along the network.
    """
    wanted = blocks[: round(share * len(blocks))]
    return CheckpointedBlocks(map(model.get_submodule, wanted))


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
