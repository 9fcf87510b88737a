"""Bit widths of policies that the planner did not make."""

from dataclasses import replace

from daf.core.code_errors import relative_error
from daf.core.policy import Method, Policy, Treatment
from daf.planning.options import WIDTHS

_MOST_ROTATED = 4  # wider codes are 8-bit min-max ones, as in ``coded_policy``


def is_lossy(policy: Policy) -> bool:
    """True if any treatment adds noise to the gradient."""
    treatments = (*policy.by_need.values(), *policy.by_site.values())
    return any(relative_error(each) > 0.0 for each in treatments)


def one_bit_wider(policy: Policy) -> Policy:
    """Return the policy with every lossy code one bit wider, where a wider one exists."""
    return policy.changed(_wider)


def wider_level(level: str) -> str | None:
    """Return the level above ``"1-bit"`` … ``"4-bit"``; None where there is none."""
    width = level.removesuffix("-bit")
    wider = sorted(each for each in WIDTHS if width.isdigit() and each > int(width))
    return f"{wider[0]}-bit" if wider else None


def _wider(treatment: Treatment) -> Treatment:
    if treatment.method is Method.ROTATED and treatment.bits >= _MOST_ROTATED:
        return replace(treatment, method=Method.MINMAX, bits=max(WIDTHS))
    if treatment.method in (Method.ROTATED, Method.DERIVATIVE):
        return replace(treatment, bits=min(_MOST_ROTATED, treatment.bits + 1))
    if treatment.method is Method.MINMAX:
        return replace(treatment, bits=min(max(WIDTHS), treatment.bits + 1))
    return treatment
