"""The softmax of PyTorch's own composite attention, and its backward pass."""

from __future__ import annotations

import torch

safe_softmax = torch._safe_softmax  # rows of -inf alone become 0
softmax_backward = torch._softmax_backward_data
