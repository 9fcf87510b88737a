"""The modules that ``torch.compile`` runs, and those that may have hooks or be replayed."""

import sys
from collections.abc import Iterator

import torch
from torch import nn

from daf.torch_compat.modules import modules_of

_CALL = "_compiled_call_impl"  # of ``module.compile()``; PyTorch's own name


class CompiledModules:
    """The compiled modules of one model, as they are now."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.attributes: dict[nn.Module, str] = {}  # what runs each outermost one
        self._inside: set[nn.Module] = set()  # by identity: uncompiled parts may call one too
        optimized = getattr(sys.modules.get("torch._dynamo"), "OptimizedModule", None)
        if optimized is not None:  # else nothing can be compiled
            self._find(optimized)

    def is_traced(self, module: nn.Module) -> bool:
        """True if the compiler traces this module's hooks."""
        return module in self._inside or self.attributes.get(module) == _CALL

    def hookable(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield ``named_modules()`` but those whose hooks the compiler traces."""
        for path, module in self.model.named_modules():
            if not self.is_traced(module):
                yield path, module

    def replayable(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield ``named_modules()`` that are not compiled, nor inside or around compiled ones."""
        compiled = self.attributes.keys()
        for path, module in self.model.named_modules():
            is_near = module in self._inside or (compiled and compiled & {*module.modules()})
            if not is_near and not isinstance(module, torch.jit.ScriptModule):
                yield path, module

    def _find(self, optimized: type) -> None:
        for module in modules_of(self.model):
            is_wrapper = isinstance(module, optimized)
            if module in self._inside or not (is_wrapper or module.__dict__.get(_CALL)):
                continue
            self.attributes[module] = "forward" if is_wrapper else _CALL
            self._inside.update(each for each in module.modules() if each is not module)
        for module in self._inside & self.attributes.keys():  # called from elsewhere as well
            del self.attributes[module]
