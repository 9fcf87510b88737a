"""Keep torch's compiler out of a process that does not compile.

The first ``torch.optim.Optimizer`` of a process imports ``torch._dynamo``,
which holds some 70 MB from then on (measured with torch 2.13), although an
eager step never uses it: a seventh of a 512 MB device. The import hangs on the
optimizer's decorators. ``torch._disable_dynamo`` looks for an attribute of the
function before it imports; the decorator of ``step`` is stepped past. Where
torch is built otherwise, or the compiler is loaded already, everything goes
the ordinary way.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

_COMPILER = "torch._dynamo"
_CACHED_FUNCTION = "__dynamo_disable"  # torch/_compile.py looks here before it imports
_DECORATED = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")


def is_loaded() -> bool:
    """Whether torch's compiler is in this process already."""
    return _COMPILER in sys.modules


def keep_out() -> bool:
    """Let optimizers be made without importing the compiler; call it before the first one.

    Returns:
        Whether that is so from now on. False changes nothing.
    """
    wrapped = [_undecorated(getattr(torch.optim.Optimizer, name)) for name in _DECORATED]
    if is_loaded() or None in wrapped:
        return False
    for function in wrapped:
        if not hasattr(function, _CACHED_FUNCTION):
            setattr(function, _CACHED_FUNCTION, function)
    return True


def step(optimizer: torch.optim.Optimizer) -> None:
    """``optimizer.step()``, without importing the compiler for it.

    The same arithmetic: the function that the decorators wrap is called with
    gradients off. An optimizer with step hooks, a patched ``step`` (learning
    rate schedulers do that) or ``differentiable`` is stepped the ordinary way.
    """
    eager = None if is_loaded() or _is_special(optimizer) else _eager_step(optimizer)
    if eager is None:
        optimizer.step()
        return
    with torch.no_grad():
        eager(optimizer)


def _undecorated(function: Callable[..., Any]) -> Callable[..., Any] | None:
    return getattr(function, "__wrapped__", None)


def _eager_step(optimizer: torch.optim.Optimizer) -> Callable[[Any], Any] | None:
    """The innermost ``step`` of torch's own optimizers; None for classes made elsewhere."""
    kind = type(optimizer)
    if kind.__module__.partition(".")[0] != "torch":
        return None
    eager: Callable[[Any], Any] = inspect.unwrap(kind.step)
    return eager


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether anybody asked to be told of this optimizer's steps, or of every one's."""
    hooks = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        _global_optimizer_pre_hooks,
        _global_optimizer_post_hooks,
    )
    return any(hooks)


def _is_special(optimizer: torch.optim.Optimizer) -> bool:
    return (
        has_step_hooks(optimizer)
        or "step" in vars(optimizer)
        or any(group.get("differentiable") for group in optimizer.param_groups)
    )
