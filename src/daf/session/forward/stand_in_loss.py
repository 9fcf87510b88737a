"""A loss in place of the user's own, which the forward pass does not show."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from daf.torch_compat.pytree import map_nest, tensors_inside


class _Mean(torch.autograd.Function):
    """A mean that holds what a cross-entropy does: its input once more, and two gradients."""

    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        ctx.held = output.detach().clone()
        return output.float().mean()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        held = torch.zeros_like(ctx.held)
        return held.add(gradients[0] / max(1, held.numel()))


def stand_in_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean of all outputs of ``model`` that have gradients.

    ``batch``: the call's arguments and keywords.
    """
    arguments, keywords = batch
    outputs = tensors_inside(model(*arguments, **keywords))
    trained = [each for each in outputs if each.requires_grad and each.is_floating_point()]
    means: list[Tensor] = [
        each if each.dim() == 0 else _Mean.apply(each)  # type: ignore[no-untyped-call]
        for each in trained
    ]
    return torch.stack([each.float() for each in means]).sum()


def without_graph(batch: Any) -> Any:
    """Return a nest whose tensors have no graph: what made them is not this model's."""

    def bare(tensor: Tensor) -> Tensor:
        if tensor.grad_fn is None:
            return tensor
        return tensor.detach().requires_grad_(tensor.requires_grad)

    return map_nest(Tensor, bare, batch)
