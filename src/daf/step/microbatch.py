"""The losses of micro-batches, and how their gradients join; batches cut without a proof."""

import dataclasses
from collections.abc import Callable, Iterable
from inspect import signature
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from daf.core.errors import DataError
from daf.step.batch_cut import WHOLE, BatchCut, possible_cuts
from daf.torch_compat.modules import AnyBatchNorm
from daf.torch_compat.pytree import tensors_inside

LossFunction = Callable[[nn.Module, Any], Any]
_OF_OUTPUTS = ("torch.nn.functional", "torch.nn.modules.loss")  # losses that take no model


def likely_cut(batch: Any) -> BatchCut:
    """Return the likeliest way to cut a batch, which nothing has proven."""
    return next(possible_cuts(batch), WHOLE)


def batch_bytes(batch: Any) -> int:
    """Return the bytes of all tensors in a batch, those inside its objects too."""
    return sum(each.numel() * each.element_size() for each in tensors_inside(batch))


def split_refusal(model: nn.Module) -> str:
    """Return why splitting changes the result (layers with batch statistics); else empty."""
    for name, module in model.named_modules():
        uses_batch = module.training or getattr(module, "running_mean", None) is None
        if isinstance(module, AnyBatchNorm) and uses_batch:
            return f"{type(module).__name__} {name!r} takes its statistics from the whole batch"
    return ""


@dataclasses.dataclass(frozen=True, slots=True)
class WeightedLoss:
    """A micro-batch's loss as sum and weight; ``is_sum`` is False for a plain mean.

    A weight on the total's device stays a tensor: converting it to a number waits for the device.
    """

    total: Tensor
    weight: float | Tensor
    is_sum: bool

    @property
    def mean(self) -> Tensor:
        """The micro-batch's mean loss."""
        if not self.is_sum:
            return self.total
        if not isinstance(self.weight, Tensor):
            return self.total / self.weight
        # As by ``float(weight)``: in the total's dtype, divided in float32 at least.
        wide = torch.promote_types(self.total.dtype, torch.float32)
        return (self.total.to(wide) / self.weight.to(wide)).to(self.total.dtype)


def check_loss(loss_fn: Any) -> None:
    """Raise DataError unless this can be called as ``loss_fn(model, batch)``."""
    code = loss_fn.__code__ if isinstance(loss_fn, FunctionType) else None
    if code is not None and code.co_argcount == 2 and not code.co_kwonlyargcount:
        return  # nearly all are so, and a signature takes as long as a small operator
    takes = hasattr(loss_fn, "__wrapped__") or getattr(loss_fn, "__module__", "") not in _OF_OUTPUTS
    try:
        signature(loss_fn, follow_wrapped=False).bind(None, None)
    except ValueError:
        pass  # of native code, that has no signature
    except TypeError:
        takes = False
    if not takes:
        raise DataError(
            f"asked to call {loss_fn!r:.80} with a model and a batch, which it does not take; give "
            "a function such as lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])"
        )


def read_loss(result: Any, examples: int) -> WeightedLoss:
    """Read what ``loss_fn`` returned: a scalar mean, or ``(sum, weight)``; DataError for others."""
    is_sum = isinstance(result, tuple) and len(result) == 2
    total, weight = result if is_sum else (result, float(examples))
    if isinstance(weight, Tensor) and weight.grad_fn is not None:
        raise DataError(
            "loss_fn returned (sum, weight) with a weight that parameters lead to, whose gradient "
            "would be lost; return the mean, sum / weight, or (sum, weight.detach())"
        )
    weight = _weight_beside(total, weight)
    is_trained = isinstance(total, Tensor) and total.requires_grad >= torch.is_grad_enabled()
    if weight is None or not is_trained or total.numel() != 1 or total.is_complex():
        if isinstance(result, Tensor):
            trained = "" if is_trained else " to which no parameter that trains leads"
            found = f"a tensor of shape {tuple(result.shape)} and {result.dtype}{trained}"
        else:
            found = f"{type(result).__name__}: {result!r:.80}"
        raise DataError(
            f"loss_fn must return a scalar tensor (the mean) or (sum, weight); it returned {found}"
        )
    return WeightedLoss(total, weight, is_sum)


def _weight_beside(total: Any, weight: Any) -> float | Tensor | None:
    """Copy the weight: a tensor may be overwritten before it is read. None: it is no number."""
    are_tensors = isinstance(total, Tensor) and isinstance(weight, Tensor)
    if are_tensors and weight.numel() == 1 and weight.device == total.device:
        copy: Tensor = weight.detach().reshape(()).clone()
        return copy
    try:
        return float(weight)
    except (TypeError, ValueError, RuntimeError):
        return None


def scale_gradients(leaves: Iterable[Tensor], factor: float) -> None:
    """Multiply every gradient that exists by ``factor``, in place."""
    with torch.no_grad():
        for leaf in {*leaves}:
            if leaf.grad is not None:
                leaf.grad.mul_(factor)
