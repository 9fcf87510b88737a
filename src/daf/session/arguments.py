"""What a session was asked for, checked."""

from __future__ import annotations

from torch import nn

from daf import budget as governor
from daf.core.errors import BudgetError, PlatformError, UnknownNameError
from daf.core.policy import Policy, plain_policy, policy_for, with_fused_operators, with_host_codes
from daf.core.units import format_bytes
from daf.memory.device_memory import DeviceMemory
from daf.memory.domain import MemoryDomain, ProcessMemory, memory_of
from daf.planning import planner
from daf.profiling.model_memory import gradient_bytes

# A measured small step needs the gradients and about as much again in workspaces and activations.
ROOM_TO_MEASURE = 4
_PASSING_SHARE = 16
_LEAST_PASSING_BYTES, _MOST_PASSING_BYTES = 2**21, 2**26


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


def refuse_what_sends_nothing(
    bits: int | str | None, policy: str | None, *, has_budget: bool
) -> None:
    """Where codes may wait on the host, something must send them.

    Raises:
        ValueError: without a budget nothing is coded; or levels and policies that are for
            comparison, which know only the device, would choose.
    """
    if not has_budget and bits in (None, "plain"):
        raise ValueError(
            "asked for host_bytes without a budget and without bits, so that nothing is coded; "
            "pass a budget or bits, or leave host_bytes out"
        )
    if has_budget and (bits is not None or policy not in (None, "optimal")):
        raise ValueError(
            f"asked for host_bytes with bits={bits!r} and policy={policy!r}; under a budget only "
            "the optimal policy sends codes to the host; leave the two out, or host_bytes"
        )


def passing_bytes(budget_bytes: int) -> int:
    """What of a device's budget codes may take on their way between it and the host."""
    return min(max(budget_bytes // _PASSING_SHARE, _LEAST_PASSING_BYTES), _MOST_PASSING_BYTES)


def fixed_policy(
    bits: int | str | None, *, fused: bool, has_budget: bool, on_host: bool = False
) -> Policy:
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
    policy = with_host_codes(policy) if on_host else policy
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


def asked_memory(model: nn.Module, budget: governor.Budget) -> MemoryDomain:
    """The memory that a session's budget bounds, and whose peak it tells.

    Raises:
        PlatformError: there is a budget, and the model's memory cannot be bounded.
    """
    try:
        memory = memory_of(model)
    except PlatformError:
        if budget is not None:
            raise
        return ProcessMemory()
    if budget is not None and isinstance(memory, DeviceMemory):
        memory.release_cached()  # what an earlier job left for reuse is no floor of this one's
    return memory


def refuse_budget_elsewhere(model: nn.Module, memory: MemoryDomain) -> None:
    """A budget may be given later than the session was made, which then told the process's peak.

    Raises:
        PlatformError: the model is where the session bounds nothing.
    """
    found = memory_of(model)
    if found.name != memory.name:
        raise PlatformError(
            f"asked for a budget for a model on {found.name}; this session was made for one in "
            f"the memory of {memory.name}; make another session where the model is now"
        )


def refuse_without_room(model: nn.Module, budget_bytes: int, memory: MemoryDomain) -> None:
    """A hopeless budget is still measured, to name the least one, if the machine has room.

    Raises:
        BudgetError: what is held with the gradients alone is beyond it, and there is no room.
    """
    gradients = gradient_bytes(model)
    least = memory.held_bytes() + gradients
    if least > budget_bytes and governor.room_bytes(memory) < ROOM_TO_MEASURE * gradients:
        raise BudgetError(
            f"asked for a budget of {format_bytes(budget_bytes)}; {memory.name} with its "
            f"model and gradients alone takes {format_bytes(least)}, before any batch, and "
            "there is no room here to measure more; try a budget well above that, or a "
            "smaller model",
            least,
        )
