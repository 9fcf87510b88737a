"""Code speeds corrected by one small step, timed with everything kept and everything coded.

Speeds measured tensor by tensor miss a real step's operators and cache contents.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from daf.core.policy import Method
from daf.core.profile import Profile
from daf.planning.options import Allowed
from daf.planning.table import lawful, level_selection, make_table

# A factor outside this range is a disturbed measurement.
LOWEST, HIGHEST = 0.25, 3.0


def calibrated(profile: Profile, examples: int, coded_ms: float) -> Profile:
    """Return the profile with code speeds corrected.

    ``coded_ms``: forward and backward of ``examples`` with one bit at every site.
    """
    table = make_table(profile, examples, Allowed(replay=False))
    modelled_ms = table.cost_of(lawful(table, level_selection(table, "1")))
    added_ms = coded_ms - profile.forward_backward_ms(examples)
    if modelled_ms <= 0:
        return profile
    factor = min(HIGHEST, max(LOWEST, added_ms / modelled_ms))
    speeds = replace(
        profile.speeds,
        encode=_slower(profile.speeds.encode, factor),
        decode=_slower(profile.speeds.decode, factor),
    )
    return replace(profile, speeds=speeds)


def _slower(speeds: Mapping[Method, float], factor: float) -> dict[Method, float]:
    return {method: speed / factor for method, speed in speeds.items()}
