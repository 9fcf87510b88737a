"""What proofs were taken for: the code of model and loss, the batch's structure, versions."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from types import CodeType
from typing import Any

import torch
from torch import nn

from daf.torch_compat.pytree import tensors_inside

_DISTRIBUTION = "daf-train"


def proof_key(model: nn.Module, batch: Any, loss_fn: Callable[..., Any]) -> str:
    """Return a digest that changes with all that a proof depends on, but values and sizes."""
    facts = [torch.__version__, _own_version(), *_facts_of(batch), *_code_of(loss_fn)]
    for name, module in model.named_modules():
        facts += [name, type(module).__qualname__, str(module.training)]
    for kind in sorted(
        {type(each) for each in model.modules()}, key=lambda kind: kind.__qualname__
    ):
        facts += _code_of(_forward_of(kind))
    facts += [f"{name} {each.requires_grad}" for name, each in model.named_parameters()]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()


def _forward_of(kind: type[nn.Module]) -> Any:
    """Return a class's forward; a scripted module's has none before it is made."""
    return next((vars(base)["forward"] for base in kind.__mro__ if "forward" in vars(base)), kind)


def _own_version() -> str:
    try:
        return version(_DISTRIBUTION)
    except PackageNotFoundError:
        return ""


def _facts_of(batch: Any) -> Iterator[str]:
    yield type(batch).__qualname__
    yield from (f"{each.dim()} {each.dtype}" for each in tensors_inside(batch))


def _code_of(function: Any) -> Iterator[str]:
    """Yield what a function's code says; of another callable, what its ``__call__`` says."""
    while isinstance(function, partial):
        function = function.func
    yield getattr(function, "__qualname__", type(function).__qualname__)
    if not hasattr(function, "__code__"):
        function = type(function).__dict__.get("__call__", function)
    code = getattr(function, "__code__", None)
    if isinstance(code, CodeType):
        yield from _parts_of(code)


def _parts_of(code: CodeType) -> Iterator[str]:
    yield code.co_code.hex()
    yield " ".join(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _parts_of(constant)
        else:  # sets have another order in every process
            yield repr(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant)
