"""Calls of modules that go through somebody else, by a ``forward`` set on each module meanwhile."""

import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

# Runs one call of a watched module, with these arguments and keywords.
Runner = Callable[["WatchedForward", tuple[Any, ...], dict[str, Any]], Any]


class WatchedForward:
    """What takes the place of a module's ``forward`` inside ``watched``."""

    def __init__(self, run: Runner, path: str, module: nn.Module) -> None:
        self.path, self.module = path, module
        self.forward: Callable[..., Any] = module.forward
        self.calls = -1
        self._run = run

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Let the runner run the module's own ``forward``."""
        return self._run(self, arguments, keywords)

    def __reduce__(self) -> Any:
        """Give copies and pickles of the module its own ``forward``."""
        return _own_forward, (self.module,)


def _own_forward(module: nn.Module) -> Callable[..., Any]:
    return types.MethodType(type(module).forward, module)


@contextmanager
def watched(targets: Sequence[WatchedForward]) -> Iterator[None]:
    """Let calls of the modules go through ``targets``; restore their own ``forward`` at the end."""
    spaces = [target.module.__dict__ for target in targets]
    before = [{k: space[k] for k in ("forward",) if k in space} for space in spaces]
    try:
        for target, space in zip(targets, spaces, strict=True):
            space["forward"] = target
        yield
    finally:
        for space, own in zip(spaces, before, strict=True):
            space.pop("forward", None)
            space.update(own)
