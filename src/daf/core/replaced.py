"""What is replaced for a while: attributes, and functions that somebody listens to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

Listener = TypeVar("Listener")


@contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Give an object other attributes meanwhile."""
    before = {name: vars(owner)[name] for name in attributes if name in vars(owner)}
    vars(owner).update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            vars(owner).pop(name, None)
        vars(owner).update(before)


class Replaced(Generic[Listener]):
    """``owner.name``, in whose place ``replacement`` runs from the first listener to the last.

    ``replacement`` calls ``original``, with nobody left too: who replaced the function in turn
    meanwhile keeps ours, and it is not put back over theirs. Any thread may call.
    """

    def __init__(self, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        self.original: Callable[..., Any] = getattr(owner, name)
        self._owner, self._name, self._replacement = owner, name, replacement
        self.listeners: tuple[Listener, ...] = ()  # who listens now, the last that came last
        self._is_in_place = False
        self._lock = threading.RLock()  # a collection in here may end listeners

    def add(self, listener: Listener) -> None:
        """Let somebody listen, once more if they do already."""
        with self._lock:
            if not self._is_in_place:
                self.original = getattr(self._owner, self._name)
                setattr(self._owner, self._name, self._replacement)
                self._is_in_place = True
            self.listeners += (listener,)

    def remove(self, listener: Listener) -> None:
        """Let somebody listen once less; does nothing if they do not."""
        with self._lock:
            if listener in self.listeners:
                place = len(self.listeners) - 1 - self.listeners[::-1].index(listener)
                self.listeners = self.listeners[:place] + self.listeners[place + 1 :]
            if not self.listeners and getattr(self._owner, self._name) is self._replacement:
                setattr(self._owner, self._name, self.original)
                self._is_in_place = False
