"""A selection at one micro-batch size, with its predicted peak, step time and noise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from daf.core.plan import Plan
from daf.core.policy import (
    KEEP,
    Method,
    Policy,
    Site,
    Treatment,
    coded_policy,
    exact_policy,
    plain_policy,
    with_planned_operators,
)
from daf.core.profile import Profile, Saving
from daf.core.units import format_bytes
from daf.planning.explain import account_of, explain
from daf.planning.noise import expected_noise
from daf.planning.options import served_weights
from daf.planning.table import Table, kept_selection, level_selection

# Outside the account: rounded blocks, glibc's small blocks, Python objects, and pages of libraries
# (the solver's, those that error handling touches).
MARGIN_FRACTION = 0.02
MARGIN_BYTES = 11 * 2**20
# The price, in steps, of noise equal to the batch's own: so small that it only decides between
# equally fast choices, such as two widths of one code.
NOISE_PRICE = 0.02
# Bytes above the floor of plain PyTorch under glibc's defaults, over those when freed blocks are
# returned at once: 1.3 measured on ResNet-18, rounded up. Returning blocks costs time, so the
# defaults stay where the budget has half as much again to spare (design, section 2).
DEFAULT_ALLOCATOR_GROWTH = 1.35
ROOM_FOR_DEFAULT_ALLOCATOR = 1.5


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run a step; no selection takes less than ``bound_ms``."""

    table: Table
    selection: tuple[int, ...]
    bound_ms: float = 0.0

    def peak_bytes(self, profile: Profile) -> int:
        """Return the process's predicted peak, margin included."""
        return with_margin(profile, self.table.peak_bytes(list(self.selection)))

    def step_ms(self, profile: Profile) -> float:
        """Return the predicted time of a whole step."""
        added = float(self.table.cost_ms[list(self.selection)].sum())
        return profile.step_ms(self.table.micro_batch) + added * pieces_of(profile, self.table)

    @property
    def noise(self) -> float:
        """The codes' variance over the batch's own, each with all that may be computed from it."""
        return float(self.table.noise[list(self.selection)].sum())

    def objective(self, profile: Profile) -> float:
        """Return what the planner minimises: step milliseconds plus a small price for noise."""
        return self.step_ms(profile) + noise_price_ms(profile) * self.noise

    def as_plan(self, profile: Profile, budget_bytes: int, name: str) -> Plan:
        """Return the executable plan; ``name`` names its policy unless it is a uniform one."""
        policy = _policy(profile, self.table, self.selection, name)
        peak = self.peak_bytes(profile)
        returns = not _leaves_the_allocator(profile, policy, peak, budget_bytes)
        if not returns:
            above_floor = peak - profile.floor_bytes
            peak = profile.floor_bytes + int(DEFAULT_ALLOCATOR_GROWTH * above_floor)
        size = self.table.micro_batch
        pieces = "the whole batch" if size == profile.batch_size else f"pieces of {size}"
        reason = (
            f"{policy.name} with {pieces} is predicted to peak at {format_bytes(peak)}, within "
            f"{format_bytes(budget_bytes)}, and to take {self.step_ms(profile):.0f} ms a step"
        )
        return Plan(
            policy,
            size,
            peak,
            return_freed_blocks=returns,
            reason=reason,
            release_gradients=self.table.release_gradients,
            predicted_step_ms=self.step_ms(profile),
            bound_ms=self.bound_ms,
            choices=explain(profile, self.table, self.selection),
            account=MappingProxyType(self.account(profile, peak)),
            added_noise=sum(expected_noise(profile, policy, size).values()),
            bounded_noise=self.noise,
        )

    def account(self, profile: Profile, predicted_peak_bytes: int) -> dict[str, int]:
        """Return the terms of a predicted peak (bytes), margin included; they add up to it."""
        terms = account_of(profile, self.table, self.selection)
        margin = predicted_peak_bytes - sum(terms.values())
        return terms | {"margin": margin, "predicted_peak": predicted_peak_bytes}


def _leaves_the_allocator(
    profile: Profile, policy: Policy, peak_bytes: int, budget_bytes: int
) -> bool:
    """True if glibc's defaults stay: plain, with room, and no recycling (faster and smaller)."""
    spacious = ROOM_FOR_DEFAULT_ALLOCATOR * (peak_bytes - profile.floor_bytes)
    roomy = profile.floor_bytes + spacious <= budget_bytes
    return policy.name == "plain" and roomy and not profile.recycles


def noise_price_ms(profile: Profile) -> float:
    """Return ``NOISE_PRICE`` in milliseconds."""
    return NOISE_PRICE * profile.step_ms(profile.batch_size)


def pieces_of(profile: Profile, table: Table) -> float:
    """Return micro-batches per step; a shorter last one counts in proportion."""
    return profile.batch_size / table.micro_batch


def with_margin(profile: Profile, peak_bytes: int) -> int:
    """Return a computed peak plus the margin for what the account does not see."""
    return (
        int(peak_bytes + MARGIN_FRACTION * max(0, peak_bytes - profile.floor_bytes)) + MARGIN_BYTES
    )


def without_margin(profile: Profile, budget_bytes: int) -> int:
    """Return the highest computed peak whose margin stays within the budget."""
    room = budget_bytes - MARGIN_BYTES
    above = max(0, room - profile.floor_bytes)
    guess = room - above + int(above / (1 + MARGIN_FRACTION)) + 2
    while with_margin(profile, guess) > budget_bytes:
        guess -= 1
    return guess


def _policy(profile: Profile, table: Table, selection: tuple[int, ...], name: str) -> Policy:
    weights = MappingProxyType(served_weights(profile) if profile.weights else {})
    uniform = _uniform_policy(table, selection)
    if uniform is not None and not profile.is_fused:
        return replace(uniform, weights=weights)
    columns = [column for column in selection if column < table.first[-1]]
    replayed = [
        table.replays[column - int(table.first[-1])]
        for column in selection
        if column >= table.first[-1]
    ]
    by_site: dict[Site, Treatment] = {saving.site: KEEP for saving in profile.savings}
    for column in columns:
        by_site.update(table.option(column).treatments)
    for column in columns:
        option = table.option(column)
        if option.requires:
            by_site.update(_as_wide_as_parents(profile, option.treatments, by_site))
    policy = Policy(
        name,
        exact_policy().by_need,
        MappingProxyType(by_site),
        rederive=True,
        weights=weights,
        replayed=frozenset(replay.module for replay in replayed),
    )
    return _operated(policy, profile, table.micro_batch) if profile.is_fused else policy


def _operated(policy: Policy, profile: Profile, examples: int) -> Policy:
    """Add the profile's operators; replayed attention needs chunks scaled to the micro-batch."""
    chunk_bytes = profile.chunk_bytes
    if profile.score_sites:
        chunk_bytes = max(1, chunk_bytes * examples // profile.batch_size)
    return with_planned_operators(policy, chunk_bytes)


def _as_wide_as_parents(
    profile: Profile, treatments: Mapping[Site, Treatment], by_site: dict[Site, Treatment]
) -> dict[Site, Treatment]:
    """Narrow dependent sites' treatments to their parents' codes, as execution requires."""
    asked: dict[Site, int] = {}
    for saving in profile.savings:
        bits = _parents_bits(saving, by_site) if saving.site in treatments else 0
        if bits:
            asked[saving.site] = min(bits, asked.get(saving.site, bits))
    return {
        site: Treatment(
            Method.ROTATED if bits <= 4 else Method.MINMAX, bits, on_host=treatments[site].on_host
        )
        for site, bits in asked.items()
    }


def _parents_bits(saving: Saving, by_site: Mapping[Site, Treatment]) -> int:
    """Return the bits of the narrowest code that it is computed from; 0 if it is not."""
    if not saving.parents or not saving.may_follow:
        return 0
    codes = [by_site[parent] for parent in saving.parents if parent in by_site]
    return min((each.bits for each in codes if each.is_code), default=0)


def _uniform_policy(table: Table, selection: tuple[int, ...]) -> Policy | None:
    """Return the named policy that equals this selection, if one does."""
    if list(selection) == kept_selection(table):
        return plain_policy()
    if sorted(level_selection(table, "exact")) == list(selection):
        return exact_policy()
    for width in (8, 4, 3, 2, 1):
        if sorted(level_selection(table, str(width))) == list(selection):
            return coded_policy(width)
    return None
