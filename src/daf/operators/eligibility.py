"""Which operator calls a fused or chunked operator may replace."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from daf.core.policy import SMALL_BYTES
from daf.kernels.backend import is_codable
from daf.kernels.devices import can_code_on, is_coded_on_device, is_recorded
from daf.saved_tensors.norm_inputs import channel_stride
from daf.torch_compat.autograd_graph import is_strided, pack_hook


def autograd_objection(inputs: tuple[Tensor | None, ...], pack: Callable[..., Any]) -> str:
    """Return why autograd would not hand ``inputs`` to the hook ``pack``; empty where it would."""
    if not torch.is_grad_enabled() or not any(t is not None and t.requires_grad for t in inputs):
        return "it needs no gradient"
    if is_forward_mode():
        return "forward-mode derivatives are taken"
    if pack_hook(raises=True) != pack:
        return "somebody else's saved-tensor hooks are on (checkpointing)"
    return ""


def is_forward_mode() -> bool:
    """True inside ``forward_ad.dual_level``, where functions of one's own have no derivative."""
    return forward_ad._current_level >= 0


def autocast_objection(x: Tensor) -> str:
    """Return why autocast forbids an operator that it leaves alone on a GPU.

    It leaves batch normalisation, GELU and SiLU as they are; row normalisations compute in float32.
    """
    on_processor = x.device.type == "cpu" and torch.is_autocast_enabled("cpu")
    return "autocast is on" if on_processor else ""


def input_objection(x: Any) -> str:
    """Return why ``x`` cannot be the input of an operator that works in memory order."""
    # On a device also another float, whose kernels compute in float32.
    is_known = _is_ordinary(x) and is_codable(x.dtype) and is_coded_on_device(x)
    if not is_known and not is_plain(x):
        return "its input is no float32 tensor, nor on a GPU one of half the width"
    if channel_stride(x) is None or not has_usual_strides(x):
        return "its input lies neither contiguous nor channels-last"
    return size_objection(x)


def size_objection(x: Tensor) -> str:
    """Return why a code of ``x`` would save nothing."""
    return "its input is small" if x.nbytes < SMALL_BYTES else ""


def is_plain(tensor: Any) -> bool:
    """True if this is an ordinary float32 tensor where kernels exist."""
    return _is_ordinary(tensor) and tensor.dtype is torch.float32


def is_vector(tensor: Any, shape: tuple[int, ...], x: Tensor) -> bool:
    """True if this is a contiguous float32 tensor of this shape on the device of ``x``."""
    fits = is_plain(tensor) and tuple(tensor.shape) == shape and tensor.is_contiguous()
    return fits and tensor.device == x.device


def _is_ordinary(tensor: Any) -> bool:
    is_usual = type(tensor) in (Tensor, torch.nn.Parameter) and is_strided(tensor)
    return is_usual and can_code_on(tensor.device) and not (tensor.is_neg() or is_recorded(tensor))


def has_usual_strides(x: Tensor) -> bool:
    """True if PyTorch would give its result the same strides (dimensions of size 1 included)."""
    return x.stride() == _usual_strides(x.shape, x.is_contiguous())


@lru_cache(maxsize=1024)  # a model's shapes come again in every step
def _usual_strides(shape: torch.Size, is_contiguous: bool) -> tuple[int, ...]:
    layout = torch.contiguous_format
    if not is_contiguous:
        layout = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    return torch.empty(shape, memory_format=layout, device="meta").stride()
