"""Prices of codes corrected by what a coded step was measured to take.

Speeds are measured tensor by tensor, where operators do not code while they do
other things, and with caches that a whole step leaves otherwise. One small step
timed as a whole, with everything kept and with everything coded, says by how
much the sum of those prices is off.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from daf.core.policy import Method
from daf.core.profile import Profile
from daf.planning.options import Allowed
from daf.planning.table import lawful, level_selection, make_table

# A factor beyond these is a disturbed measurement, not a price.
LOWEST, HIGHEST = 0.25, 3.0


def calibrated(profile: Profile, examples: int, coded_ms: float) -> Profile:
    """The profile with the speeds of codes corrected.

    Args:
        profile: as it was put together; ``micro_batch_ms`` holds a time for ``examples``.
        examples: of the timed step.
        coded_ms: its forward and backward (milliseconds) with one bit at every site.
    """
    table = make_table(profile, examples, Allowed(replay=False))
    selection = lawful(table, level_selection(table, "1"))
    modelled_ms = float(table.cost_ms[selection].sum())
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
