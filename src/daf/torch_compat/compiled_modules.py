"""Which modules of a model ``torch.compile`` runs, and which may have hooks or be run again."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch import nn

_CALL = "_compiled_call_impl"  # of ``module.compile()``; PyTorch's own name


class CompiledModules:
    """Those of one model, as they are now.

    ``attributes``: the outermost compiled modules, and the attribute that runs each. Modules are
    told by identity, because one may be called from compiled parts and from others.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.attributes: dict[nn.Module, str] = {}
        self._inside: set[nn.Module] = set()
        optimized = getattr(sys.modules.get("torch._dynamo"), "OptimizedModule", None)
        if optimized is not None:  # else nothing can be compiled
            self._find(optimized)

    def is_traced(self, module: nn.Module) -> bool:
        """Would the compiler trace the hooks of this module?"""
        return module in self._inside or self.attributes.get(module) == _CALL

    def hookable(self) -> Iterator[tuple[str, nn.Module]]:
        """``named_modules()`` but those whose hooks the compiler would trace."""
        for path, module in self.model.named_modules():
            if not self.is_traced(module):
                yield path, module

    def replayable(self) -> Iterator[tuple[str, nn.Module]]:
        """``named_modules()`` but those that are compiled, or lie in such a one or around it."""
        for path, module in self.model.named_modules():
            if self._is_replayable(module) and not isinstance(module, torch.jit.ScriptModule):
                yield path, module

    def _is_replayable(self, module: nn.Module) -> bool:
        if not self.attributes:
            return True
        return module not in self._inside and self.attributes.keys().isdisjoint(module.modules())

    def _find(self, optimized: type) -> None:
        for module in self.model.modules():
            is_wrapper = isinstance(module, optimized)
            if module in self._inside or not (is_wrapper or module.__dict__.get(_CALL)):
                continue
            self.attributes[module] = "forward" if is_wrapper else _CALL
            self._inside.update(each for each in module.modules() if each is not module)
        for module in self._inside & self.attributes.keys():  # called from elsewhere as well
            del self.attributes[module]
