"""Finds where a loss stopped being finite: the first module whose output is not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from daf.codecs.ranges import all_finite
from daf.torch_compat.compiler_stance import eagerly
from daf.torch_compat.pytree import tensors_in_batch


def is_finite(value: Any) -> bool:
    """True if every floating-point tensor in a nest holds only finite numbers."""
    tensors = tensors_in_batch(value)
    return all_finite(each for each in tensors if each.is_floating_point() or each.is_complex())


def first_nonfinite(model: nn.Module, batch: Any, run: Callable[[], Any]) -> str:
    """Run the forward pass again and return, in words, where the first non-finite value appears.

    ``run`` calls the model as the failed step did, with ``batch``. The words name a parameter, the
    batch, a module, or the loss function.
    """
    for name, parameter in model.named_parameters():
        if not is_finite(parameter):
            return f"parameter {name!r}"
    if not is_finite(batch):
        return "the batch itself"
    found: list[str] = []

    def watch(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, _inputs: Any, output: Any) -> None:
            if not found and not is_finite(output):
                found.append(
                    f"the output of module {name or '<model>'!r} ({type(module).__name__})"
                )

        return hook

    with torch.no_grad(), eagerly(), ExitStack() as hooks:  # compiled modules have hooks too
        for name, module in model.named_modules():
            hooks.enter_context(module.register_forward_hook(watch(name)))
        run()
    return found[0] if found else "the loss function (every module's output is finite)"
