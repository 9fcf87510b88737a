"""Parameters that a forward pass itself writes, such as a teacher's that follow the student's."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from daf.torch_compat.autograd_graph import is_strided, storage_address, without_torch_function
from daf.torch_compat.pytree import tensors_in_batch

_WRITING = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__"} | {
    *("__imod__", "__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__")
}


class ParameterWrites(TorchFunctionMode):
    """Copies a model's parameters before operators inside write them; ``restore`` undoes that."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        strided = filter(is_strided, model.parameters())
        self._unwritten = {storage_address(each): each for each in strided}
        self.written: list[tuple[Tensor, Tensor, Tensor]] = []  # parameter, its memory, values

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator; PyTorch calls this."""
        kwargs = kwargs or {}
        if _is_writing(func) or "out" in kwargs:
            with without_torch_function():
                first = args[:1] or dict(kwargs)
                for each in tensors_in_batch((first, kwargs.get("out"))):
                    self._note(each)
        return func(*args, **kwargs)

    def _note(self, tensor: Tensor) -> None:
        if is_strided(tensor):
            parameter = self._unwritten.pop(storage_address(tensor), None)
            if parameter is not None:
                data = parameter.data
                self.written.append((parameter, data, data.clone()))

    def restore(self) -> None:
        """Give every parameter that was written its memory and values back."""
        with torch.no_grad():
            for parameter, data, values in self.written:
                data.copy_(values)
                if parameter.data_ptr() != data.data_ptr():
                    parameter.data = data


@lru_cache(maxsize=4096)
def _is_writing(function: Callable[..., Any]) -> bool:
    name = getattr(function, "__name__", "")
    if name == "__set__":
        return bool(function == Tensor.data.__set__)  # type: ignore[attr-defined]
    in_place = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
    return in_place or name in _WRITING
