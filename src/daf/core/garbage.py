"""When Python looks for garbage: after one piece of work, and seldom while a forward pass runs."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_MORE_YOUNG, _MANY_YOUNG = 64, 10_000  # times the usual number of new objects; what is many already


@contextmanager
def young_left_alone() -> Iterator[None]:
    """Look for cycles among new objects more seldom inside.

    What a forward pass makes lives until backward. A network of many small layers makes so much
    that it, and what is older, would be looked through again and again.
    """
    usual, *others = gc.get_threshold()
    more, is_ours = _MORE_YOUNG * usual, usual <= _MANY_YOUNG
    if is_ours:
        gc.set_threshold(more, *others)
    try:
        yield
    finally:
        if is_ours and gc.get_threshold()[0] == more:  # nobody else has changed it meanwhile
            gc.set_threshold(usual, *others)


class _Frozen:
    by_program = False  # once seen, which takes 40 ms where much is frozen
    by_us = 0


@contextmanager
def newer_garbage_collected() -> Iterator[None]:
    """Free the cycles made inside; a look at all there is takes a tenth of a second."""
    if not (_Frozen.by_program or _Frozen.by_us):
        _Frozen.by_program = gc.get_freeze_count() > 0
    is_own = not (_Frozen.by_program or _Frozen.by_us)
    _Frozen.by_us += is_own
    try:
        if is_own:
            gc.freeze()
        yield
    finally:
        gc.collect()
        if is_own:
            gc.unfreeze()
            _Frozen.by_us -= 1
