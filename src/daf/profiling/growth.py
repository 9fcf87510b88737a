"""Peaks and profiles of larger batches from those measured: more examples, or larger ones.

A profile is affine in examples. In the size of an example (a sequence's length, say) every number
follows the power that two measured sizes show, between 0 and 2; with one size measured, 2: that of
attention's scores, which grow fastest.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from daf.core.profile import ZERO, Affine, Profile
from daf.memory.device_memory import DeviceMemory
from daf.memory.domain import MemoryDomain
from daf.saved_tensors.observation import Observation

MOST_POWER = 2.0
# Libraries' own memory counts where the process's peak passes the tensors' by this share.
SHOWN_SHARE = 0.2
EVEN_SHARE = 0.05  # of a step's peak, more than smaller ones foretell
_GROWING = ("savings", "calls", "timeline", "passing_bytes")


class PeakGrowth:
    """How peaks grow with examples: two sizes show what does not (workspaces); of one, all does."""

    def __init__(self) -> None:
        self._seen: dict[Hashable, dict[int, Observation]] = {}

    def note(self, found: Observation, kind: Hashable) -> None:
        """Keep a step's peak beside those of the same ``kind`` (of cut and operators)."""
        self._seen.setdefault(kind, {})[found.examples] = found

    def alike(self, found: Observation) -> list[Observation]:
        """Return the last step of every size of ``found``'s kind, the smallest first."""
        kinds = (seen for seen in self._seen.values() if seen.get(found.examples) is found)
        return sorted(next(kinds, {0: found}).values(), key=lambda each: each.examples)

    def is_even(self, found: Observation) -> bool:
        """True if three sizes show that no moment's bytes grow faster than examples."""
        steps = self.alike(found)[-3:]
        if len(steps) < 3 or len({len(each.peak_bytes) for each in steps}) > 1:
            return False
        *sizes, last = (each.examples for each in steps)
        spare = EVEN_SHARE * max(found.peak_bytes, default=0)
        for *before, peak in zip(*(each.peak_bytes for each in steps), strict=True):
            if peak > Affine.through(zip(sizes, before, strict=True)).at(last) + spare:
                return False
        return True

    def peak_bytes(self, found: Observation, examples: int, gradient_bytes: int) -> float:
        """Return the peak of a step of ``found``'s kind beyond gradients and what was held before.

        The process's peaks vary by pages and tensors' are exact: the larger of the two counts.
        """
        alike = self.alike(found)
        tensors = ((each.examples, max(each.peak_bytes, default=0)) for each in alike)
        process = ((each.examples, each.process_bytes) for each in alike)
        growing = (
            Affine.through((n, max(0, nbytes - gradient_bytes)) for n, nbytes in points)
            for points in (tensors, process)
        )
        return max(0.0, *(line.at(examples) for line in growing))


def beside_tensors(observations: Sequence[Observation], memory: MemoryDomain) -> Affine:
    """Return the bytes that libraries may have taken in passing, beside tensors; 0 on a device.

    Only the process's peak shows them, perhaps taken while few tensors were alive.
    """
    if isinstance(memory, DeviceMemory):
        return ZERO
    peaks = [(e.examples, e.process_bytes, max(e.peak_bytes, default=0)) for e in observations]
    if any(process > (1 + SHOWN_SHARE) * tensors for _, process, tensors in peaks):
        return Affine.through((examples, process) for examples, process, _ in peaks)
    return Affine.through((n, max(0, process - tensors)) for n, process, tensors in peaks)


@dataclass(frozen=True, slots=True)
class Growth:
    """How a profile's examples grow: ``ratio`` times as large each.

    ``before``: a profile of examples ``step`` times smaller; None: nothing else was measured.
    """

    ratio: float
    before: Profile | None = None
    step: float = 1.0

    def factor(self, large: float, small: float | None) -> float:
        """Return what a number grows by that was ``small`` ``step`` times earlier."""
        power = MOST_POWER
        if small is not None and self.step > 1.0:
            rise = math.log(large / small) / math.log(self.step) if min(large, small) > 0 else 0.0
            power = min(MOST_POWER, max(0.0, rise))
        return float(self.ratio**power)


def grown(profile: Profile, examples: int, growth: Growth) -> Profile:
    """Return the profile of ``examples`` examples that have grown."""
    if growth.ratio <= 1.0:
        return replace(profile, batch_size=examples)
    before = growth.before
    alike = before if before is not None and _course(before) == _course(profile) else None

    def larger(line: Affine, other: Affine | None) -> Affine:
        small = None if other is None else other.at(profile.batch_size)
        factor = growth.factor(line.at(profile.batch_size), small)
        return Affine(line.fixed * factor, line.per_example * factor)

    changed = {
        name: _mapped(getattr(profile, name), alike and getattr(alike, name), larger)
        for name in _GROWING
    }
    slower = growth.ratio**MOST_POWER
    times = tuple((count, slower * each) for count, each in profile.micro_batch_ms)
    return replace(profile, batch_size=examples, micro_batch_ms=times, **changed)


def _course(profile: Profile) -> tuple[object, ...]:
    sites = tuple((each.site, each.storage, each.content) for each in profile.savings)
    inputs = tuple(len(each.inputs) for each in profile.calls)
    return sites, inputs, len(profile.timeline.transient)


def _mapped(value: Any, other: Any, change: Callable[[Affine, Affine | None], Affine]) -> Any:
    if isinstance(value, Affine):
        return change(value, other)
    if isinstance(value, tuple):
        is_alike = other is not None and len(other) == len(value)
        others = other if is_alike else [None] * len(value)
        return tuple(_mapped(*pair, change) for pair in zip(value, others, strict=True))
    if is_dataclass(value) and not isinstance(value, type):
        names = [each.name for each in fields(value)]
        parts = {n: _mapped(getattr(value, n), other and getattr(other, n), change) for n in names}
        return replace(value, **parts)
    return value
