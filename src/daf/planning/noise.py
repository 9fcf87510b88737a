"""The expected variance that a policy's codes add to the gradient, site by site."""

from __future__ import annotations

from collections import Counter

from daf.core.code_errors import relative_error
from daf.core.policy import KEEP, LOSSY, Method, Policy, Site, Treatment
from daf.core.profile import Profile, Saving
from daf.planning.options import SMALLEST_TREATED_BYTES, noise_per_weight


def expected_noise(profile: Profile, policy: Policy, examples: int) -> dict[Site, float]:
    """Return the variance that each site's code adds to the gradient, relative to the batch's own.

    ``examples``: of a micro-batch. A tensor computed from other codes counts at its own site.
    """
    inside = _replayed_calls(profile, policy)
    lossy = [each for each in profile.savings if each.need in LOSSY and each.treatable]
    saves = Counter(each.site for each in lossy)
    treatments = {
        each.site: _treatment(each, policy, examples) for each in lossy if each.call not in inside
    }
    unit = noise_per_weight(profile)
    found: dict[Site, float] = {}
    for each in lossy:
        if each.call in inside or not (error := _error(each, policy, treatments)):
            continue
        share = unit * profile.weight(each.site) / saves[each.site] * error
        found[each.site] = found.get(each.site, 0.0) + share
    return found


def _treatment(saving: Saving, policy: Policy, examples: int) -> Treatment:
    small = saving.tensor_bytes.at(examples) < SMALLEST_TREATED_BYTES
    return KEEP if small else policy.treatment(saving.need, saving.site)


def _error(saving: Saving, policy: Policy, treatments: dict[Site, Treatment]) -> float:
    own = treatments[saving.site]
    if policy.rederive and saving.teller and treatments.get(saving.teller, KEEP) == KEEP:
        return 0.0  # execution takes an exact tensor where the policy asks for a code
    # Masks are lossless, so no parents of an error.
    parents = [treatments[parent] for parent in saving.parents or () if parent in treatments]
    follows = policy.rederive and own.is_code and parents
    is_derived = own.method is Method.REDERIVE and parents
    if is_derived or (follows and all(_serves(parent, own) for parent in parents)):
        return sum(map(relative_error, parents)) / len(parents)
    return relative_error(own)


def _serves(parent: Treatment, own: Treatment) -> bool:
    """True if ``parent`` is a code with at least the bits that ``own`` asks for."""
    return parent.is_code and parent.bits >= own.bits


def _replayed_calls(profile: Profile, policy: Policy) -> set[int]:
    """Return the calls of replayed modules and all calls below; callers precede their callees."""
    found: set[int] = set()
    for index, call in enumerate(profile.calls):
        if call.module in policy.replayed or call.parent in found:
            found.add(index)
    return found
