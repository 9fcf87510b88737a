"""Which modules of a model ``torch.compile`` runs, and which may have hooks of ours."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from daf.memory.compiler import is_loaded

_CALL = "_compiled_call_impl"  # of ``module.compile()``; PyTorch's own name


def compiled_modules(model: nn.Module) -> dict[str, str]:
    """Paths of the outermost compiled modules, and by which attribute each is called."""
    if not is_loaded():
        return {}
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        if _is_inside(path, found):
            continue
        if isinstance(module, _optimized_module()):
            found[path] = "forward"
        elif getattr(module, _CALL, None) is not None:
            found[path] = _CALL
    return found


def hookable_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """``named_modules()`` but those whose hooks the compiler would trace."""
    compiled = compiled_modules(model)
    for path, module in model.named_modules():
        inside = any(
            path.startswith(f"{outer}.") or outer == "" for outer in compiled if outer != path
        )
        if not inside and compiled.get(path) != _CALL:
            yield path, module


def replayable_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """``named_modules()`` but those that are compiled, or lie in such a one or around it."""
    compiled = compiled_modules(model)
    for path, module in model.named_modules():
        around = any(path == outer or _is_inside(outer, [path]) for outer in compiled)
        is_script = isinstance(module, torch.jit.ScriptModule)
        if not (around or _is_inside(path, compiled) or is_script):
            yield path, module


@contextmanager
def eagerly() -> Iterator[None]:
    """Inside, nothing is compiled, nor what was compiled run."""
    if not is_loaded():
        yield
        return
    stance = torch.compiler.set_stance("force_eager")
    try:
        yield
    finally:
        stance.__exit__(None, None, None)


def _is_inside(path: str, outermost: Iterable[str]) -> bool:
    return any(path != outer and path.startswith(outer and f"{outer}.") for outer in outermost)


def _optimized_module() -> type:
    found: type = sys.modules["torch._dynamo"].OptimizedModule
    return found
