"""Checks of a session's arguments, and the treatments that its execution can carry out."""

from collections.abc import Mapping
from numbers import Integral, Real
from os import PathLike
from types import MappingProxyType, NoneType
from typing import Any, Literal

from torch import nn

from daf.budget.request import Budget, Scope
from daf.capture.capture import Capture
from daf.core import policy as policies
from daf.core.errors import OptionError, PlatformError
from daf.memory import glibc
from daf.memory.device_memory import DeviceMemory
from daf.memory.domain import MemoryDomain, ProcessMemory, memory_of
from daf.offload.spill import SpillOptions
from daf.planning import planner
from daf.planning.options import Allowed
from daf.planning.policies import strategy_named
from daf.sensitivity.result import Sensitivity
from daf.step.gradient_release import GradientRelease

Operators = Literal["auto", "pytorch"]
_METHODS = frozenset(policies.Method)
# The kinds that an argument may have, and the same in words.
_KINDS: Mapping[str, tuple[tuple[type, ...], str]] = MappingProxyType(
    {
        "seed": ((Integral,), "a whole number from 0 up to 2**64 - 1"),
        "fused": ((bool,), "True or False"),
        "allow_batchnorm_split": ((bool,), "True or False"),
        "baseline_bytes": ((Integral, NoneType), "bytes, a whole number; None measures them"),
        "batch_dim": ((Integral, list, tuple, Mapping, NoneType), "a dimension, or one a tensor"),
        "spill": ((SpillOptions, NoneType), "a daf.offload.spill.SpillOptions, or None"),
        "sensitivity": ((bool, Sensitivity), "a bool, or a daf.sensitivity.result.Sensitivity"),
        "rollback": ((bool, str, PathLike), "a bool, or a folder"),
    }
)
_PASSING_SHARE = 16
_LEAST_PASSING_BYTES, _MOST_PASSING_BYTES = 2**21, 2**26


def policy_name(bits: int | str | None, policy: str | None, *, has_budget: bool) -> str:
    """Return the name of the planner's policy or level that was asked for; "optimal" by default.

    Raises UnknownNameError for names and bits that there are not, OptionError for both at once.
    """
    if bits is not None and policy is not None:
        asked = f"bits={bits!r} and policy={policy!r}"
        raise OptionError(f"asked for {asked}; bits leave no choice; give one of the two")
    name = policies.policy_for(bits).name if bits is not None else policy or "optimal"
    if has_budget or policy is not None:
        strategy_named(name)
    return name


def refuse_what_sends_nothing(
    bits: int | str | None, policy: str | None, *, has_budget: bool
) -> None:
    """Raise OptionError for ``host_bytes`` where nothing would send codes to the host."""
    if not has_budget and bits in (None, "plain"):
        raise OptionError(
            "asked for host_bytes without budget and bits, so that nothing is coded; pass one of "
            "them, or leave host_bytes out"
        )
    if has_budget and (bits is not None or policy not in (None, "optimal")):
        asked = f"host_bytes with bits={bits!r} and policy={policy!r}"
        raise OptionError(
            f"asked for {asked}; under a budget only the optimal policy sends codes to the host; "
            "leave the two out, or host_bytes"
        )


def may_fuse(operators: str, *, fused: bool) -> bool:
    """Return False if PyTorch's own operators were asked for; OptionError for other values."""
    if operators not in ("auto", "pytorch") or (fused and operators == "pytorch"):
        asked = f"operators={operators!r} and fused={fused}"
        raise OptionError(f"asked for {asked}; operators is 'auto', or leave fused out")
    return operators == "auto"


def fixed_policy(
    bits: int | str | None, *, fused: bool, has_budget: bool, on_host: bool = False
) -> policies.Policy:
    """Return the policy of a session without a budget.

    Raises OptionError for ``fused`` under a budget, UnknownNameError for bits that there are not.
    """
    if fused and has_budget:
        raise OptionError("asked for fused=True under a budget, which fuses too; leave fused out")
    policy = policies.plain_policy() if bits is None else policies.policy_for(bits)
    policy = policies.with_host_codes(policy) if on_host else policy
    return policies.with_fused_operators(policy) if fused else policy


def checked_tolerance(tolerance: float | None, bits: int | str | None = None) -> float | None:
    """Return the tolerance as a float, or None; OptionError unless 0 or more, as the bits allow."""
    is_number = isinstance(tolerance, Real)
    if tolerance == 0 and bits not in (None, "plain", "exact"):
        asked = f"asked for bits={bits!r} and a tolerance of 0, which treats exactly"
        raise OptionError(f"{asked}; give one of the two, or bits='exact'")
    if tolerance is not None and not (is_number and tolerance >= 0):
        usual = f"0 (exact) or more, such as {planner.DEFAULT_TOLERANCE:.2g}"
        raise OptionError(f"asked for a tolerance of {tolerance!r}; give {usual}")
    return None if tolerance is None else float(tolerance)


def checked_norm(max_grad_norm: float | None) -> float | None:
    """Return the most that a gradient's norm may be, or None; OptionError if not above 0."""
    is_number = isinstance(max_grad_norm, Real)
    if max_grad_norm is not None and not (is_number and max_grad_norm > 0):
        raise OptionError(f"asked for max_grad_norm={max_grad_norm!r}; it is above 0, or None")
    return max_grad_norm


def check_trained(model: Any, *optimizers: Any) -> None:
    """Raise OptionError unless these are a module and optimizers, not their classes."""
    parts = ("step", "param_groups")
    for each in optimizers:
        if isinstance(each, type) or not all(hasattr(each, name) for name in parts):
            raise OptionError(f"asked for the optimizer {each!r:.80}; give a torch.optim.Optimizer")
    if not isinstance(model, nn.Module):
        raise OptionError(f"asked for the model {model!r:.80}; give a torch.nn.Module")


def check_kinds(given: Mapping[str, Any]) -> None:
    """Raise OptionError for an argument of another kind or range than it may have."""
    for name, (kinds, words) in _KINDS.items():
        value = given[name]
        is_far = name == "seed" and isinstance(value, Integral) and not 0 <= int(value) < 2**64
        if not isinstance(value, kinds) or is_far:
            raise OptionError(f"asked for {name}={value!r:.80}; it is {words}")


def check_state(state: Any, keys: tuple[str, ...]) -> None:
    """Raise OptionError for what no session's ``state_dict`` returned: it lacks one of the keys."""
    if not isinstance(state, Mapping) or not set(keys) <= state.keys():
        raise OptionError(f"asked to go on from {state!r:.80}; give what state_dict() returned")


def checked_scope(scope: Scope, memory: MemoryDomain) -> Scope:
    """Return the scope, or raise OptionError: it is "process", or on the CPU "tree"."""
    if scope not in ("process", "tree") or (scope == "tree" and isinstance(memory, DeviceMemory)):
        raise OptionError(
            f"asked for scope={scope!r} on {memory.name}; scope is 'process', or on the CPU 'tree'"
        )
    return scope


def asked_memory(model: nn.Module, budget: Budget) -> MemoryDomain:
    """Return the memory that a budget bounds; PlatformError if it cannot be bounded there."""
    try:
        memory = memory_of(model)
    except PlatformError:
        if budget is not None:
            raise
        return ProcessMemory()
    # What an earlier job left cached or free is no floor of this one's.
    if budget is not None and isinstance(memory, DeviceMemory):
        memory.release_cached()
    elif budget is not None:
        glibc.return_free_memory()
    return memory


def refuse_budget_elsewhere(model: nn.Module, memory: MemoryDomain) -> None:
    """Raise PlatformError if a model has left the memory that the session's budget bounds."""
    found = memory_of(model)
    if found.name != memory.name:
        raise PlatformError(
            f"asked for a budget for a model on {found.name}; this session was made for one in "
            f"the memory of {memory.name}; make another session where the model is now"
        )


def allowed_treatments(
    capture: Capture, release: GradientRelease, budget_bytes: int | None, *, can_spill: bool
) -> Allowed:
    """Return the treatments that plans may use; bound the bytes of codes in transit."""
    host, can_release = capture.host, release.can_release
    passing = 0
    if host is not None and budget_bytes is not None:
        passing = passing_bytes(budget_bytes)
        host.allow(staging_bytes=passing // 2, raw_bytes=passing // 2)
    return Allowed(
        methods=_METHODS if can_spill else _METHODS - {policies.Method.SPILL},
        release_gradients=can_release,
        must_release=can_release and release.mode is True,
        release_refusal=release.whole_refusal,
        host_bytes=0 if host is None else host.limit_bytes,
        passing_bytes=passing,
    )


def passing_bytes(budget_bytes: int) -> int:
    """Return the bytes of a device's budget that codes in transit to and from the host may take."""
    return min(max(budget_bytes // _PASSING_SHARE, _LEAST_PASSING_BYTES), _MOST_PASSING_BYTES)
