"""Sensitivities predicted by a formula from one ordinary backward pass."""

import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from daf.core.code_format import BLOCK_ELEMENTS
from daf.torch_compat.compiled_modules import CompiledModules
from daf.torch_compat.modules import AnyBatchNorm, OwnHook

_NORMS = (AnyBatchNorm, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
_PRODUCT_DIMENSIONS = 2  # a weight of fewer is a scale or a bias


def product_weight(module: nn.Module) -> nn.Parameter | None:
    """Return the only matrix or kernel that a module itself owns and trains; else None."""
    trained = (each for each in module.parameters(recurse=False) if each.requires_grad)
    found = [each for each in trained if each.dim() >= _PRODUCT_DIMENSIONS]
    return found[0] if len(found) == 1 else None


@torch.no_grad()
def energy_beside_means(x: Tensor) -> float:
    """Return the squared length of x, less the mean of each block of 256 elements."""
    flat = x.detach().reshape(-1).double()
    whole = flat.numel() // BLOCK_ELEMENTS * BLOCK_ELEMENTS
    blocks, tail = flat[:whole].view(-1, BLOCK_ELEMENTS), flat[whole:]
    energy = float((blocks - blocks.mean(1, keepdim=True)).square().sum())
    return energy + (float((tail - tail.mean()).square().sum()) if tail.numel() else 0.0)


class PriorObserver:
    """Watches a pass: by path, modules' variances per error, and how many means norms take."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.by_module: dict[str, float] = defaultdict(float)
        self.means: dict[str, int] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch what runs inside; backward may run inside or after it."""
        with ExitStack() as hooks:
            for path, module in CompiledModules(self._model).hookable():
                if product_weight(module) is not None or isinstance(module, _NORMS):
                    note = OwnHook(partial(self._note, path))
                    hooks.callback(module.register_forward_hook(note).remove)
            yield

    def _note(self, path: str, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if not inputs or not isinstance(output, Tensor) or not output.requires_grad:
            return
        factor = _error_per_gradient(module, inputs[0])
        if isinstance(module, _NORMS):
            self.means[path] = _means(module, output)

        def add(gradient: Tensor) -> None:
            energy = float(gradient.detach().double().square().sum())
            self.by_module[path] += factor * energy

        output.register_hook(add)  # type: ignore[no-untyped-call]


def _means(module: Any, made: Tensor) -> int:
    if isinstance(module, (AnyBatchNorm, nn.GroupNorm)):
        return made.shape[1] if isinstance(module, AnyBatchNorm) else len(made) * module.num_groups
    return made.numel() // int(math.prod(module.normalized_shape))


def _error_per_gradient(module: nn.Module, x: Any) -> float:
    if isinstance(module, _NORMS):
        return 1.0  # the normalised value's energy per element
    weight = product_weight(module)
    if weight is None or not isinstance(x, Tensor) or not x.is_floating_point():
        return 0.0
    outputs = getattr(module, "out_channels", None) or getattr(module, "out_features", None)
    # An element of dY enters so many of W's gradient, with one of x each.
    fan_in = weight.numel() / (outputs or weight.shape[-1])
    return fan_in * energy_beside_means(x) / max(1, x.numel())
