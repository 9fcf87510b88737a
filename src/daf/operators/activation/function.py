"""GELU and SiLU with one code that serves the activation and the layer behind it.

By itself a smooth activation holds a code of its derivative, and the layer behind it another one of
its result. Here the *input* x is coded once. Backward decodes a few blocks of it at a time,
computes the derivative there and writes the input's gradient, over the result's where nobody else
holds that. The layer behind derives its input as ``f(x)`` (``Term.derivation``). Where x is a
normalisation's result, that one's code serves here too.

Where the policy keeps the input, backward reads it where it lies, and the layer behind computes
``f(x)`` of it again, a chunk at a time: the result is held nowhere, and nothing errs.

Both uses of a code are of a function that is not linear. They are biased by about half its
curvature times the code's error, so ``shared_treatment`` asks for one bit more than the layer
behind would. Squared bias measured (unit Gaussian inputs), of derivative and result alike: 0.0002
of the square at 3 bits, 0.003 at 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from daf.codecs.layout import in_memory_order
from daf.codecs.scratch import Scratch
from daf.core.code_format import BLOCK_ELEMENTS, block_count
from daf.core.policy import Method, Treatment
from daf.operators.fused_function import FusedFunction, FusedSave
from daf.saved_tensors.packed_tensor import Kept, Rederived

# What is decoded is still in the cache when it is used. A GPU's is larger; never tuned on one.
_BLOCKS_AT_A_TIME = 512
_DEVICE_BLOCKS_AT_A_TIME = 1 << 15
LEAST_BITS = 2  # at one bit the squared bias of the derivative reaches 0.1 of its square


class FusedSmooth(FusedFunction):
    """The autograd function of a fused activation."""


def decoded_bytes_on(device: torch.device) -> int:
    """Return the most bytes of an activation's input that backward decodes at a time (float32)."""
    return 4 * BLOCK_ELEMENTS * _blocks_at_a_time(device)


def _blocks_at_a_time(device: torch.device) -> int:
    return _BLOCKS_AT_A_TIME if device.type == "cpu" else _DEVICE_BLOCKS_AT_A_TIME


class Smooth(NamedTuple):
    """An activation with f(0) = 0; ``approximate`` is GELU's."""

    name: str
    approximate: str = "none"

    def forward(self, x: Tensor) -> Tensor:
        """Return f(x), a new tensor."""
        if self.name == "gelu":
            return torch.ops.aten.gelu(x, approximate=self.approximate)  # type: ignore[no-any-return]
        return torch.ops.aten.silu(x)  # type: ignore[no-any-return]

    def apply_(self, x: Tensor) -> None:
        """Replace ``x`` by f(x)."""
        if self.name == "gelu":
            torch.ops.aten.gelu.out(x, approximate=self.approximate, out=x)
        else:
            torch.ops.aten.silu_(x)

    def backward(self, gradient: Tensor, x: Tensor, out: Tensor) -> None:
        """Write ``gradient * f'(x)``; ``out`` may be ``gradient``."""
        if self.name == "gelu":
            backward = torch.ops.aten.gelu_backward.grad_input
            backward(gradient, x, approximate=self.approximate, grad_input=out)
        else:
            torch.ops.aten.silu_backward.grad_input(gradient, x, grad_input=out)


def shared_treatment(linear: Treatment) -> Treatment | None:
    """Return the treatment of an input that also serves a layer coded by ``linear``, or None.

    It has one bit more, up to four: still fewer than a derivative code (two at least) and
    ``linear`` together, and with less error behind than ``linear`` alone up to three bits.
    """
    if linear.method is Method.ROTATED and linear.bits < 4:
        return replace(linear, bits=linear.bits + 1)
    return linear if linear.is_code else None


class SmoothHeld(FusedSave):
    """What a fused activation holds: its input, or how to derive it."""

    __slots__ = ("input", "smooth")

    def __init__(self, smooth: Smooth, held: Rederived | Kept) -> None:
        super().__init__(held.layout)
        self.smooth = smooth
        self.input = held

    def restore(self, scratch: Scratch) -> Tensor:
        """Return the activation's input."""
        return self.input.restore(scratch)

    def backward(
        self,
        gradient: Tensor,
        needs: Sequence[bool],  # noqa: ARG002 - one input, which needs its gradient
        *,
        owned: bool,
    ) -> tuple[Tensor | None, ...]:
        """Return the input's gradient."""
        written = gradient if owned else self.layout.empty()
        if isinstance(self.input, Kept):
            self.smooth.backward(gradient, self.input.restore(Scratch()), written)
            return (written,)
        flat, out = (in_memory_order(tensor) for tensor in (gradient, written))
        blocks, step = block_count(gradient.numel()), _blocks_at_a_time(self.layout.device)
        for first in range(0, blocks, step):
            x = self.input.restore_blocks(first, min(blocks, first + step))
            part = slice(first * BLOCK_ELEMENTS, first * BLOCK_ELEMENTS + x.numel())
            self.smooth.backward(flat[part], x, out[part])
        return (written,)
