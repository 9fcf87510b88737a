"""The autograd function of every fused operator, and what it holds in place of its input.

Where gradients need a graph (``create_graph``), they are PyTorch's own, of the input as held.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from daf.codecs.layout import Layout
from daf.core.errors import SavedTensorError
from daf.saved_tensors.packed_tensor import PackedTensor, saves_read_by
from daf.torch_compat.autograd_graph import is_transforming, without_torch_function
from daf.torch_compat.ownership import holders_of, sole_holders

Gradients = tuple[Tensor | None, ...]  # of an operator's inputs; None where none is needed


class FusedSave(PackedTensor):
    """What a fused operator holds in place of its input; backward computes gradients from it."""

    __slots__ = ("layout",)

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.layout = layout

    @abstractmethod
    def backward(self, gradient: Tensor, needs: Sequence[bool], *, owned: bool) -> Gradients:
        """Return the gradients of the operator's inputs; None where ``needs`` is False.

        Args:
            gradient: of the result, with the layout's strides.
            needs: one entry for each input.
            owned: nobody else holds ``gradient``, so that it may be overwritten.
        """

    @abstractmethod
    def run_again(self, x: Tensor, *parameters: Tensor | None) -> Tensor:
        """Return PyTorch's own result of the input and the first other inputs."""

    def differentiable(
        self, gradient: Tensor, inputs: Sequence[Tensor | None], needs: Sequence[bool]
    ) -> Gradients:
        """Return gradients that can be differentiated themselves; ``inputs``: first of all."""
        return differentiable_gradients(self.run_again, inputs, needs, gradient)


def differentiable_gradients(
    run: Callable[..., Tensor],
    inputs: Sequence[Tensor | None],
    needs: Sequence[bool],
    gradient: Tensor,
) -> Gradients:
    """Return the gradients of ``run(*inputs)``, with their graph; None where ``needs`` is False."""
    with torch.enable_grad():
        # Views, lest one input's gradient passes through another one that it was made from.
        views = [None if each is None else each.view_as(each) for each in inputs]
        pairs = zip(views, needs, strict=True)
        wanted = [each for each, need in pairs if need and each is not None]
        found = torch.autograd.grad(run(*views), wanted, gradient, create_graph=True)
    remaining = iter(found)
    return tuple(next(remaining) if need else None for need in needs)


class FusedFunction(torch.autograd.Function):
    """A fused operator whose one save, its input, is settled by ``OperatorContext.settle``.

    A subclass gives the autograd node its name.
    """

    reads_only_what_it_saved = True  # parameters are copied: see parameter_reads

    @staticmethod
    def forward(ctx: Any, run: Callable[[], Tensor], x: Tensor, *others: Tensor | None) -> Tensor:
        """Return what ``run`` computes of ``x`` and the others: weight, bias, an addend."""
        ctx.save_for_backward(x)
        ctx.parameters = versioned(others[:2])
        ctx.set_materialize_grads(False)
        return run()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Gradients:
        """Compute gradients from the ``FusedSave`` that stands in place of the input.

        SavedTensorError: they are to have a graph, and a parameter was changed in place.
        """
        if gradient is None:
            return (None,) * len(ctx.needs_input_grad)
        with without_torch_function():
            owned = not is_transforming(gradient) and holders_of(gradient) == sole_holders()
            (saved,) = saves_read_by(lambda: ctx.saved_tensors)
            held = saved.held
            assert isinstance(held, FusedSave)
            if torch.is_grad_enabled() or is_transforming(gradient):
                inputs = (*ctx.saved_tensors, *unchanged(ctx.parameters))
                return (None, *held.differentiable(gradient, inputs, ctx.needs_input_grad[1:]))
            if gradient.stride() != held.layout.stride or gradient.is_neg():
                gradient, owned = held.layout.empty().copy_(gradient), True
            return (None, *held.backward(gradient, ctx.needs_input_grad[1:], owned=owned))


Versioned = list[tuple[Tensor | None, int]]


def versioned(tensors: Sequence[Tensor | None]) -> Versioned:
    """Return tensors with their versions."""
    return [(each, 0 if each is None else each._version) for each in tensors]


def unchanged(found: Versioned) -> list[Tensor | None]:
    """Return the tensors; SavedTensorError if one was changed in place since."""
    if any(each is not None and each._version != version for each, version in found):
        raise SavedTensorError(
            "asked for a graph of gradients; a tensor that they depend on was changed in place "
            "since the forward pass; do that after the last backward pass"
        )
    return [each for each, _ in found]
