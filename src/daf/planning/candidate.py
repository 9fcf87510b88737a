"""A selection at one micro-batch size, with its predicted peak, step time and noise."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from daf.core import policy as policies
from daf.core.plan import Plan
from daf.core.profile import Profile
from daf.core.units import format_bytes
from daf.planning.explain import account_of, explain
from daf.planning.noise import expected_noise, served_weights
from daf.planning.options import EXACT, KEPT, WIDTHS
from daf.planning.table import Selection, Table, kept_selection, level_selection

# Outside the account: rounded and small blocks, Python objects, libraries' pages (the solver's).
MARGIN_FRACTION = 0.02
MARGIN_BYTES = 11 * 2**20
NOISE_PRICE = 0.02  # steps, for noise equal to the batch's own: decides between equally fast ones
# Bytes above the floor of plain PyTorch under glibc's defaults, over those when freed blocks are
# returned at once: 1.3 measured on ResNet-18, rounded up. Returning blocks costs time, so the
# defaults stay where the budget has half as much again to spare (design, section 2).
DEFAULT_ALLOCATOR_GROWTH = 1.35
ROOM_FOR_DEFAULT_ALLOCATOR = 1.5


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run a step; no selection takes less than ``bound_ms``."""

    table: Table
    selection: Selection
    bound_ms: float = 0.0

    @property
    def peak_bytes(self) -> int:
        """The process's computed peak, margin excluded."""
        return self.table.peak_bytes(self.selection)

    @property
    def predicted_peak_bytes(self) -> int:
        """The process's predicted peak, margin included."""
        return with_margin(self.table.profile, self.peak_bytes)

    @property
    def step_ms(self) -> float:
        """The predicted time of a whole step."""
        table = self.table
        added_ms = table.cost_of(self.selection) * table.micro_batches
        return table.profile.step_ms(table.micro_batch) + added_ms

    @property
    def noise(self) -> float:
        """The codes' variance over the batch's own, each with all that may be computed from it."""
        return self.table.noise_of(self.selection)

    @property
    def objective(self) -> float:
        """What the planner minimises: step milliseconds plus a small price for noise."""
        return self.step_ms + noise_price_ms(self.table.profile) * self.noise

    def as_plan(self, budget_bytes: int, name: str) -> Plan:
        """Return the executable plan; ``name`` names its policy unless it is a uniform one."""
        profile, size = self.table.profile, self.table.micro_batch
        policy = _policy(self.table, self.selection, name)
        peak = self.predicted_peak_bytes
        above_floor = peak - profile.floor_bytes
        # glibc's defaults stay: plain, with room, and no recycling (faster and smaller).
        is_roomy = profile.floor_bytes + ROOM_FOR_DEFAULT_ALLOCATOR * above_floor <= budget_bytes
        returns = not (policy.name == "plain" and is_roomy and not profile.recycles)
        if not returns:
            peak = profile.floor_bytes + int(DEFAULT_ALLOCATOR_GROWTH * above_floor)
        batches = "the whole batch" if size == profile.batch_size else f"micro-batches of {size}"
        reason = (
            f"{policy.name} with {batches} is predicted to peak at {format_bytes(peak)}, within "
            f"{format_bytes(budget_bytes)}, and to take {self.step_ms:.0f} ms a step"
        )
        return Plan(
            policy,
            size,
            peak,
            return_freed_blocks=returns,
            reason=reason,
            release_gradients=self.table.release_gradients,
            predicted_step_ms=self.step_ms,
            bound_ms=self.bound_ms,
            choices=explain(self.table, self.selection),
            account=MappingProxyType(self.account(peak)),
            added_noise=sum(expected_noise(profile, policy, size).values()),
            bounded_noise=self.noise,
            saved_by_moment=MappingProxyType(self.saved_by_moment()),
            forward_moments=profile.timeline.forward,
        )

    def saved_by_moment(self) -> dict[str, tuple[int, ...]]:
        """Return bytes by moment, as ``Plan.saved_by_moment`` has them."""
        table = self.table
        shown = {"plain": kept_selection(table), "held": self.selection}
        shown["again"] = tuple(filter(table.is_again, self.selection))
        rows = {name: table.usage_of(chosen) - table.base_bytes for name, chosen in shown.items()}
        return {name: tuple(map(int, row[:-1])) for name, row in rows.items()}

    def account(self, predicted_peak_bytes: int) -> dict[str, int]:
        """Return the terms of a predicted peak (bytes), margin included; they add up to it."""
        terms = account_of(self.table, self.selection)
        margin = predicted_peak_bytes - sum(terms.values())
        return terms | {"margin": margin, "predicted_peak": predicted_peak_bytes}


def noise_price_ms(profile: Profile) -> float:
    """Return ``NOISE_PRICE`` in milliseconds."""
    return NOISE_PRICE * profile.step_ms(profile.batch_size)


def with_margin(profile: Profile, peak_bytes: int) -> int:
    """Return a computed peak plus the margin for what the account does not see."""
    share_bytes = MARGIN_FRACTION * max(0, peak_bytes - profile.floor_bytes)
    return int(peak_bytes + share_bytes) + MARGIN_BYTES


def without_margin(profile: Profile, budget_bytes: int) -> int:
    """Return the highest computed peak whose margin stays within the budget."""
    room = budget_bytes - MARGIN_BYTES
    above = max(0, room - profile.floor_bytes)
    guess = room - above + int(above / (1 + MARGIN_FRACTION)) + 2
    while with_margin(profile, guess) > budget_bytes:
        guess -= 1
    return guess


def _policy(table: Table, selection: Selection, name: str) -> policies.Policy:
    profile = table.profile
    weights = MappingProxyType(served_weights(profile) if profile.weights else {})
    options = [table.option(column) for column in selection if column < table.first[-1]]
    treatments = (each for option in options for each in option.treatments.values())
    is_published = any(each.method is policies.Method.RANGED for each in treatments)
    uniform = None if is_published else _uniform_policy(table, selection)
    if uniform is not None and not profile.is_fused:
        return replace(uniform, weights=weights)
    by_site: dict[policies.Site, policies.Treatment] = {
        saving.site: policies.KEEP for saving in profile.savings
    }
    for option in options:
        by_site.update(option.treatments)
    for option in options:
        if option.requires:
            by_site.update(_as_wide_as_parents(profile, option.treatments, by_site))
    policy = policies.Policy(
        name,
        policies.exact_policy().by_need,
        MappingProxyType(by_site),
        rederive=True,
        weights=weights,
        replayed=frozenset(replay.module for replay in table.replays_in(selection)),
        is_planned=True,
    )
    if not profile.is_fused:
        return policy
    chunk_bytes = profile.chunk_bytes
    if profile.score_sites:  # replayed attention needs chunks scaled to the micro-batch
        chunk_bytes = max(1, chunk_bytes * table.micro_batch // profile.batch_size)
    return policies.with_planned_operators(policy, chunk_bytes)


def _as_wide_as_parents(
    profile: Profile,
    treatments: Mapping[policies.Site, policies.Treatment],
    by_site: Mapping[policies.Site, policies.Treatment],
) -> dict[policies.Site, policies.Treatment]:
    narrowest: dict[policies.Site, int] = {}
    for saving in profile.savings:
        if saving.site not in treatments or not saving.may_follow:
            continue
        codes = [by_site[parent] for parent in saving.parents or () if parent in by_site]
        if bits := min((each.bits for each in codes if each.is_code), default=0):
            narrowest[saving.site] = min(bits, narrowest.get(saving.site, bits))
    return {
        site: policies.Treatment(
            policies.Method.ROTATED if bits <= 4 else policies.Method.MINMAX,
            bits,
            on_host=treatments[site].on_host,
        )
        for site, bits in narrowest.items()
    }


def _uniform_policy(table: Table, selection: Selection) -> policies.Policy | None:
    """Return the named policy that equals this selection, if one does."""
    named = {KEPT: policies.plain_policy(), EXACT: policies.exact_policy()}
    named |= {str(width): policies.coded_policy(width) for width in WIDTHS}
    equal = (each for level, each in named.items() if selection == level_selection(table, level))
    return next(equal, None)
