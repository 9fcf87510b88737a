"""Modules that ``torch.compile`` runs: DAF's modes and hooks stay out of what it traces."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import wraps
from typing import Any

from torch.overrides import TorchFunctionMode

from daf.core.replaced import replaced
from daf.torch_compat.compiled_modules import CompiledModules
from daf.torch_compat.compiler import as_the_user_wants, eagerly
from daf.torch_compat.operator_mode import OperatorMode, push_modes, take_modes
from daf.torch_compat.parameter_reads import ForwardWatch

_OURS: tuple[type[TorchFunctionMode], ...] = (OperatorMode, ForwardWatch)

# Around a compiled module's call.
Around = Callable[[], AbstractContextManager[None]]


@contextmanager
def apart(compiled: CompiledModules, around: Around = nullcontext) -> Iterator[None]:
    """Run compiled modules inside without DAF's modes and within ``around()``.

    Compiled functions run eagerly. Backward passes need it too: they may run forward passes again.
    """
    with eagerly(), ExitStack() as stack:
        for module, attribute in compiled.attributes.items():
            run = _wrapped(getattr(module, attribute), around)
            stack.enter_context(replaced(module, **{attribute: run}))
        yield


def _wrapped(own: Callable[..., Any], around: Around) -> Callable[..., Any]:
    @wraps(own)
    def run(*arguments: Any, **keywords: Any) -> Any:
        with around(), without_our_modes(), as_the_user_wants():
            return own(*arguments, **keywords)

    return run


@contextmanager
def without_our_modes() -> Iterator[None]:
    """Take DAF's own modes off the stack of function modes inside."""
    before = take_modes()
    push_modes([mode for mode in before if not isinstance(mode, _OURS)])
    try:
        yield
    finally:
        take_modes()
        push_modes(before)
