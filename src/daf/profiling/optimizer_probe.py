"""Probes an optimizer by steps of another like it on made-up parameters."""

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
    """Return an optimizer of the same class and ``group``'s settings after one made-up step.

    It steps ``count`` parameters of ``elements`` zeros on the group's device. None where its
    constructor takes something else, or the step fails.
    """
    try:
        trial = _made(optimizer, group, [torch.zeros(elements).float() for _ in range(count)])
        for probe in trial.param_groups[0]["params"]:
            probe.grad = torch.ones_like(probe)
        compiler.step(trial)
    except Exception:  # a user's own optimizer may raise anything
        return None
    return trial


def divides_by_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """True if steps are about as long whatever the gradients' size, as Adam's are.

    Found by trials whose gradients differ a thousandfold; False where no trial can run.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)  # Accelerate wraps optimizers
    groups = (each for each in optimizer.param_groups if each["params"])
    return any(_divides(optimizer, group) for group in groups)


def _divides(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    smaller, larger = _SIZES
    usual, more = (_moved(optimizer, group, size) for size in _SIZES)
    return 0.0 < more < math.sqrt(larger / smaller) * usual


def _moved(optimizer: torch.optim.Optimizer, group: dict[str, Any], gradient: float) -> float:
    """Return the length of a step after a few others; 0 where none is made."""
    # A schedule may have begun with a rate of 0, which moves nothing.
    changed = {"lr": 1.0, "differentiable": False}
    try:
        trial = _made(optimizer, group, [torch.ones(_SHAPE, dtype=torch.float32)], **changed)
        (probe,) = trial.param_groups[0]["params"]
        before = probe.detach().clone()
        for _ in range(1 + _WARM_UP_STEPS):
            before.copy_(probe.detach())
            probe.grad = torch.full_like(probe, gradient)
            compiler.step(trial)
        return float((probe.detach() - before).abs().max())
    except Exception:  # a user's own optimizer may raise anything: assume plain steps
        return 0.0


def _made(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    values: list[torch.Tensor],
    **changed: Any,
) -> torch.optim.Optimizer:
    """Return one of the same class and settings but ``changed``, on parameters of these values."""
    # Raises TypeError, ValueError or RuntimeError if its constructor takes something else.
    device = group["params"][0].device
    settings = {name: group[name] for name in optimizer.defaults if name in group}
    settings |= {name: each for name, each in changed.items() if settings.get(name) is not None}
    taken = signature(type(optimizer)).parameters
    if not any(each.kind is each.VAR_KEYWORD for each in taken.values()):
        settings = {name: value for name, value in settings.items() if name in taken}
    made = type(optimizer)([nn.Parameter(value.to(device)) for value in values], **settings)
    getattr(made, "train", lambda: None)()  # schedule-free ones step in this mode only
    return made
