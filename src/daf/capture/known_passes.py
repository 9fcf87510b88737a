"""Passes that need no capture: what they save is known from one before them."""

from collections.abc import Hashable

from daf.capture.capture import Capture
from daf.core.policy import Policy, plain_policy
from daf.torch_compat.compiled_modules import CompiledModules

COUNTED_EVERY = 64  # passes, where a plan keeps all that PyTorch saves


class KnownPasses:
    """Tells the passes of one model that keep all and are counted: to capture takes 0.3 ms."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._known: Hashable = None
        self._first_index = 0  # of the step whose passes were captured

    def begin(
        self, policy: Policy, compiled: CompiledModules, index: int, what: Hashable | None
    ) -> bool:
        """Note that a pass begins; return True if it saves what one of a step before did.

        ``index``: the step's number. ``what`` tells batches and their parts apart; None: nothing
        does.
        """
        keeps_all = policy == plain_policy() and not (compiled.attributes or self._capture.host)
        what = what if keeps_all else None
        if what != self._known:
            self._known, self._first_index = what, index
        return what is not None and index != self._first_index and index % COUNTED_EVERY != 0
