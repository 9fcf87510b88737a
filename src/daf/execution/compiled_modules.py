"""Which modules of a model ``torch.compile`` runs, and which may have hooks or be run again."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from daf.memory.compiler import is_loaded

_CALL = "_compiled_call_impl"  # of ``module.compile()``; PyTorch's own name


class CompiledModules:
    """Those of one model, as they are now.

    ``attributes``: by the path of each outermost compiled module, the attribute that runs it.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.attributes: dict[str, str] = _find(model) if is_loaded() else {}

    def is_traced(self, path: str) -> bool:
        """Would the compiler trace the hooks of this module?"""
        return self.attributes.get(path) == _CALL or _is_inside(path, self.attributes)

    def hookable(self) -> Iterator[tuple[str, nn.Module]]:
        """``named_modules()`` but those whose hooks the compiler would trace."""
        for path, module in self.model.named_modules():
            if not self.is_traced(path):
                yield path, module

    def replayable(self) -> Iterator[tuple[str, nn.Module]]:
        """``named_modules()`` but those that are compiled, or lie in such a one or around it."""
        for path, module in self.hookable():
            is_around = any(path == outer or _is_inside(outer, [path]) for outer in self.attributes)
            if not is_around and not isinstance(module, torch.jit.ScriptModule):
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


def _find(model: nn.Module) -> dict[str, str]:
    optimized: type = sys.modules["torch._dynamo"].OptimizedModule
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        attribute = "forward" if isinstance(module, optimized) else _CALL
        is_compiled = attribute == "forward" or module.__dict__.get(_CALL) is not None
        if is_compiled and not _is_inside(path, found):
            found[path] = attribute
    return found


def _is_inside(path: str, outermost: Iterable[str]) -> bool:
    return any(path != outer and path.startswith(outer and f"{outer}.") for outer in outermost)
