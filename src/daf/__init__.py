"""DAF: train any PyTorch model inside a byte budget."""

from daf.execution.capture import compress

__all__ = ["compress"]
