"""Modules: base classes without a public name, fast walks, and calls from anybody's loop."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from daf.core.replaced import Replaced
from daf.torch_compat.autograd_graph import NO_TASK, graph_task

AnyBatchNorm = _BatchNorm
_WALKS = ("modules", "named_modules", "parameters", "named_parameters", "_named_members")

# Given a module, its arguments and keywords; None leaves the call alone.
Around = Callable[
    [nn.Module, tuple[Any, ...], dict[str, Any]], AbstractContextManager[object] | None
]


class Uncopied:
    """None in copies and pickles: a copy of a model that holds one trains under nothing."""

    def __deepcopy__(self, _memo: Any) -> None:
        return None

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()


class OwnHook:
    """A hook of DAF's own on a module; on copies and in pickles of the module it does nothing."""

    def __init__(self, run: Callable[..., Any] = lambda *_, **__: None) -> None:
        self._run = run

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self._run(*given, **named)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(self), ()


def modules_of(model: nn.Module) -> list[nn.Module]:
    """Return what ``model.modules()`` yields, some times as fast."""
    found: dict[nn.Module, None] = {}
    to_visit = [model]
    while to_visit:
        part = to_visit.pop()
        if part not in found:
            if not _is_usual(type(part)):  # type: ignore[arg-type]
                return [*model.modules()]
            found[part] = None
            if part._modules:
                to_visit += [each for each in reversed(part._modules.values()) if each is not None]
    return [*found]


def parameters_of(
    model: nn.Module, modules: Iterable[nn.Module] | None = None
) -> list[nn.Parameter]:
    """Return what ``model.parameters()`` yields, some times as fast.

    ``modules``: what ``modules_of`` has just returned, if known.
    """
    if not _is_usual(type(model)):  # type: ignore[arg-type]
        return [*model.parameters()]
    spaces = [part._parameters for part in modules or modules_of(model)]
    own = (each for space in spaces if space for each in space.values() if each is not None)
    return [*{id(each): each for each in own}.values()]


@lru_cache(maxsize=4096)
def _is_usual(kind: type) -> bool:
    """True if no class between this and ``nn.Module`` says itself what its parts are."""
    return all(getattr(kind, name) is getattr(nn.Module, name) for name in _WALKS)


class _Thread(threading.local):
    is_inside = False  # a call that somebody is around


_thread = _Thread()


@contextmanager
def around_calls(around: Around) -> Iterator[None]:
    """Run module calls in the body within what ``around`` returns; calls inside one run as usual.

    So do calls in backward (replays, checkpoints). Of several, the last that wants to is around.
    """
    with _calls.told(around):
        yield


def _call(module: nn.Module, *arguments: Any, **keywords: Any) -> Any:
    if _thread.is_inside or graph_task() != NO_TASK:
        return _calls.original(module, *arguments, **keywords)
    for around in reversed(_calls.listeners):
        if (entered := around(module, arguments, keywords)) is not None:
            _thread.is_inside = True
            try:
                with entered:
                    return _calls.original(module, *arguments, **keywords)
            finally:
                _thread.is_inside = False
    return _calls.original(module, *arguments, **keywords)


_calls: Replaced[Around] = Replaced(nn.Module, "__call__", _call)
