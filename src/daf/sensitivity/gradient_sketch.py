"""Gradients in a few hundred numbers per parameter, from which distances can still be read.

A count sketch (Charikar, Chen and Farach-Colton, ICALP 2002): every element gets a sign from a
fixed seed and is added to one of ``buckets`` sums. The sketch is linear. Its squared length is an
unbiased estimate of the gradient's, with a relative variance of at most 2 / ``buckets``.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor, nn

from daf.saved_tensors.sites import mix_key

BUCKETS = 509  # prime, so that no stride of a weight's shape falls into the same buckets
_ROWS_AT_ONCE = 2048
_SIGN_SEED = 0x5EED


class GradientSketcher:
    """Sketches gradients of some parameters; the same element has the same sign every time."""

    def __init__(self, parameters: Sequence[nn.Parameter], buckets: int = BUCKETS) -> None:
        self.parameters = tuple(parameters)
        self._buckets = buckets

    @torch.no_grad()
    def fold(self, index: int, gradient: Tensor) -> Tensor:
        """Return the (buckets,) float64 sketch of parameter ``index``'s gradient, by chunks."""
        dense = gradient.to_dense() if gradient.layout is not torch.strided else gradient
        flat = dense.detach().reshape(-1)
        sums = torch.zeros(self._buckets, dtype=torch.float64)
        if flat.numel() <= self._buckets:
            sums[: flat.numel()] = flat.cpu()
            return sums
        random = torch.Generator().manual_seed(mix_key(_SIGN_SEED, index))
        for chunk in torch.split(flat, _ROWS_AT_ONCE * self._buckets):
            signs = torch.randint(0, 2, (chunk.numel(),), generator=random, dtype=torch.int8)
            signed = chunk.cpu().double() * signs.mul_(2).sub_(1)
            rows = -(-signed.numel() // self._buckets)
            padded = nn.functional.pad(signed, (0, rows * self._buckets - signed.numel()))
            sums += padded.view(rows, self._buckets).sum(0)
        return sums

    def gradient_sketch(self, loss: Tensor, elements: Tensor | None = None) -> Tensor:
        """Return (parameters, buckets) float64; holds one parameter's gradient at a time.

        ``grad`` is not touched, and hooks on accumulation do not run. ``elements``: (parameters,),
        receives how many elements have a gradient; rows of a table not looked up have none.
        """
        sketch = torch.zeros(len(self.parameters), self._buckets, dtype=torch.float64)

        def take(index: int, gradient: Tensor) -> Tensor:
            sketch[index] += self.fold(index, gradient)
            if elements is not None:
                elements[index] = gradient.count_nonzero()
            return gradient.new_zeros(()).expand(gradient.shape)  # frees the gradient itself

        with ExitStack() as hooks:
            for index, each in enumerate(self.parameters):
                hook = each.register_hook(partial(take, index))  # type: ignore[no-untyped-call]
                hooks.callback(hook.remove)
            torch.autograd.grad(loss, self.parameters, allow_unused=True)
        return sketch


def sample_variance(sketches: Sequence[Tensor]) -> Tensor:
    """Return (parameters, buckets): unbiased variance of every bucket over two or more sketches."""
    return torch.stack(list(sketches)).var(0)
