"""(Profile, budget) to Plan: a pure function, no torch, no device.

The peak of a step is modelled, per policy, as a straight line through two
measured small steps: ``peak(n) = fixed + slope * n``. A step's peak is the
largest of several such lines (design, section 2), so the line through small
sizes can lie below it at large ones; ``MARGIN`` and the measured first step
(``relax``) answer for that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from daf.errors import BudgetError
from daf.plan import Measurement, Plan, Profile, policy_named, proportional_peak
from daf.units import format_bytes

LADDER = ("plain", "exact", "8-bit", "4-bit", "3-bit", "2-bit", "1-bit")
"""Policies from what changes least to what holds least."""

MARGIN_FRACTION = 0.03
MARGIN_BYTES = 4 * 2**20
# Below this many examples a processor is under-used, so lossy codes come before smaller pieces.
SMALLEST_EFFICIENT_PIECE = 8
# What plain PyTorch holds above the floor under glibc's defaults, over what it holds when freed
# blocks are returned at once: 1.3 measured on ResNet-18, rounded up. With half as much again to
# spare, the defaults are left alone, because returning blocks costs time (design, section 2).
DEFAULT_ALLOCATOR_GROWTH = 1.35
ROOM_FOR_DEFAULT_ALLOCATOR = 1.5


def predict_peak(profile: Profile, policy_name: str, micro_batch: int) -> int:
    """The process's peak (bytes) in a step of ``micro_batch`` examples, margin included."""
    points = profile.measurements[policy_name]
    fixed = profile.resident_bytes + profile.gradient_bytes
    peak = _line(points, micro_batch, fixed) + profile.optimizer_bytes
    above_floor = max(0.0, peak - profile.floor_bytes)
    return int(peak + MARGIN_FRACTION * above_floor + MARGIN_BYTES)


def _line(points: tuple[Measurement, ...], examples: int, fixed_bytes: int) -> float:
    first, last = points[0], points[-1]
    if first.examples == last.examples:
        return proportional_peak(last, examples, fixed_bytes)
    slope = (last.peak_bytes - first.peak_bytes) / (last.examples - first.examples)
    # Noise can make a flat line fall; more examples never need less.
    return last.peak_bytes + max(0.0, slope) * (examples - last.examples)


def predict_saved(profile: Profile, policy_name: str, micro_batch: int) -> int:
    """Bytes that saved tensors will hold at most, in proportion to the largest measured step."""
    largest = profile.measurements[policy_name][-1]
    return int(largest.held_bytes * micro_batch / largest.examples)


def _piece_sizes(profile: Profile) -> list[int]:
    if profile.split_refusal:
        return [profile.batch_size]
    sizes = [profile.batch_size]
    while sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // 2))
    return sizes


def _candidates(profile: Profile, names: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    """What to try, best first: whole batch exactly, exactly in pieces, coded, coded in pieces."""
    measured = [name for name in names if name in profile.measurements]
    exact = [name for name in measured if name in ("plain", "exact")]
    lossy = [name for name in measured if name not in exact]
    sizes = _piece_sizes(profile)
    efficient = [size for size in sizes if size == sizes[0] or size >= SMALLEST_EFFICIENT_PIECE]
    yield from ((name, size) for size in efficient for name in exact)
    yield from ((name, size) for size in efficient for name in lossy)
    yield from ((name, size) for size in sizes if size not in efficient for name in measured)


def least_budget(profile: Profile, names: tuple[str, ...] = LADDER) -> int:
    """The least budget (bytes) under which any plan fits."""
    return min(predict_peak(profile, name, size) for name, size in _candidates(profile, names))


def make_plan(profile: Profile, budget_bytes: int, names: tuple[str, ...] = LADDER) -> Plan:
    """The first candidate whose predicted peak is within the budget.

    Args:
        profile: what was measured.
        budget_bytes: the whole process's budget, floor included.
        names: policies allowed, in order of preference; those not measured are passed over.

    Raises:
        BudgetError: none fits; ``least_bytes`` is the least budget that would do.
    """
    for name, size in _candidates(profile, names):
        predicted = predict_peak(profile, name, size)
        if predicted <= budget_bytes:
            return _plan(profile, name, size, predicted, budget_bytes)
    raise BudgetError(
        refusal(profile, budget_bytes, least_budget(profile, names)), least_budget(profile, names)
    )


def _plan(profile: Profile, name: str, size: int, predicted: int, budget_bytes: int) -> Plan:
    above_floor = predicted - profile.floor_bytes
    spacious = profile.floor_bytes + int(above_floor * ROOM_FOR_DEFAULT_ALLOCATOR)
    whole = name == "plain" and size == profile.batch_size
    # Recycling is faster than glibc's defaults as well as smaller, so it is never given up.
    roomy = whole and spacious <= budget_bytes and not profile.recycles
    if roomy:
        predicted = profile.floor_bytes + int(above_floor * DEFAULT_ALLOCATOR_GROWTH)
    pieces = "the whole batch" if size == profile.batch_size else f"pieces of {size}"
    reason = (
        f"{name} with {pieces} is predicted to peak at {format_bytes(predicted)}, "
        f"within {format_bytes(budget_bytes)}"
    )
    return Plan(policy_named(name), size, predicted, not roomy, reason)


def refusal(profile: Profile, budget_bytes: int, least_bytes: int) -> str:
    """Why a budget cannot hold the job, and what to try."""
    held = profile.parameter_bytes + profile.gradient_bytes + profile.optimizer_bytes
    advice = "a smaller batch or a smaller model"
    if profile.split_refusal:
        advice += f" (the batch is not split because {profile.split_refusal})"
    return (
        f"asked for a budget of {format_bytes(budget_bytes)}; this job needs at least "
        f"{format_bytes(least_bytes)}: {format_bytes(profile.floor_bytes)} before the model "
        f"exists, {format_bytes(held)} of parameters, gradients and optimizer state, and the rest "
        f"for a batch of {profile.batch_size}; try budget={least_bytes}, {advice}"
    )


def tightest_first(plan: Plan, profile: Profile, names: tuple[str, ...] = LADDER) -> Plan:
    """The plan for the first full-size step: the policy that holds least, at the plan's size.

    A plan with room for the default allocator needs no such care.
    """
    if not plan.return_freed_blocks:
        return plan
    measured = [each for each in names if each in profile.measurements]
    name = min(measured, key=lambda each: predict_peak(profile, each, plan.micro_batch))
    predicted = predict_peak(profile, name, plan.micro_batch)
    if predicted >= plan.predicted_peak_bytes:
        return plan
    return replace(plan, policy=policy_named(name), predicted_peak_bytes=predicted)


def tighter(
    plan: Plan, profile: Profile, budget_bytes: int, names: tuple[str, ...] = LADDER
) -> Plan | None:
    """The next candidate that is predicted to hold less than ``plan`` does; None if there is none.

    For a step that was refused memory although its plan was predicted to fit.
    """
    for name, size in _candidates(profile, names):
        predicted = predict_peak(profile, name, size)
        if predicted < plan.predicted_peak_bytes:
            return _plan(profile, name, size, predicted, budget_bytes)
    return None


def correct(plan: Plan, profile: Profile, first: Plan, measured_peak_bytes: int) -> int:
    """The plan's peak (bytes) as seen from the measured first step.

    The error of the first step's prediction, if it was too low, is added in
    proportion to how much more the plan holds above the floor.
    """
    missed = measured_peak_bytes - first.predicted_peak_bytes
    if missed <= 0:
        return plan.predicted_peak_bytes
    # A model so small that its peak is lost in the floor would make the proportion meaningless.
    above = max(MARGIN_BYTES, first.predicted_peak_bytes - profile.floor_bytes)
    growth = max(1.0, (plan.predicted_peak_bytes - profile.floor_bytes) / above)
    return int(plan.predicted_peak_bytes + missed * growth)


def settle(
    plan: Plan,
    profile: Profile,
    first: Plan,
    measured_peak_bytes: int,
    budget_bytes: int,
    names: tuple[str, ...] = LADDER,
) -> Plan:
    """The plan to go on with after the measured first step.

    Raises:
        BudgetError: the first step itself passed the budget and nothing tighter exists.
    """
    for name, size in _candidates(profile, names):
        predicted = predict_peak(profile, name, size)
        candidate = _plan(profile, name, size, predicted, budget_bytes)
        not_before = predicted > plan.predicted_peak_bytes
        if (
            not not_before
            and correct(candidate, profile, first, measured_peak_bytes) <= budget_bytes
        ):
            return candidate
    least = correct(first, profile, first, measured_peak_bytes)
    raise BudgetError(refusal(profile, budget_bytes, least), least)
