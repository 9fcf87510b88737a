"""The function by which a saved tensor is derived from a code that serves others too."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


class Derivation:
    """A function with f(0) = 0 that is applied in place to the only term of a recipe.

    ``readers`` counts the saved tensors that are derived by it, scaled or not.
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
        """Replace ``tensor`` by its function."""
        self._function(tensor)
        if self._scale != 1.0:
            tensor.mul_(self._scale)

    def scaled(self, factor: float) -> Derivation:
        """Return ``factor`` times the function."""
        return Derivation(self._function, self._scale * factor, self)

    def note_reader(self) -> None:
        """Count one more saved tensor derived by it."""
        self.readers += 1
        if self._unscaled is not None:
            self._unscaled.note_reader()
