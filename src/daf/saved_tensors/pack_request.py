"""What is known of one saved tensor when it is decided what to hold instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from daf.core.policy import Need, Site, Treatment
from daf.saved_tensors.backward_rules import tensors_in
from daf.saved_tensors.ledger import Source
from daf.saved_tensors.packed_tensor import SavedTensor
from daf.saved_tensors.provenance import Operands, is_made_by


class Call(NamedTuple):
    """The operator call that saves: its function, what it was given, what it returned."""

    operator: Any
    arguments: Sequence[Any]
    keywords: Mapping[str, Any]
    result: Any
    operands: Operands | None


class PackRequest(NamedTuple):
    """One saved tensor to treat."""

    saved: SavedTensor
    tensor: Tensor
    need: Need
    treatment: Treatment
    source: Source
    call: Call
    site: Site
    key: int
    weight: float  # of relative error here, beside other sites
    tag: int  # what the store calls the site when it gives up planes


def is_result(job: PackRequest) -> bool:
    """Is it (the memory of) what the call returned?"""
    return any(job.tensor.data_ptr() == out.data_ptr() for out in tensors_in(job.call.result))


def result_made_by(node: Any, call: Call) -> Tensor | None:
    """The call's (first) result, unless this node was only one of its steps."""
    result = next(iter(tensors_in(call.result)), None)
    return result if result is not None and is_made_by(result, node) else None
