"""What is replaced for a while: attributes, and functions that somebody listens to."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Generic, TypeVar

Listener = TypeVar("Listener")


@contextmanager
def undone(undo: Callable[[], None]) -> Iterator[None]:
    """Call ``undo`` at the end, and again if Ctrl-C comes in it: any part may be there to undo."""
    try:
        yield
    finally:
        try:
            undo()
        except KeyboardInterrupt:
            undo()
            raise


@contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Give an object other attributes meanwhile."""
    before = {name: vars(owner)[name] for name in attributes if name in vars(owner)}

    def restore() -> None:
        for name in attributes.keys() - before.keys():
            vars(owner).pop(name, None)
        vars(owner).update(before)

    with undone(restore):
        vars(owner).update(attributes)
        yield


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
            found = getattr(self._owner, self._name)
            if not self._is_in_place and found is not self._replacement:
                self.original = found
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
                self._is_in_place = False
                setattr(self._owner, self._name, self.original)

    @contextmanager
    def told(self, listener: Listener) -> Iterator[None]:
        """Let somebody listen inside."""
        with undone(partial(self.remove, listener)):
            self.add(listener)
            yield
