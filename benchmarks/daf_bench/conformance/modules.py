"""PyTorch's module database: each module that gives a differentiable output while training.

Two cases a module. In ``gated`` ones it works on samples of its own, which are parameters, once for
each example of the batch. In ``batch`` ones its sample, repeated along the first dimension, is the
batch, as a user would feed it; that dimension may well not be the examples'.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from daf_bench.conformance.case import Case, NotApplicableError, Work
from daf_bench.conformance.operators import EXAMPLES, FEATURES, WIDTH, differentiable, weighted

SAMPLES, MOST_SAMPLES_SEEN, MOST_ELEMENTS = 2, 24, 16384


def module_cases() -> list[Case]:
    """Return two cases for every module.

    Raises:
        ImportError: the database's own dependencies are not installed.
    """
    from torch.testing._internal.common_modules import module_db

    found: dict[str, Case] = {}
    for info in module_db:
        for style, build in (("gated", _gated), ("batch", _batch)):
            name = f"modules/{info.name}/{style}"
            found.setdefault(name, Case(name, partial(build, info)))
    return list(found.values())


Sample = tuple[nn.Module, Any, Any]


def _samples(info: Any) -> list[Sample]:
    """Return modules with the arguments of a forward pass."""
    drawn = info.module_inputs_func(
        info, device="cpu", dtype=torch.float32, requires_grad=False, training=True
    )
    usable = []
    for each in islice((each for each in drawn if each.forward_input), MOST_SAMPLES_SEEN):
        made = each.constructor_input
        module = info.module_cls(*made.args, **made.kwargs).train()
        arguments = (each.forward_input.args, each.forward_input.kwargs)
        if _is_usable(module, arguments):
            usable.append((module, *arguments))
    if not usable:
        raise NotApplicableError("no sample that fits")
    return usable


def _dimensions(sample: Sample) -> int:
    """Return the dimensions of the first argument: samples without a batch have one fewer."""
    return next(t.dim() for t in _pytree.tree_leaves(sample[1:]) if isinstance(t, Tensor))


def _is_usable(module: nn.Module, arguments: Any) -> bool:
    leaves = [leaf for leaf in _pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]
    if not any(leaf.is_floating_point() for leaf in leaves):
        return any(True for _ in module.parameters()) and bool(leaves)
    return all(leaf.numel() <= MOST_ELEMENTS for leaf in leaves)


def _gated(info: Any) -> Work:
    samples = _samples(info)
    step = max(1, len(samples) // SAMPLES)
    model = GatedModules([GatedModule(*sample) for sample in samples[::step][:SAMPLES]])
    return Work(model, torch.randn(EXAMPLES, FEATURES), lambda model, batch: model(batch).mean())


class GatedModule(nn.Module):
    """A module on arguments whose floats are parameters; ``gate`` scales the first of them."""

    def __init__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        super().__init__()
        self.module = module
        leaves, self._spec = _pytree.tree_flatten((args, kwargs))
        self._places = [place for place, leaf in enumerate(leaves) if _is_float(leaf)][:1]
        self.owned = nn.ParameterList(nn.Parameter(leaves[place].clone()) for place in self._places)
        self._leaves = leaves

    def forward(self, gate: Tensor) -> Tensor:
        """Return a scalar of the module's outputs."""
        leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
        for place, parameter in zip(self._places, self.owned, strict=True):
            leaves[place] = parameter * gate
        args, kwargs = _pytree.tree_unflatten(leaves, self._spec)
        return weighted(differentiable(self.module(*args, **kwargs)))


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


class GatedModules(nn.Module):
    """Examples [N, features] to one number each, through modules on samples of their own."""

    def __init__(self, calls: list[GatedModule]) -> None:
        super().__init__()
        self.calls = nn.ModuleList(calls)
        self.before = nn.Sequential(
            nn.Linear(FEATURES, WIDTH), nn.LayerNorm(WIDTH), nn.SiLU(), nn.Linear(WIDTH, len(calls))
        )

    def forward(self, examples: Tensor) -> Tensor:
        """Return one number for each example [N]."""
        gates = 1.0 - 0.1 * torch.sigmoid(self.before(examples))
        rows = [
            torch.stack([call(gate) for call, gate in zip(self.calls, row, strict=True)]).sum()
            for row in gates
        ]
        return torch.stack(rows)


def _batch(info: Any) -> Work:
    module, args, kwargs = max(_samples(info), key=_dimensions)
    leaves, spec = _pytree.tree_flatten((args, kwargs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    size = leaves[places[0]].shape[0] if leaves[places[0]].dim() else 0
    if not size:
        raise NotApplicableError("its sample has no first dimension")
    batch = [_repeated(leaves[place], size) for place in places]

    def call(model: nn.Module, tensors: list[Tensor]) -> Any:
        values = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            values[place] = tensor
        called, named = _pytree.tree_unflatten(values, spec)
        return model(*called, **named)

    return Work(ScaledModule(module), batch, partial(_mean_output, call))


def _mean_output(call: Callable[..., Any], model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Return the mean of squares of all outputs, which weighs no example more than another."""
    outputs = differentiable(call(model, batch))
    return torch.stack([(each.float() + 0.5).square().mean() for each in outputs]).sum()


def _repeated(tensor: Tensor, size: int) -> Tensor:
    """Return a tensor repeated to eight examples, floats made to differ, if examples are first."""
    if tensor.dim() == 0 or tensor.shape[0] != size:
        return tensor
    grown = torch.cat([tensor] * -(-EXAMPLES // size))
    if not grown.is_floating_point():
        return grown
    scale = torch.linspace(0.9, 1.1, grown.shape[0], dtype=grown.dtype)
    return grown * scale.view(-1, *[1] * (grown.dim() - 1))


class ScaledModule(nn.Module):
    """A module whose first float input is scaled by a parameter, so that it gets a gradient."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module returns."""
        leaves, spec = _pytree.tree_flatten((args, kwargs))
        place = next((i for i, leaf in enumerate(leaves) if _is_float(leaf)), None)
        if place is not None:
            leaves[place] = leaves[place] * self.scale
        args, kwargs = _pytree.tree_unflatten(leaves, spec)
        return self.module(*args, **kwargs)
