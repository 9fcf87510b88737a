"""Derivative codes for smooth activations, in terms of the tensor that PyTorch saves.

PyTorch's own backward reads the saved tensor and computes h'. A saved value at which h' *is* the
interval's level, the mean of h' there, represents it: it exists where h' is continuous
(mean value theorem).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from daf.core.code_tables import derivative_table
from daf.memory.glibc import return_free_memory
from daf.torch_compat.autograd_graph import saved_value, without_torch_function

PLANNED_BITS = (2, 3, 4)  # of ``plan.coded_policy``
_Function = Callable[[Tensor], Tensor]
_RANGE = 100.0  # weighted range of inputs, as in the tables' source
_PARAMETERS = {
    "GeluBackward0": ("approximate",),
    "SoftplusBackward0": ("beta", "threshold"),
    "EluBackward0": ("alpha", "scale", "input_scale"),
    "CeluBackward0": ("alpha",),
}
_SAVES_RESULT = frozenset({"SigmoidBackward0", "TanhBackward0"})


class SmoothCode(NamedTuple):
    """Borders between intervals of the saved tensor, and a saved value for each interval."""

    borders: Tensor  # (2**bits - 1,) float32, ascending
    representatives: Tensor  # (2**bits,) float32


def smooth_code(node: Any, bits: int) -> SmoothCode | None:
    """Return the code for an activation's node; None where no sound one exists."""
    name = node.name()
    with (
        without_torch_function(),
        torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
        torch.autocast("cpu", enabled=False),
        torch.enable_grad(),
    ):
        slots = _PARAMETERS.get(name, ())
        found = (saved_value(node, slot) for slot in slots)
        parameters = tuple(each if isinstance(each, str) else float(each) for each in found)
        _find_planned(name, parameters)
        return _code(name, parameters, bits)


_ACTIVATIONS: Mapping[str, Callable[..., Tensor]] = {
    "GeluBackward0": lambda x, approximate: F.gelu(x, approximate=approximate),
    "SiluBackward0": F.silu,
    "MishBackward0": F.mish,
    "HardswishBackward0": F.hardswish,
    "SigmoidBackward0": torch.sigmoid,
    "TanhBackward0": torch.tanh,
    "SoftplusBackward0": F.softplus,
    "CeluBackward0": F.celu,
    "EluBackward0": torch.ops.aten.elu,
}


@cache
def _find_planned(name: str, parameters: tuple[Any, ...]) -> None:
    """Find all planned widths' codes at once, before a planned step: each takes some 20 MB."""
    for bits in PLANNED_BITS:
        _code(name, parameters, bits)
        return_free_memory()


@cache
def _code(name: str, parameters: tuple[Any, ...], bits: int) -> SmoothCode | None:

    def function(x: Tensor) -> Tensor:
        return _ACTIVATIONS[name](x, *parameters)

    def activation(x: NDArray[np.float64]) -> NDArray[np.float64]:
        values: NDArray[np.float64] = function(torch.from_numpy(np.ascontiguousarray(x))).numpy()
        return values

    found = derivative_table(activation, bits, -_RANGE, _RANGE)
    borders, levels = (torch.from_numpy(part.astype(np.float64)) for part in found)
    ends = torch.cat([torch.tensor([-_RANGE]), borders, torch.tensor([_RANGE])])
    inputs = _where_derivative_is(function, levels, ends)
    if inputs is None:
        return None
    if name in _SAVES_RESULT:
        borders, inputs = function(borders), function(inputs)
    return SmoothCode(borders.float(), inputs.float())


def _where_derivative_is(function: _Function, levels: Tensor, ends: Tensor) -> Tensor | None:
    """Return for each interval an input whose derivative is the level; None if one lacks it."""
    found = []
    for level, low, high in zip(levels, ends[:-1], ends[1:], strict=True):
        grid = torch.linspace(float(low), float(high), 200_001, dtype=torch.float64)
        gap = _derivative(function, grid) - level
        best = int(gap.abs().argmin())
        left, right = max(best - 1, 0), min(best + 1, len(grid) - 1)
        if gap[left] * gap[right] < 0:
            root = _bisect(function, level, grid[left], grid[right])
        elif abs(gap[best]) < 1e-6:
            root = grid[best]
        else:
            return None
        if abs(_derivative(function, root) - level) > 1e-4:
            return None  # the derivative jumps over the level
        found.append(root)
    return torch.stack(found)


def _bisect(function: _Function, level: Tensor, low: Tensor, high: Tensor) -> Tensor:
    rising = _derivative(function, high) > level
    for _ in range(60):
        middle = 0.5 * (low + high)
        if (_derivative(function, middle) > level) == rising:
            high = middle
        else:
            low = middle
    return 0.5 * (low + high)


def _derivative(function: _Function, x: Tensor) -> Tensor:
    x = x.detach().clone().requires_grad_()
    (slope,) = torch.autograd.grad(function(x).sum(), x)
    return slope
