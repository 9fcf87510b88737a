"""The states of the generators that a module call may draw from: PyTorch's, Python's and NumPy's.

``Generators`` are the default ones; ``OwnGenerator`` is one that a module holds.
"""

import ctypes
import pickle
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

_TWISTER_BYTES = 2500  # of a Mersenne Twister: 624 words, and a place among them


class _Source(NamedTuple):
    """One generator: how its state is read, set and compared."""

    now: Callable[[], Any]
    restore: Callable[[Any], object]
    is_same: Callable[[Any, Any], bool]


class OwnGenerator(NamedTuple):
    """A generator of a module's own, and a state of it."""

    source: _Source
    state: Any

    @classmethod
    def of(cls, value: Any) -> "OwnGenerator | None":
        """Return the generator that ``value`` is, with its present state; None: it is none."""
        if isinstance(value, torch.Generator):
            source = _Source(value.get_state, value.set_state, torch.equal)
        elif isinstance(value, random.Random):
            source = _Source(value.getstate, value.setstate, _is_same_python)
        elif isinstance(value, np.random.RandomState):
            source = _Source(
                partial(value.get_state, legacy=False), value.set_state, _is_pickled_same
            )
        elif isinstance(value, np.random.Generator):
            bits = value.bit_generator
            source = _Source(lambda: bits.state, partial(setattr, bits, "state"), _is_pickled_same)
        else:
            return None
        return cls(source, source.now())

    def is_used(self) -> bool:
        """True if somebody drew from it since."""
        return not self.source.is_same(self.state, self.source.now())

    def undo(self) -> None:
        """Set it to the state."""
        self.source.restore(self.state)


class RandomState:
    """The states of some generators; ``nbytes`` of them."""

    def __init__(self, states: Iterable[OwnGenerator]) -> None:
        self._states = tuple(states)

    @property
    def nbytes(self) -> int:
        """The bytes that the states hold: about those of a Mersenne Twister each."""
        return sum(getattr(state, "nbytes", _TWISTER_BYTES) for _, state in self._states)

    def used(self) -> "RandomState":
        """Return the states of those generators that were drawn from since."""
        return RandomState(each for each in self._states if each.is_used())

    def restore(self) -> None:
        """Set the generators to these states."""
        for each in self._states:
            each.undo()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Draw inside from these states; leave the generators as they were found."""
        found = RandomState(OwnGenerator(source, source.now()) for source, _ in self._states)
        self.restore()
        try:
            yield
        finally:
            found.restore()


class Generators:
    """The default generators; a state of NumPy's that is still true is not read again."""

    def __init__(self) -> None:
        # ``np.random`` takes 2 MB, so that it is not imported for a name in it.
        numpy = _Source(self._numpy, lambda state: np.random.set_state(state), _is_pickled_same)
        self._sources = [_CPU, _PYTHON, numpy]
        self._seen: tuple[bytes, Any] = b"", {}

    def state(self, devices: Iterable[torch.device]) -> RandomState:
        """Return the states now, with those of these CUDA devices."""
        sources = [*self._sources, *map(_on_device, devices)]
        return RandomState(OwnGenerator(source, source.now()) for source in sources)

    def _numpy(self) -> Any:
        """Return NumPy's state, which takes 30 microseconds to read."""
        words, state = self._seen
        # A pending normal number can be taken without a change of the words.
        if not words or words != _words() or state["has_gauss"]:
            state = np.random.get_state(legacy=False)
            self._seen = _words(), state
        return state


def _words() -> bytes:
    """Return the memory of NumPy's default generator; nothing if it is no Mersenne Twister."""
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if type(generator) is not np.random.MT19937:
        return b""
    return ctypes.string_at(generator.ctypes.state_address, _TWISTER_BYTES)


def _is_pickled_same(one: Any, other: Any) -> bool:
    return one is other or pickle.dumps(one) == pickle.dumps(other)


def _is_same_python(one: Any, other: Any) -> bool:
    """Compare the pending normal number, the place and some words: all words are made at once."""
    return bool(one[2] == other[2] and one[1][-1] == other[1][-1] and one[1][:4] == other[1][:4])


def _on_device(device: torch.device) -> _Source:
    now = partial(torch.cuda.get_rng_state, device)
    return _Source(now, partial(torch.cuda.set_rng_state, device=device), torch.equal)


_CPU = _Source(torch.get_rng_state, torch.set_rng_state, torch.equal)
_PYTHON = _Source(random.getstate, random.setstate, _is_same_python)
