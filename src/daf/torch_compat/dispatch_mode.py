"""A mode that sees operators below autograd; documented, but in a private module."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Without the compiler, which PyTorch's own would import to shield a mode from it: 150 MB.

    Models run eagerly under it (``eagerly``).
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
