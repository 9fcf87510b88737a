"""Probing an optimizer: steps of another like it on made-up parameters."""

from __future__ import annotations

import math
from inspect import signature
from typing import Any

import torch
from torch import nn

from daf.torch_compat import compiler

_SIZES = (1e-2, 10.0)  # of gradients: well above what Adam's kin add to their roots by default
_SHAPE = (4, 4)  # some optimizers step matrices only
_WARM_UP_STEPS = 7  # RAdam's first five follow the gradient as it is


def trial_step(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], elements: int, count: int = 1
) -> torch.optim.Optimizer | None:
    """An optimizer of the same class and settings that has made one step of small parameters.

    Args:
        optimizer: whose class it has.
        group: whose settings and device it has.
        elements: of each parameter, which begins as zeros.
        count: of parameters.

    Returns:
        None where its constructor takes something else, or it makes no step of such parameters.
    """
    try:
        trial = _made(optimizer, group, [torch.zeros(elements) for _ in range(count)])
        for probe in trial.param_groups[0]["params"]:
            probe.grad = torch.ones_like(probe)
        compiler.step(trial)
    except (TypeError, ValueError, RuntimeError):
        return None
    return trial


def divides_by_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """True if its steps are about as long whatever the size of gradients, as Adam's are.

    Found by trials whose gradients differ a thousandfold; False where there can be none, as for
    an optimizer that takes what no trial knows of.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)  # a wrapper's own, as Accelerate has
    groups = (each for each in optimizer.param_groups if each["params"])
    return any(_divides(optimizer, group) for group in groups)


def _divides(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    smaller, larger = _SIZES
    usual, more = (_moved(optimizer, group, size) for size in _SIZES)
    return 0.0 < more < math.sqrt(larger / smaller) * usual


def _moved(optimizer: torch.optim.Optimizer, group: dict[str, Any], gradient: float) -> float:
    """The length of a step after a few others; 0 where none is made."""
    # A schedule may have begun with a rate of 0, which moves nothing.
    changed = {"lr": 1.0, "differentiable": False}
    try:
        trial = _made(optimizer, group, [torch.ones(_SHAPE)], **changed)
        (probe,) = trial.param_groups[0]["params"]
        before = probe.detach().clone()
        for _ in range(1 + _WARM_UP_STEPS):
            before.copy_(probe.detach())
            probe.grad = torch.full_like(probe, gradient)
            compiler.step(trial)
        return float((probe.detach() - before).abs().max())
    except Exception:  # a user's own optimizer may raise anything: it is taken as it always was
        return 0.0


def _made(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    values: list[torch.Tensor],
    **changed: Any,
) -> torch.optim.Optimizer:
    """One of the same class and settings, but for what is changed, on parameters of those values.

    Raises:
        TypeError, ValueError, RuntimeError: its constructor takes something else.
    """
    device = group["params"][0].device
    settings = {name: group[name] for name in optimizer.defaults if name in group}
    settings |= {name: each for name, each in changed.items() if settings.get(name) is not None}
    taken = signature(type(optimizer)).parameters
    if not any(each.kind is each.VAR_KEYWORD for each in taken.values()):
        settings = {name: value for name, value in settings.items() if name in taken}
    probes = [nn.Parameter(value.to(device)) for value in values]
    return type(optimizer)(probes, **settings)
