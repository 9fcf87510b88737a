"""Bytes of a model and its optimizer: parameters, gradients, and the state that is yet to come."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from daf.memory import account_meter, compiler

PROBE_ELEMENTS = 4096
UPDATE_PROBE_ELEMENTS = 1 << 19


def storage_bytes(tensors: Iterator[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind some tensors."""
    sizes = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors
    }
    return sum(sizes.values())


def parameter_bytes(model: nn.Module) -> int:
    """Bytes of parameters and buffers, shared ones counted once."""
    tensors = [*model.parameters(), *model.buffers()]
    return storage_bytes(iter(tensors))


def gradient_bytes(model: nn.Module) -> int:
    """Bytes that gradients take once they all exist."""
    trained = {id(each): each for each in model.parameters() if each.requires_grad}
    return sum(each.numel() * each.element_size() for each in trained.values())


def state_bytes(state: Mapping[Any, Any]) -> int:
    """Bytes of one parameter's state."""
    values = state.values()
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))


def optimizer_bytes_to_come(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of optimizer state that the first step will create.

    Found by running an optimizer of the same class and settings on one small
    parameter; where its constructor takes something else, two numbers per
    parameter (Adam's) are assumed.
    """
    pending = [
        (group, parameter)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad and parameter not in optimizer.state
    ]
    ratios = {id(group): _state_ratio(optimizer, group) for group, _ in pending}
    return int(sum(ratios[id(group)] * parameter.nbytes for group, parameter in pending))


def _state_ratio(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> float:
    trial = _trial(optimizer, group, PROBE_ELEMENTS)
    if trial is None:
        return 2.0
    (probe,) = trial.param_groups[0]["params"]
    return float(state_bytes(trial.state[probe]) / probe.nbytes)


def update_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes that the optimizer's step holds in passing, beside the state that it leaves.

    A parameter is updated after another, so the largest tells; how much of it, a trial on a
    made-up one does. Where that cannot be, two tensors like it are assumed.
    """
    largest = [
        (group, max((each.nbytes for each in group["params"] if each.requires_grad), default=0))
        for group in optimizer.param_groups
    ]
    return max(
        (int(nbytes * _update_ratio(optimizer, group)) for group, nbytes in largest), default=0
    )


def _update_ratio(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> float:
    trial = _trial(optimizer, group, UPDATE_PROBE_ELEMENTS)
    if trial is None or not account_meter.is_exact():
        return 2.0
    (probe,) = trial.param_groups[0]["params"]
    meter = account_meter.open_meter()
    meter.begin()
    compiler.step(trial)
    return float(meter.take_peak() / probe.nbytes)


def _trial(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], elements: int
) -> torch.optim.Optimizer | None:
    """An optimizer of the same class and settings that has made one step of a small parameter."""
    probe = nn.Parameter(torch.zeros(elements))
    probe.grad = torch.ones_like(probe)
    settings = {name: group[name] for name in optimizer.defaults if name in group}
    try:
        trial = type(optimizer)([probe], **settings)
        compiler.step(trial)
    except (TypeError, ValueError, RuntimeError):
        return None
    return trial
