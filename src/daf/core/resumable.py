"""The state in a checkpoint of a part that a resumed run goes on with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from daf.core.json_dataclasses import from_plain, to_plain


class Resumable:
    """A part with attributes that a resumed run needs: ``KEPT``, name to type (or None)."""

    KEPT: ClassVar[Mapping[str, Any]] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs (JSON-able)."""
        return {name: to_plain(getattr(self, name)) for name in self.KEPT}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict``; other keys are ignored."""
        for name, kind in self.KEPT.items():
            found = state[name]
            setattr(self, name, None if found is None else from_plain(kind, found))
