"""The autograd function of every fused operator, and what it holds in place of its input."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from daf.codecs.layout import Layout
from daf.saved_tensors.packed_tensor import PackedTensor, saves_read_by
from daf.torch_compat.autograd_graph import without_torch_function
from daf.torch_compat.ownership import holders_of, sole_holders


class FusedSave(PackedTensor):
    """What a fused operator holds in place of its input; backward computes gradients from it."""

    __slots__ = ("layout",)

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.layout = layout

    @abstractmethod
    def backward(
        self, gradient: Tensor, needs: Sequence[bool], *, owned: bool
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of the operator's inputs; None where ``needs`` is False.

        Args:
            gradient: of the result, with the layout's strides.
            needs: one entry for each input.
            owned: nobody else holds ``gradient``, so that it may be overwritten.
        """


class FusedFunction(torch.autograd.Function):
    """A fused operator whose one save, its input, is settled by ``OperatorContext.settle``.

    A subclass gives the autograd node its name. Autograd refuses second derivatives.
    """

    reads_only_what_it_saved = True  # parameters are copied: see parameter_reads

    @staticmethod
    def forward(ctx: Any, run: Callable[[], Tensor], x: Tensor, *_others: Tensor | None) -> Tensor:
        """Return what ``run`` computes of ``x`` and the others."""
        ctx.save_for_backward(x)
        ctx.set_materialize_grads(False)
        return run()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        """Compute gradients from the ``FusedSave`` that stands in place of the input."""
        if gradient is None:
            return (None,) * len(ctx.needs_input_grad)
        with without_torch_function():
            owned = holders_of(gradient) == sole_holders()
            (saved,) = saves_read_by(lambda: ctx.saved_tensors)
            held = saved.held
            assert isinstance(held, FusedSave)
            if gradient.stride() != held.layout.stride or gradient.is_neg():
                gradient, owned = held.layout.empty().copy_(gradient), True
            return (None, *held.backward(gradient, ctx.needs_input_grad[1:], owned=owned))
