"""Keep torch's compiler out of DAF's own passes, and out of a process that does not compile."""

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from itertools import chain
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from daf.core.replaced import undone

_COMPILER = "torch._dynamo"
_CACHED_FUNCTION = "__dynamo_disable"  # torch/_compile.py looks here before it imports
_DECORATED = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
_lock = threading.Lock()
_inside: set[object] = set()  # a token for each
_users: Any = None  # the stance that was there before the first


@contextmanager
def eagerly() -> Iterator[None]:
    """Compile nothing inside, and run compiled code eagerly."""
    if not is_loaded():
        yield
        return
    token = object()
    with undone(partial(_leave, token)):
        _enter(token)
        yield


def _enter(token: object) -> None:
    global _users
    with _lock:
        _inside.add(token)
        if _users is None:
            _users = torch.compiler.set_stance("force_eager").prev  # sets it at once


def _leave(token: object) -> None:
    global _users
    with _lock:
        _inside.discard(token)
        if not _inside and _users is not None:
            _set(_users)
            _users = None


@contextmanager
def as_the_user_wants() -> Iterator[None]:
    """Restore the user's stance inside ``eagerly``."""
    with _lock:
        if _users is not None:
            _set(_users)
    try:
        yield
    finally:
        with _lock:
            if _inside:
                torch.compiler.set_stance("force_eager")


def _set(stance: Any) -> None:
    torch.compiler.set_stance(
        stance.stance,
        skip_guard_eval_unsafe=stance.skip_guard_eval_unsafe,
        force_backend=stance.backend,
    )


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
    is_torchs = type(optimizer).__module__.partition(".")[0] == "torch"
    if is_loaded() or not is_torchs or _is_special(optimizer):
        try:
            optimizer.step()
        except Exception as error:
            error.add_note("daf: it was called without a closure; see Session.backward for others")
            raise
        return
    with torch.no_grad():
        inspect.unwrap(type(optimizer).step)(optimizer)


def asks_anew(optimizer: torch.optim.Optimizer) -> str:
    """Return the "first" pass (LBFGS) or "second" (SAM) that its step asks for; "" for none."""
    if _needs_closure(type(optimizer).step):
        return "first"
    both = hasattr(optimizer, "first_step") and hasattr(optimizer, "second_step")
    return "second" if both else ""


@cache
def _needs_closure(step: Callable[..., Any]) -> bool:
    closure = inspect.signature(step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


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
