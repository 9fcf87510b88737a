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

    def begin(
        self, policy: Policy, compiled: CompiledModules, index: int, what: Hashable | None
    ) -> bool:
        """Note that a pass begins; return True if it saves what the one before did.

        ``index``: the pass's number. ``what`` tells batches apart; None: a part of one.
        """
        keeps_all = policy == plain_policy() and not (compiled.attributes or self._capture.host)
        before, self._known = self._known, what if keeps_all else None
        is_same = self._known is not None and self._known == before
        return is_same and index % COUNTED_EVERY != 0
