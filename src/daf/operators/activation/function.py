"""GELU and SiLU with one code that serves the activation and the layer behind it.

By itself a smooth activation holds a code of its derivative, and the layer
behind it another one of its result. Here the *input* x is coded once: backward
decodes a few blocks of it at a time, computes the derivative there and writes
the input's gradient, over the result's where nobody else holds that; the layer
behind is told that its input was ``f(x)`` (``Term.derivation``). Where x itself is
a normalisation's result, that one's code serves here too.

Where the input is held as it is (a policy that keeps it), backward reads it where
it lies, and the layer behind computes ``f(x)`` of it again, a chunk at a time: what
PyTorch would hold beside it is held nowhere, and nothing errs.

Of a code both uses are of a function that is not linear, so they are biased by about half
its curvature times the code's error: ``shared_treatment`` asks for one bit more
than the layer behind would. At 3 bits the squared bias measured (unit Gaussian inputs) is
0.0002 of the square, of derivative and result alike; at 2 bits 0.003. Second
derivatives are refused by autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from daf.codecs.codes import Values
from daf.codecs.layout import in_memory_order
from daf.codecs.scratch import Scratch
from daf.core.code_format import BLOCK_ELEMENTS, block_count
from daf.core.policy import Method, Treatment
from daf.kernels.normalisation import Channels
from daf.operators.norms.passes import ComputedValues
from daf.saved_tensors.packed_tensor import Kept, PackedTensor, Rederived, asked_for
from daf.torch_compat.autograd_graph import without_torch_function
from daf.torch_compat.ownership import holders_of, sole_holders

# What is decoded is still in the cache when it is used. A GPU's is larger; never tuned on one.
_BLOCKS_AT_A_TIME = 512
_DEVICE_BLOCKS_AT_A_TIME = 1 << 15
LEAST_BITS = 2  # at one bit the squared bias of the derivative reaches 0.1 of its square


def decoded_bytes_on(device: torch.device) -> int:
    """The most that backward decodes of an activation's input at a time (float32)."""
    return 4 * BLOCK_ELEMENTS * _blocks_at_a_time(device)


def _blocks_at_a_time(device: torch.device) -> int:
    return _BLOCKS_AT_A_TIME if device.type == "cpu" else _DEVICE_BLOCKS_AT_A_TIME


class Smooth(NamedTuple):
    """An activation with f(0) = 0; ``approximate`` is GELU's."""

    name: str
    approximate: str = "none"

    def forward(self, x: Tensor) -> Tensor:
        """A new tensor."""
        if self.name == "gelu":
            return torch.ops.aten.gelu(x, approximate=self.approximate)  # type: ignore[no-any-return]
        return torch.ops.aten.silu(x)  # type: ignore[no-any-return]

    def apply_(self, x: Tensor) -> None:
        """In place."""
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
    """For an input that also serves a layer that would code by ``linear``; None: it cannot.

    One bit more, up to four: still fewer than a derivative code (two at least) and ``linear``
    together, and with less error behind than ``linear`` alone up to three bits.
    """
    if linear.method is Method.ROTATED and linear.bits < 4:
        return replace(linear, bits=linear.bits + 1)
    return linear if linear.is_code else None


class SmoothHeld(PackedTensor):
    """What a fused activation holds: its input, or how to derive it."""

    __slots__ = ("input", "smooth")

    def __init__(self, smooth: Smooth, held: Rederived | Kept) -> None:
        super().__init__()
        self.smooth = smooth
        self.input = held

    def restore(self, scratch: Scratch) -> Tensor:
        """The activation's input."""
        return self.input.restore(scratch)

    def backward(self, gradient: Tensor, *, owned: bool) -> Tensor:
        """The input's gradient; ``owned``: nobody else holds ``gradient``."""
        layout = self.input.layout
        if gradient.stride() != layout.stride or gradient.is_neg():
            gradient, owned = layout.empty().copy_(gradient), True
        written = gradient if owned else layout.empty()
        if isinstance(self.input, Kept):
            self.smooth.backward(gradient, self.input.restore(Scratch()), written)
            return written
        given, found = (in_memory_order(tensor) for tensor in (gradient, written))
        blocks, step = block_count(gradient.numel()), _blocks_at_a_time(layout.device)
        for first in range(0, blocks, step):
            x = self.input.restore_blocks(first, min(blocks, first + step))
            part = slice(first * BLOCK_ELEMENTS, first * BLOCK_ELEMENTS + x.numel())
            self.smooth.backward(given[part], x, found[part])
        return written


def values_of(kept: Kept, x: Tensor) -> Values:
    """What is held as it is, for whoever derives something from it; nothing is held for that."""
    unchanged = Channels.times(1.0, x.device)
    return ComputedValues(lambda: kept.restore(Scratch()), x.numel(), unchanged)


class FusedSmooth(torch.autograd.Function):
    """The operator. Whoever applies it settles the one save it makes, that of the input."""

    reads_only_what_it_saved = True  # see parameter_reads

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Callable[[], Tensor]) -> Tensor:
        """What ``run`` computes of it."""
        ctx.save_for_backward(x)
        ctx.set_materialize_grads(False)
        return run()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None]:
        """From what is held in the place of the input."""
        if gradient is None:
            return None, None
        with without_torch_function():
            owned = holders_of(gradient) == sole_holders()
            saved = asked_for(lambda: ctx.saved_tensors)
            assert saved is not None
            assert isinstance(saved.held, SmoothHeld)
            return saved.held.backward(gradient, owned=owned), None
