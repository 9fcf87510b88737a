"""The instruction set that the native kernels run with."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from daf.core.errors import KernelError

try:
    import daf._native as _native
except ImportError as problem:  # a checkout that was never built
    raise KernelError(
        "asked for the native kernels, found none (daf._native); install DAF again to build them"
    ) from problem

_forced_set: ContextVar[str] = ContextVar("forced_instruction_set", default="")


def instruction_sets() -> tuple[str, ...]:
    """Return the instruction sets of this processor and this build, widest first."""
    return tuple(_native.instruction_sets())


def chosen_instruction_set() -> str:
    """Return the set that this context is forced to use; empty: the widest."""
    return _forced_set.get()


@contextmanager
def use_instruction_set(name: str) -> Iterator[None]:
    """Run this context's kernels (thread, task) with one set; KernelError if it is not here."""
    if name not in (sets := instruction_sets()):
        raise KernelError(f"asked for instruction set {name!r}, found {', '.join(sets)}")
    token = _forced_set.set(name)
    try:
        yield
    finally:
        _forced_set.reset(token)
