"""A digest of a job: of all that the bytes, times and proofs of its steps depend on but values.

Weights, data and learning rates may differ; what the model, the loss and the optimizer are made of
may not: their code and what it calls, their attributes, what it reads of its module, all sizes.
What cannot be pickled has no digest, so that nothing is believed of it.
"""

import hashlib
import os
import pickle
import platform
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from logging import Logger
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from daf.recompute.python_state import names_in
from daf.step.splitting import code_words, proof_key
from daf.torch_compat.pytree import tensors_inside

_PLAIN = (bool, int, float, str, bytes, type(None))
_NESTS = (tuple, list, dict)
_BY_NAME = (Logger, types.BuiltinFunctionType, torch.Generator, np.ufunc)
_MODULES_BY_NAME = ("torch._ops", "numpy.random")
_OWN = os.path.dirname(os.path.dirname(__file__))
_LIBRARIES = ("site-packages", "dist-packages", os.path.dirname(os.__file__), _OWN)
_NOT_THE_JOB = frozenset({"params", "lr", "initial_lr"})  # of an optimizer's groups
_MOST_OBJECTS = 200_000  # a tenth of a second or two; a data set in Python's lists has more


def job_key(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    loss_fn: Callable[..., Any],
    options: Mapping[str, Any],
) -> str | None:
    """Return the digest; None if something of the job cannot be pickled."""
    groups = optimizer.param_groups
    rest = [{k: v for k, v in each.items() if k not in _NOT_THE_JOB} for each in groups]
    kind = (type(optimizer), rest, [each["params"] for each in groups], bool(optimizer.state))
    given = ([*batch] if isinstance(batch, Mapping) else (), *tensors_inside(batch))
    digest = hashlib.sha256()
    try:
        proven = proof_key(model, batch, loss_fn)
        writer = _Writer(types.SimpleNamespace(write=digest.update))
        writer.dump((proven, _surroundings(), options, model, loss_fn, kind, given))
    except Exception:  # of anybody's objects
        return None
    return digest.hexdigest()


def _surroundings() -> tuple[Any, ...]:
    machine = (platform.node(), platform.python_version(), os.cpu_count(), torch.get_num_threads())
    kernels = (torch.backends.cpu.get_cpu_capability(), torch.backends.mkldnn.enabled)
    numbers = (torch.get_default_dtype(), torch.get_float32_matmul_precision())
    casts = [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")]
    repeats = torch.are_deterministic_algorithms_enabled()
    return machine, kernels, numbers, casts, torch.get_autocast_dtype("cpu"), repeats


class _Writer(pickle.Pickler):
    """Pickles with code in place of names, and forms in place of tensors."""

    def __init__(self, file: Any) -> None:
        super().__init__(file, protocol=5)
        self._tensors: dict[int, tuple[int, Tensor]] = {}  # held, so that ids stay theirs
        self._objects = 0

    def persistent_id(self, value: Any) -> Any:
        """Return what stands for a value; None: what it is made of."""
        self._objects += 1
        if self._objects > _MOST_OBJECTS:
            raise pickle.PicklingError
        if isinstance(value, Tensor):
            number = self._tensors.setdefault(id(value), (len(self._tensors), value))[0]
            strides = value.stride() if value.layout is torch.strided else ()
            form = (value.dtype, value.device, value.layout, value.requires_grad)
            return number, f"{tuple(value.shape)} {strides} {form}"
        if isinstance(value, np.ndarray):
            return f"{value.dtype} {value.shape}"
        if isinstance(value, (set, frozenset)):  # in another order in each process
            if not all(type(each) in _PLAIN for each in value):
                raise pickle.PicklingError
            return sorted(map(repr, value))
        if isinstance(value, types.MappingProxyType):
            return dict(value)
        if isinstance(value, types.ModuleType):
            return value.__name__, _file(getattr(value, "__file__", None) or "")
        if isinstance(value, _BY_NAME) or type(value).__module__.startswith(_MODULES_BY_NAME):
            name = getattr(value, "__qualname__", getattr(value, "__name__", ""))
            return type(value).__qualname__, str(name)
        return None

    def reducer_override(self, value: Any) -> Any:
        """Return what code does, as state, which may refer to itself; of a library, its file."""
        if isinstance(value, types.FunctionType) and value is not _code:
            library = _library(value.__code__.co_filename)
            cells = [each.cell_contents for each in value.__closure__ or ()]
            given = (value.__defaults__, value.__kwdefaults__, cells, value.__dict__)
            return _code, (value.__qualname__,), (library or _read_by(value), given)
        if isinstance(value, type):
            module = sys.modules.get(value.__module__)
            path = getattr(module, "__file__", None) or value.__module__
            library = "built in" if path in sys.builtin_module_names else _library(path)
            own = () if library else [*_entries(value)]
            name = f"{value.__module__}.{value.__qualname__} {library}"
            return _code, (name,), (value.__bases__, own)
        return NotImplemented


def _code(_: str) -> None:
    """Stand for a function or a class; nothing is ever read back."""


def _read_by(function: types.FunctionType) -> tuple[Any, ...]:
    code, known = function.__code__, function.__globals__
    names = sorted(known.keys() & names_in(code))
    return (*code_words(code), *((name, known[name]) for name in names))


def _entries(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield a class's functions, as they are wrapped, and its plain values, by name."""
    for name, value in vars(kind).items():
        for inner in ("__func__", "fget", "func", "__wrapped__"):
            value = getattr(value, inner, None) or value
        is_own = isinstance(value, (*_PLAIN, *_NESTS)) and name[:2] != "__"
        if is_own or isinstance(value, types.FunctionType):
            yield name, value


def _library(path: str) -> str:
    return _file(path) if any(each in path for each in _LIBRARIES) else ""


@cache
def _file(path: str) -> str:
    try:
        stat = os.stat(path)
    except OSError:
        return path
    return f"{path} {stat.st_mtime_ns} {stat.st_size}"
