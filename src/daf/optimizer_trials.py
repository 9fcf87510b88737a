"""What an optimizer does, found out by one step of another like it on made-up parameters."""

from __future__ import annotations

import math
from inspect import signature
from typing import Any

import torch
from torch import nn

from daf.memory import compiler

_LARGER = 1000.0
_ELEMENTS = 16
_WARM_UP_STEPS = 7  # RAdam's first five follow the gradient as it is


def trial_step(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    elements: int,
    count: int = 1,
    *,
    gradient: float = 1.0,
    **changed: Any,
) -> torch.optim.Optimizer | None:
    """An optimizer of the same class and settings that has made one step of small parameters.

    Args:
        optimizer: whose class it has.
        group: whose settings and device it has.
        elements: of each parameter, which begins as zeros.
        count: of parameters.
        gradient: every element's.
        changed: settings that are to be others.

    Returns:
        None where its constructor takes something else, or it makes no step of such parameters.
    """
    device = group["params"][0].device
    settings = {name: group[name] for name in optimizer.defaults if name in group}
    settings |= {name: value for name, value in changed.items() if name in settings}
    taken = signature(type(optimizer)).parameters
    if not any(each.kind is each.VAR_KEYWORD for each in taken.values()):
        settings = {name: value for name, value in settings.items() if name in taken}
    try:
        probes = [nn.Parameter(torch.zeros(elements, device=device)) for _ in range(count)]
        for probe in probes:
            probe.grad = torch.full_like(probe, gradient)
        trial = type(optimizer)(probes, **settings)
        compiler.step(trial)
    except (TypeError, ValueError, RuntimeError):
        return None
    return trial


def divides_by_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Does it step about as far whatever the size of gradients, as Adam and its kin do?

    Found by two trials whose gradients differ a thousandfold; False where there can be none.
    """
    group = next((each for each in optimizer.param_groups if each["params"]), None)
    if group is None:
        return False
    usual, larger = (_moved(optimizer, group, size) for size in (1.0, _LARGER))
    return 0.0 < larger < math.sqrt(_LARGER) * usual


def _moved(optimizer: torch.optim.Optimizer, group: dict[str, Any], gradient: float) -> float:
    """How far a step goes after a few others."""
    # A schedule may have begun with a rate of 0, which moves nothing.
    trial = trial_step(optimizer, group, _ELEMENTS, gradient=gradient, lr=1.0)
    if trial is None:
        return 0.0
    (probe,) = trial.param_groups[0]["params"]
    before = probe.detach().clone()
    for _ in range(_WARM_UP_STEPS):
        before.copy_(probe.detach())
        probe.grad = torch.full_like(probe, gradient)
        compiler.step(trial)
    return float((probe.detach() - before).abs().max())
