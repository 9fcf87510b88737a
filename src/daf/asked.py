"""What a session was asked for, checked."""

from __future__ import annotations

import torch
from torch import nn

from daf import governor
from daf.errors import BudgetError, PlatformError, UnknownNameError
from daf.memory import measure
from daf.model_bytes import gradient_bytes
from daf.plan import Policy, plain_policy, policy_for, with_fused_operators
from daf.planning import planner
from daf.units import format_bytes

# A measured small step needs the gradients and about as much again in workspaces and activations.
ROOM_TO_MEASURE = 4


def policy_name(bits: int | str | None, policy: str | None) -> str:
    """Which of the planner's policies or levels was asked for.

    Raises:
        UnknownNameError: none has that name.
        ValueError: ``bits`` names no policy, or both were given.
    """
    if bits is not None and policy is not None:
        raise ValueError(
            f"asked for bits={bits!r} and policy={policy!r}; bits fix every site, so that there is "
            "nothing left for a policy to choose; give one of the two"
        )
    if policy is not None and policy not in planner.POLICIES:
        known = ", ".join(planner.POLICIES)
        raise UnknownNameError(f"asked for the policy {policy!r}; known: {known}")
    return policy_for(bits).name if bits is not None else policy or "optimal"


def fixed_policy(bits: int | str | None, *, fused: bool, has_budget: bool) -> Policy:
    """What a session without a budget does at every step.

    Raises:
        ValueError: ``bits`` names no policy, or operators were to be fused under a budget.
    """
    if fused and has_budget:
        raise ValueError(
            "asked for fused=True under a budget; there the planner measures fused operators and "
            "takes them where that pays; leave fused out, or pass budget=None"
        )
    policy = plain_policy() if bits is None else policy_for(bits)
    return with_fused_operators(policy) if fused else policy


def checked_tolerance(tolerance: float | None) -> float | None:
    """The tolerance, which is 0 or more.

    Raises:
        ValueError: it is not.
    """
    if tolerance is not None and not tolerance >= 0:
        raise ValueError(
            f"asked for a tolerance of {tolerance!r}; it is the noise that codes may add, relative "
            f"to the batch's own: 0 (exact) or more, by default {planner.DEFAULT_TOLERANCE}"
        )
    return None if tolerance is None else float(tolerance)


def refuse_gpu(model: nn.Module) -> None:
    """Budgets bound the process's own memory.

    Raises:
        PlatformError: the model is on another device.
    """
    device = next((each.device for each in model.parameters()), torch.device("cpu"))
    if device.type != "cpu":
        raise PlatformError(
            f"asked for a budget for a model on {device}; budgets bound the process's own memory; "
            "move the model to the CPU, or pass budget=None"
        )


def refuse_without_room(model: nn.Module, budget_bytes: int) -> None:
    """A hopeless budget is still measured, to name the least one, if the machine has room.

    Raises:
        BudgetError: the process with its gradients alone is beyond it, and there is no room.
    """
    gradients = gradient_bytes(model)
    least = measure.resident_bytes() + gradients
    if least > budget_bytes and governor.headroom_bytes() < ROOM_TO_MEASURE * gradients:
        raise BudgetError(
            f"asked for a budget of {format_bytes(budget_bytes)}; the process with its "
            f"model and gradients alone takes {format_bytes(least)}, before any batch, and "
            "there is no room here to measure more; try a budget well above that, or a "
            "smaller model",
            least,
        )
