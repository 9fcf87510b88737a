"""Keep torch's compiler out of a process that does not compile.

The first ``torch.optim.Optimizer`` imports ``torch._dynamo``, which then holds some 70 MB (torch
2.13) that an eager step never uses. The optimizer's decorators import it. ``_disable_dynamo`` first
looks for an attribute of the function, which is set here; ``step`` is called without its decorator.
Where torch is built otherwise, or the compiler is loaded, nothing is changed.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

_COMPILER = "torch._dynamo"
_CACHED_FUNCTION = "__dynamo_disable"  # torch/_compile.py looks here before it imports
_DECORATED = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")


def is_loaded() -> bool:
    """True if torch's compiler is in this process."""
    return _COMPILER in sys.modules


def keep_out() -> bool:
    """Let optimizers be made without the compiler; call it before the first. False: cannot."""
    methods = (getattr(torch.optim.Optimizer, name) for name in _DECORATED)
    wrapped = [getattr(each, "__wrapped__", None) for each in methods]
    if is_loaded() or None in wrapped:
        return False
    for function in wrapped:
        if not hasattr(function, _CACHED_FUNCTION):
            setattr(function, _CACHED_FUNCTION, function)
    return True


def step(optimizer: torch.optim.Optimizer) -> None:
    """Call ``optimizer.step()`` without importing the compiler: the same arithmetic."""
    eager = None if is_loaded() or _is_special(optimizer) else _eager_step(optimizer)
    if eager is None:
        optimizer.step()
        return
    with torch.no_grad():
        eager(optimizer)


def _eager_step(optimizer: torch.optim.Optimizer) -> Callable[[Any], Any] | None:
    """Return the innermost ``step`` of torch's own optimizers; None for other classes."""
    kind = type(optimizer)
    if kind.__module__.partition(".")[0] != "torch":
        return None
    eager: Callable[[Any], Any] = inspect.unwrap(kind.step)
    return eager


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """True if this optimizer, or every optimizer, has step hooks beside those of sessions."""
    every = chain(
        optimizer._optimizer_step_pre_hooks.values(),
        optimizer._optimizer_step_post_hooks.values(),
        _global_optimizer_pre_hooks.values(),
        _global_optimizer_post_hooks.values(),
    )
    return any(not str(getattr(e, "__module__", "")).startswith("daf.") for e in every)


def _is_special(optimizer: torch.optim.Optimizer) -> bool:
    return (
        has_step_hooks(optimizer)
        or "step" in vars(optimizer)  # patched, by a learning rate scheduler say
        or any(group.get("differentiable") for group in optimizer.param_groups)
    )
