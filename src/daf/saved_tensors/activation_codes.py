"""Derivative codes for smooth activations, in terms of the tensor that PyTorch saves.

Levels cover the whole range of h' in equal steps, and h' is rounded to one of its two neighbours at
random, so that a code adds noise and no bias but that of the lines by which h' is computed.
PyTorch's own backward reads the saved tensor and computes h'. A saved value at which h' *is* the
level represents it: it exists where h' is continuous.
"""

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from daf.core.code_tables import derivative_lines
from daf.memory.glibc import return_free_memory
from daf.torch_compat.autograd_graph import saved_value, without_torch_function

PLANNED_BITS = (2, 3, 4)  # of ``plan.coded_policy``
_Function = Callable[[Tensor], Tensor]
# Inputs that lines are fitted to, a thousand times denser in the middle than at the ends.
_RANGE, _BEND, _PLACES = 100.0, 7.6, 25_600
_SAVES_RESULT = frozenset({"SigmoidBackward0", "TanhBackward0"})


class SmoothCode(NamedTuple):
    """How a saved value becomes a number of steps of h', and a saved value for each number."""

    lines: Tensor  # (47,) float32: ``code_tables.derivative_lines``
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
        found = (saved_value(node, slot) for slot in _ACTIVATIONS[name][1])
        parameters = tuple(each if isinstance(each, str) else float(each) for each in found)
        _find_planned(name, parameters)
        return _code(name, parameters, bits)


# By node: the function, and its parameters as the node saves them.
_ACTIVATIONS: Mapping[str, tuple[Callable[..., Tensor], tuple[str, ...]]] = {
    "GeluBackward0": (lambda x, approximate: F.gelu(x, approximate=approximate), ("approximate",)),
    "SiluBackward0": (F.silu, ()),
    "MishBackward0": (F.mish, ()),
    "HardswishBackward0": (F.hardswish, ()),
    "SigmoidBackward0": (torch.sigmoid, ()),
    "TanhBackward0": (torch.tanh, ()),
    "SoftplusBackward0": (F.softplus, ("beta", "threshold")),
    "CeluBackward0": (F.celu, ("alpha",)),
    "EluBackward0": (torch.ops.aten.elu, ("alpha", "scale", "input_scale")),
}


@cache
def _find_planned(name: str, parameters: tuple[Any, ...]) -> None:
    """Find all planned widths' codes at once, before a planned step: each takes some 7 MB."""
    for bits in PLANNED_BITS:
        _code(name, parameters, bits)
        return_free_memory()


@cache
def _code(name: str, parameters: tuple[Any, ...], bits: int) -> SmoothCode | None:
    def function(x: Tensor) -> Tensor:
        return _ACTIVATIONS[name][0](x, *parameters)

    bent = np.sinh(_BEND * np.linspace(-1.0, 1.0, _PLACES)) / math.sinh(_BEND)
    grid = torch.from_numpy(_RANGE * bent)
    slopes = _derivative(function, grid)
    saved = function(grid) if name in _SAVES_RESULT else grid
    low, step = slopes.min(), (slopes.max() - slopes.min()) / (2**bits - 1)
    apart = saved.float().diff(prepend=torch.tensor([-math.inf])) > 0
    steps = ((slopes - low) / step)[apart]
    lines = derivative_lines(saved.float()[apart].double().numpy(), steps.numpy())
    inputs = _where_derivative_is(function, low + step * torch.arange(2**bits), grid, slopes)
    if inputs is None:
        return None
    if name in _SAVES_RESULT:
        inputs = function(inputs)
    return SmoothCode(torch.from_numpy(lines).float(), inputs.float())


def _where_derivative_is(
    function: _Function, levels: Tensor, grid: Tensor, slopes: Tensor
) -> Tensor | None:
    """Return for each level an input whose derivative it is; None if one has none."""
    found = []
    for level in levels:
        gap = slopes - level
        best = int(gap.abs().argmin())
        left, right = max(best - 1, 0), min(best + 1, len(grid) - 1)
        root = grid[best]
        if gap[left] * gap[right] < 0:
            root = _bisect(function, level, grid[left], grid[right])
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
