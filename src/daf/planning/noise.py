"""The expected variance that a policy's codes add to the gradient, site by site."""

from collections import Counter

from daf.core.code_errors import relative_error
from daf.core.policy import KEEP, SMALL_BYTES, Method, Policy, Site, Treatment
from daf.core.profile import Profile, Saving

# Noise of errors of 1 everywhere, relative to the batch's own, until it is measured. The two are
# equal where every example has one product with each weight; ResNet-20 showed 0.2 to 0.7.
ASSUMED_NOISE = 1.0


def noise_per_weight(profile: Profile) -> float:
    """Return the noise of an error of 1 at a site of weight 1, relative to the batch's own."""
    if profile.noise_per_weight:
        return profile.noise_per_weight
    sites = {each.site for each in profile.lossy_savings}
    return ASSUMED_NOISE / (sum(map(profile.weight, sites)) or 1.0)


def served_weights(profile: Profile) -> dict[Site, float]:
    """Return every lossy site's weight (per tensor) plus that of what its code serves."""
    saves = Counter(each.site for each in profile.lossy_savings)
    found = {site: profile.weight(site) / count for site, count in saves.items()}
    own = dict(found)
    for each in profile.lossy_savings:
        parents = [parent for parent in each.parents or () if parent in own]  # masks lose nothing
        for parent in parents:
            found[parent] += own[each.site] / len(parents) / saves[parent]
    return found


def expected_noise(profile: Profile, policy: Policy, examples: int) -> dict[Site, float]:
    """Return the variance that each site's code adds to the gradient, relative to the batch's own.

    ``examples``: of a micro-batch. A tensor computed from other codes counts at its own site.
    """
    inside = _replayed_calls(profile, policy)
    lossy = profile.lossy_savings
    saves = Counter(each.site for each in lossy)
    treatments: dict[Site, Treatment] = {}
    for each in lossy:
        if each.call not in inside:
            is_small = each.tensor_bytes.at(examples) < SMALL_BYTES
            treatments[each.site] = KEEP if is_small else policy.treatment(each.need, each.site)
    unit = noise_per_weight(profile)
    found: dict[Site, float] = {}
    for each in lossy:
        if each.call in inside or not (error := _error(each, policy, treatments)):
            continue
        share = unit * profile.weight(each.site) / saves[each.site] * error
        found[each.site] = found.get(each.site, 0.0) + share
    return found


def _error(saving: Saving, policy: Policy, treatments: dict[Site, Treatment]) -> float:
    own = treatments[saving.site]
    if policy.rederive and saving.teller and treatments.get(saving.teller, KEEP) == KEEP:
        return 0.0  # execution takes an exact tensor where the policy asks for a code
    # Masks are lossless, so no parents of an error.
    parents = [treatments[parent] for parent in saving.parents or () if parent in treatments]
    follows = policy.rederive and own.is_code and parents
    is_derived = own.method is Method.REDERIVE and parents
    serve = all(parent.is_code and parent.bits >= own.bits for parent in parents)
    if is_derived or (follows and serve):
        return sum(map(relative_error, parents)) / len(parents)
    return relative_error(own)


def _replayed_calls(profile: Profile, policy: Policy) -> set[int]:
    """Return the calls of replayed modules and all calls below; callers precede their callees."""
    found: set[int] = set()
    for index, call in enumerate(profile.calls):
        if call.module in policy.replayed or call.parent in found:
            found.add(index)
    return found
