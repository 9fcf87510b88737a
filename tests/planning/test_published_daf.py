"""DAF as published, as a policy: codes of whole ranges, with the widths of least noise that fit."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

import planned
import pytest
import torch
import torch.nn.functional as F
from synthetic import MIB, profile, saving
from torch import Tensor, nn

from daf.core.code_errors import GAUSSIAN_TENSOR_SQUARED_RANGE, ranged_error, relative_error
from daf.core.plan import Plan
from daf.core.policy import KEEP, Method, Need, Treatment, coded_policy, ranged_policy
from daf.core.profile import Profile
from daf.memory import process_memory
from daf.planning import planner
from daf.planning.bit_widths import is_lossy
from daf.planning.candidate import with_margin
from daf.planning.options import WIDTHS, Allowed
from daf.planning.table import kept_selection, make_table
from daf.session.session import Session

POLICIES = ("daf", "daf-channels")
NEEDS = (Need.LINEAR, Need.NORM, Need.PRODUCT, Need.SIGN)


def layers(weights: tuple[float, ...] = ()) -> Profile:
    """Tensors of one size; with weights, as if sensitivities had been measured."""
    savings = [saving(at, len(NEEDS), need, 256_000) for at, need in enumerate(NEEDS)]
    measured = profile(savings, gradients=0, batch=1)
    known = {each.site: weight for each, weight in zip(savings, weights, strict=False)}
    return replace(measured, weights=known)


def at(measured: Profile, share: float, policy: str) -> Plan:
    """The plan with room for this share of what is saved, beside everything else."""
    table = make_table(measured, 1, Allowed())
    base, kept = table.peak_bytes(()), table.peak_bytes(kept_selection(table))
    budget = with_margin(measured, int(base + share * (kept - base)))
    return planned.make_plan(measured, budget, policy=policy, tolerance=1e9)


def codes(plan: Plan) -> list[Treatment]:
    return [each for each in plan.policy.by_site.values() if each.method is Method.RANGED]


@pytest.mark.parametrize("policy", POLICIES)
def test_codes_are_of_the_published_kind_and_everything_else_is_exact(policy: str) -> None:
    plan = at(layers(), 0.62, policy)
    assert plan.policy.name == policy
    assert codes(plan)
    assert all(each.by_channel == (policy == "daf-channels") for each in codes(plan))
    others = {each.method for each in plan.policy.by_site.values()} - {Method.RANGED}
    assert others <= {Method.KEEP, Method.MASK}
    assert not plan.policy.replayed
    assert not plan.policy.operators
    assert plan.micro_batch == 1
    assert is_lossy(plan.policy)


def test_a_smaller_budget_gets_narrower_codes() -> None:
    bits = [sum(each.bits for each in codes(at(layers(), share, "daf"))) for share in (0.75, 0.6)]
    noise = [at(layers(), share, "daf").added_noise for share in (0.75, 0.6)]
    assert bits[0] != bits[1]
    assert 0.0 < noise[0] < noise[1]


def test_importance_decides_which_tensor_has_more_bits() -> None:
    for weights in ((50.0, 1.0, 1.0), (1.0, 50.0, 1.0)):
        measured = layers(weights)
        plan = at(measured, 0.34, "daf")
        widths = [treatment_bits(plan, measured, place) for place in range(2)]
        assert widths[weights.index(50.0)] > widths[1 - weights.index(50.0)]


def treatment_bits(plan: Plan, measured: Profile, place: int) -> int:
    each = measured.savings[place]
    found = plan.policy.treatment(each.need, each.site)
    return 32 if found == KEEP else found.bits


def test_the_noise_is_the_least_of_all_widths_that_fit() -> None:
    measured = layers((3.0, 1.0, 2.0))
    table = make_table(measured, 1, Allowed(replay=False, ranges="tensor", methods=CODES))
    base, kept = table.peak_bytes(()), table.peak_bytes(kept_selection(table))
    limit = int(base + 0.5 * (kept - base))
    choices = [
        range(int(a), int(b)) for a, b in zip(table.first[:-1], table.first[1:], strict=True)
    ]
    fitting = [each for each in product(*choices) if table.peak_bytes(each) <= limit]
    least = min(table.noise_of(each) for each in fitting)
    plan = planned.make_plan(measured, with_margin(measured, limit), policy="daf", tolerance=1e9)
    assert plan.bounded_noise == pytest.approx(least, rel=2e-3)


CODES = frozenset(Method) - {Method.SPILL, Method.RECOMPUTE}


def test_ours_adds_less_noise_at_the_same_budget() -> None:
    measured = layers((1.0, 1.0, 1.0))
    assert 2 * at(measured, 0.5, "quantize").added_noise < at(measured, 0.5, "daf").added_noise


@pytest.mark.parametrize("bits", [*WIDTHS])
def test_errors_are_those_of_gaussian_tensors(bits: int) -> None:
    torch.manual_seed(0)
    values = torch.randn(1_000_000, dtype=torch.float64)
    step = (values.max() - values.min()) / (2**bits - 1)
    shares = ((values - values.min()) / step).frac()
    measured = float((shares * (1 - shares)).mean() * step**2)
    assert ranged_error(bits) == pytest.approx(measured, rel=0.12)
    assert relative_error(Treatment(Method.RANGED, bits)) == ranged_error(bits)
    assert float((values.max() - values.min()) ** 2) == pytest.approx(
        GAUSSIAN_TENSOR_SQUARED_RANGE, rel=0.1
    )


def test_every_lossy_value_code_is_of_ranges() -> None:
    ours, published = coded_policy(3), ranged_policy(3, "channel")
    for need, treatment in ours.by_need.items():
        found = published.by_need[need]
        if treatment.is_code:
            assert found == Treatment(Method.RANGED, treatment.bits, by_channel=True)
        else:
            assert found == treatment


def network() -> nn.Module:
    torch.manual_seed(0)
    rows: list[nn.Module] = []
    for channels in (3, 24, 24, 24):
        convolution = nn.Conv2d(channels, 24, 3, padding=1)
        rows += [convolution, nn.BatchNorm2d(24), nn.ReLU()]
    return nn.Sequential(*rows, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10))


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize(
    "policy", ["daf", pytest.param("daf-channels", marks=pytest.mark.thorough)]
)
def test_a_session_trains_by_it_within_its_budget(policy: str) -> None:
    torch.manual_seed(1)
    batch = torch.randn(32, 3, 48, 48), torch.randint(10, (32,))
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with Session(model, optimizer, "8GB") as roomy:
        roomy.prepare(batch, cross_entropy)
        assert roomy.profile is not None
        kept = planner.kept_peak_bytes(roomy.profile) - roomy.profile.floor_bytes
        fewer = int(0.4 * roomy.profile.plain_saved_bytes)
    budget = process_memory.resident_bytes() + kept - fewer
    with Session(model, optimizer, budget, policy=policy) as session:
        reports = [session.step(batch, cross_entropy) for _ in range(8)]
        used = Counter(each.treatment.method for each in session._capture.sites())
    assert used[Method.RANGED] >= 2
    assert not used.keys() & {Method.ROTATED, Method.MINMAX, Method.RECOMPUTE, Method.REPLAY}
    assert all(each.overrun_bytes == 0 for each in reports)
    assert max(each.peak_bytes for each in reports) <= budget + MIB
    assert reports[-1].loss < reports[0].loss
