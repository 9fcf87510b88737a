"""A function by which a saved tensor is derived from a code that serves something else too."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


class Derivation:
    """A function that is applied in place to the only term of a recipe; it maps 0 to 0.

    ``readers`` counts the saved tensors that are derived so, by itself or scaled.
    """

    __slots__ = ("__weakref__", "_function", "_scale", "_unscaled", "readers")

    def __init__(
        self,
        function: Callable[[Tensor], object],
        scale: float = 1.0,
        unscaled: Derivation | None = None,
    ) -> None:
        self._function = function
        self._scale = scale
        self._unscaled = unscaled
        self.readers = 0

    def apply_(self, tensor: Tensor) -> None:
        """Apply it."""
        self._function(tensor)
        if self._scale != 1.0:
            tensor.mul_(self._scale)

    def scaled(self, factor: float) -> Derivation:
        """``factor`` times the same."""
        return Derivation(self._function, self._scale * factor, self)

    def note_reader(self) -> None:
        """One more saved tensor is derived so."""
        self.readers += 1
        if self._unscaled is not None:
            self._unscaled.note_reader()
