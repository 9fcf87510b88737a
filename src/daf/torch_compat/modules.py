"""Base classes of PyTorch's modules that have no public name."""

from torch.nn.modules.batchnorm import _BatchNorm as AnyBatchNorm

__all__ = ["AnyBatchNorm"]
