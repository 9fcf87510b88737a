"""Bytes of a model and its optimizer: parameters, gradients, and optimizer state to come."""

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn

from daf.memory.domain import MemoryDomain
from daf.profiling.optimizer_probe import trial_step
from daf.torch_compat import compiler
from daf.torch_compat.autograd_graph import bytes_of, strided_parts

PROBE_ELEMENTS = 4096
UPDATE_PROBE_ELEMENTS = 1 << 17  # above what the account knows to the byte


def parameter_bytes(model: nn.Module) -> int:
    """Return the bytes of parameters and buffers, shared ones counted once."""
    tensors = chain(model.parameters(), model.buffers())
    storages = (part.untyped_storage() for each in tensors for part in strided_parts(each))
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def gradient_bytes(model: nn.Module) -> int:
    """Return the bytes of gradients once they all exist."""
    trained = {id(each): each for each in model.parameters() if each.requires_grad}
    return sum(map(bytes_of, trained.values()))


def state_bytes(state: Mapping[Any, Any]) -> int:
    """Return the bytes of one parameter's state."""
    return sum(bytes_of(each) for each in state.values() if isinstance(each, torch.Tensor))


def optimizer_bytes_to_come(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of optimizer state that the first step will create.

    An optimizer of the same class and settings steps one small parameter. Where its constructor
    takes something else, two numbers per parameter (Adam's) are assumed.
    """
    pending = [
        (group, parameter)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad and parameter not in optimizer.state
    ]
    ratios = {id(group): _state_ratio(optimizer, group) for group, _ in pending}
    return int(sum(ratios[id(group)] * bytes_of(parameter) for group, parameter in pending))


def bytes_of_first_update(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of gradients and of state that its parameters do not have yet."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    gradients: int = sum(bytes_of(e) for e in parameters if e.requires_grad and e.grad is None)
    return gradients + optimizer_bytes_to_come(optimizer)


def _state_ratio(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> float:
    if (trial := trial_step(optimizer, group, PROBE_ELEMENTS)) is None:
        return 2.0
    (probe,) = trial.param_groups[0]["params"]
    return float(state_bytes(trial.state[probe]) / probe.nbytes)


def touched_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes that an update reads and writes: parameters, gradients, state so far."""
    return 2 * gradient_bytes(model) + sum(map(state_bytes, optimizer.state.values()))


def update_bytes(optimizer: torch.optim.Optimizer, memory: MemoryDomain) -> int:
    """Return the transient bytes of the optimizer's step, beside the state that it leaves.

    Trial steps measure the bytes for the largest parameter, and whether they add up over a group,
    as in ``foreach`` updates (PyTorch's choice on GPUs). Where no trial runs, two tensors like the
    largest are assumed; on a GPU two like each. The optimizer's state is unchanged.
    """
    found = (_passing_bytes(optimizer, group, memory) for group in optimizer.param_groups)
    return max(found, default=0)


def _passing_bytes(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], memory: MemoryDomain
) -> int:
    sizes: list[int] = [bytes_of(each) for each in group["params"] if each.requires_grad]
    if not sizes:
        return 0
    # Two, since what one parameter's update leaves behind may live on into the next's.
    few, more = (_update_ratio(optimizer, group, count, memory) for count in (2, 4))
    if few is None or more is None:
        return 2 * max(sizes) if group["params"][0].device.type == "cpu" else 2 * sum(sizes)
    of_each = max(0.0, (more - few) / 2)
    return int(of_each * sum(sizes) + max(0.0, few - 2 * of_each) * max(sizes))


def _update_ratio(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], count: int, memory: MemoryDomain
) -> float | None:
    """Return the peak of updating ``count`` equal parameters, in bytes of one; None if unknown."""
    trial = trial_step(optimizer, group, UPDATE_PROBE_ELEMENTS, count)
    meter = memory.meter()
    if trial is None or not meter.is_exact:
        return None
    probe = trial.param_groups[0]["params"][0]
    meter.begin()
    try:
        compiler.step(trial)
    except RuntimeError:  # no room for it
        return None
    return float(meter.take_peak() / probe.nbytes)
