"""Gradients of large weights, read as their product with one random vector each.

A linear layer's weight of ``m × n`` has the gradient ``Σ g xᵀ``. Whether two sums of such are equal
shows in ``Σ g (x·v)`` as well: for random signs ``v`` its expected square is the gradient's own
(Freivalds' check), at the cost of one vector in place of a product of matrices.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf.torch_compat.operator_mode import OperatorMode

LEAST_ELEMENTS = 2**20


class GradientSketches(OperatorMode):
    """Inside, ``F.linear`` gives no gradient to a model's large weights, but to ``sketches``.

    Weights with hooks, on a device or of other types than float32 get theirs as ever, and so does
    every weight from what uses it otherwise.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(self._called)
        random = torch.Generator().manual_seed(0)
        self._of: dict[int, tuple[nn.Parameter, Tensor]] = {}  # sketch and signs, by identity
        for weight in filter(_is_sketched, model.parameters()):
            signs = torch.randint(0, 2, weight.shape[1:], generator=random).mul_(2).sub_(1).float()
            self._of[id(weight)] = nn.Parameter(torch.zeros(len(weight)).float()), signs

    @property
    def sketches(self) -> list[nn.Parameter]:
        """The vectors whose gradients take the weights' place."""
        return [sketch for sketch, _ in self._of.values()]

    def taken(self) -> AbstractContextManager[object]:
        """Return what takes them in a pass, for models that have any."""
        return self if self._of else nullcontext()

    def give_up(self) -> None:
        """Give every weight its gradient from here on."""
        self._of.clear()

    def _called(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        known = self._of.get(id(args[1])) if func is F.linear and len(args) > 1 else None
        if known is None or args[0].dtype != torch.float32 or torch.is_autocast_enabled("cpu"):
            return func(*args, **kwargs)
        bias = args[2] if len(args) > 2 else kwargs.get("bias")
        return _Linear.apply(*args[:2], bias, *known)  # type: ignore[no-untyped-call]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, _sketch: Tensor, signs: Tensor
    ) -> Tensor:
        ctx.save_for_backward(weight, x @ signs)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weight, products = ctx.saved_tensors
        needs_input, _, needs_bias = ctx.needs_input_grad[:3]
        rows = gradient.flatten(0, -2)
        return (
            gradient @ weight if needs_input else None,
            None,
            rows.sum(0) if needs_bias else None,
            rows.T @ products.flatten(),
            None,
        )


def _is_sketched(weight: nn.Parameter) -> bool:
    has_hooks = weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None)
    is_usual = type(weight) is nn.Parameter and weight.dtype == torch.float32
    is_large = weight.dim() == 2 and weight.numel() >= LEAST_ELEMENTS
    is_here = weight.requires_grad and weight.device.type == "cpu"
    return is_usual and is_large and is_here and not has_hooks
