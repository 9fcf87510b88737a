"""Which operator calls an operator of ours may stand in for."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from daf.kernels.backend import is_codable
from daf.kernels.devices import can_code_on, is_coded_on_device, is_recorded
from daf.torch_compat.autograd_graph import pack_hook


def autograd_objection(inputs: tuple[Tensor | None, ...], pack: Callable[..., Any]) -> str:
    """Why autograd would not save for us what an operator reads; empty where it would."""
    if not torch.is_grad_enabled() or not any(t is not None and t.requires_grad for t in inputs):
        return "it needs no gradient"
    if pack_hook(raises=True) != pack:
        return "somebody else's saved-tensor hooks are on (checkpointing)"
    return ""


def is_plain(tensor: Any) -> bool:
    """An ordinary float32 tensor where there are kernels for it?"""
    return _is_ordinary(tensor) and tensor.dtype is torch.float32


def is_plain_float(tensor: Any) -> bool:
    """The same, or on a device another float: its kernels compute in float32 what lies between."""
    is_known = _is_ordinary(tensor) and is_codable(tensor.dtype) and is_coded_on_device(tensor)
    return is_known or is_plain(tensor)


def autocast_objection(x: Tensor) -> str:
    """Why autocast forbids an operator that it passes by on a GPU, but perhaps not elsewhere.

    There it passes by batch normalisation, GELU and SiLU, and leaves float32 as it is in
    normalisations of rows.
    """
    on_processor = x.device.type == "cpu" and torch.is_autocast_enabled("cpu")
    return "autocast is on" if on_processor else ""


def _is_ordinary(tensor: Any) -> bool:
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and can_code_on(tensor.device)
        and not tensor.is_neg()
        and not is_recorded(tensor)
    )


def has_usual_strides(x: Tensor) -> bool:
    """Would PyTorch give its result the same strides? (Those of dimensions of size 1 vary.)"""
    return x.stride() == _usual_strides(x.shape, x.is_contiguous())


@lru_cache(maxsize=1024)  # a model's shapes come again in every step
def _usual_strides(shape: torch.Size, is_contiguous: bool) -> tuple[int, ...]:
    layout = torch.contiguous_format
    if not is_contiguous:
        layout = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    return torch.empty(shape, memory_format=layout, device="meta").stride()
