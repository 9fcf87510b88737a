"""A mode that sees operators below autograd; documented, but in a private module."""

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TorchDispatchMode"]
