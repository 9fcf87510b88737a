"""ReLU, ReLU6 and hardtanh from 0, by whatever name they are called."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from daf.saved_tensors.provenance import RELUS

_BOUNDED = frozenset({F.hardtanh, F.hardtanh_})
_SIX = 6.0


class Rectifier(NamedTuple):
    """A ReLU of this name, whose result is at most ``most``."""

    name: str
    most: float = math.inf
    is_in_place: bool = False

    @property
    def is_bounded(self) -> bool:
        """True if the result has an upper bound."""
        return self.most < math.inf


def read_rectifier(
    operator: Callable[..., Any], arguments: Sequence[Any], keywords: Mapping[str, Any]
) -> tuple[Tensor, Rectifier] | None:
    """Return (input, rectifier) of a call; None where it is none, or its arguments are odd."""
    if operator not in RELUS and operator not in _BOUNDED and operator is not F.relu6:
        return None
    bounds = ("min_val", "max_val") if operator in _BOUNDED else ()
    named = dict(zip(("input", *bounds, "inplace"), arguments, strict=False)) | dict(keywords)
    x, name = named.get("input"), operator.__name__
    if not isinstance(x, Tensor) or len(arguments) > 2 + len(bounds):
        return None
    most = _SIX if operator is F.relu6 else math.inf
    if bounds:
        least, most = named.get("min_val", -1.0), named.get("max_val", 1.0)
        if least != 0 or not 0 < most < math.inf:
            return None
    return x, Rectifier(name, float(most), bool(named.get("inplace")) or name.endswith("_"))
