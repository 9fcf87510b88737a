"""Disable torch.compile inside DAF's own passes, by the process's *stance*.

Sessions on several threads may overlap: the first sets the stance, the last restores the user's.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from daf.torch_compat.compiler import is_loaded

_lock = threading.Lock()
_inside = 0
_users: Any = None  # the stance that was there before the first


@contextmanager
def eagerly() -> Iterator[None]:
    """Compile nothing inside, and run compiled code eagerly."""
    global _inside, _users
    if not is_loaded():
        yield
        return
    with _lock:
        if _inside == 0:
            _users = torch.compiler.set_stance("force_eager").prev  # sets it at once
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                _apply()


@contextmanager
def as_the_user_wants() -> Iterator[None]:
    """Restore the user's stance inside ``eagerly``."""
    with _lock:
        _set(_users)
    try:
        yield
    finally:
        with _lock:
            _apply()


def _apply() -> None:
    if _inside:
        torch.compiler.set_stance("force_eager")
    else:
        _set(_users)


def _set(stance: Any) -> None:
    torch.compiler.set_stance(
        stance.stance,
        skip_guard_eval_unsafe=stance.skip_guard_eval_unsafe,
        force_backend=stance.backend,
    )
