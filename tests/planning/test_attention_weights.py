"""Attention that is computed again in backward: what its codes of q, k and v add is measured."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import planned
import pytest
import torch
import torch.nn.functional as F
from synthetic import MIB, saving
from synthetic import profile as made_up_profile
from torch import Tensor, nn

from daf.capture.capture import Capture
from daf.core.code_errors import relative_error
from daf.core.errors import BudgetError
from daf.core.policy import (
    KEEP,
    Method,
    Need,
    Policy,
    Site,
    Treatment,
    coded_policy,
    plain_policy,
    with_chunked_operators,
    with_planned_operators,
)
from daf.core.profile import Profile
from daf.planning.candidate import Candidate
from daf.planning.noise import expected_noise
from daf.planning.options import Allowed
from daf.planning.table import level_selection, make_table
from daf.pool.page_size import DEFAULT_PAGE_BYTES
from daf.pool.paged_pool import PagedStore
from daf.sensitivity.estimate import measure_sensitivity
from daf.sensitivity.gradient_passes import Passes
from daf.sensitivity.tracker import MEASURED_UNDER, Room, measured_under
from daf.session.session import Session

Batch = tuple[Tensor, Tensor]
CODES_ONLY = Allowed(methods=frozenset(Method) - {Method.SPILL}, replay=False)
DRAWS = 12
EXAMPLES = 16


class Attending(nn.Module):
    """One layer of self-attention with dropout, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.value = (nn.Linear(32, 32) for _ in range(3))
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            each(x).unflatten(2, (4, 8)).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(2 * q, 2 * k, v, dropout_p=0.1)
        scores: Tensor = self.head(mixed.transpose(1, 2).flatten(2).mean(1))
        return scores


def batch_of(examples: int = EXAMPLES) -> Batch:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(examples, 32, 32, generator=generator),
        torch.randint(0, 10, (examples,), generator=generator),
    )


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def chunked(whole_bytes: int = 1 << 20, batch_size: int = 4 * EXAMPLES) -> Policy:
    """As a session measures whose plans have chunked operators, on a quarter of its batch."""
    own = made_up_profile([saving(0, 1, Need.PROBABILITY, MIB)], batch=batch_size)
    scores = [saving(0, 2, Need.LINEAR, MIB), saving(1, 2, Need.SCORE, MIB)]
    planned = replace(made_up_profile(scores, batch=batch_size), chunk_bytes=whole_bytes)
    return measured_under(Room(own, planned, 1), EXAMPLES)


def needs_under(policy: Policy) -> dict[Site, Need]:
    model, batch = Attending(), batch_of()
    capture = Capture(model)
    with capture.step(replace(policy, rederive=False), 0, 0, batch=batch):
        cross_entropy(model, batch)
    return {each.site: each.need for each in capture.sites()}


def true_variance(model: nn.Module, site: Site, policy: Policy) -> float:
    """Of the gradient over many seeds of one site; the same weights are dropped every time."""
    samples = []
    for draw in range(DRAWS):
        torch.manual_seed(7)
        with Capture(model).step(policy, 0, 0, batch=batch_of(), draws={site: draw}):
            loss = cross_entropy(model, batch_of())
        gradients = torch.autograd.grad(loss, [*model.parameters()])
        samples.append(torch.cat([each.flatten() for each in gradients]))
    return float(torch.stack(samples).var(0).sum())


def test_estimates_of_queries_keys_and_values_agree_with_brute_force() -> None:
    model, policy = Attending(), chunked()
    torch.manual_seed(7)
    found = measure_sensitivity(model, cross_entropy, batch_of(), policy)
    needs = needs_under(policy)
    scores = [site for site, need in needs.items() if need is Need.SCORE]
    values = [site for site, need in needs.items() if need is Need.PRODUCT]
    assert (len(scores), len(values)) == (2, 1)
    for site in scores + values:
        treatment = policy.treatment(needs[site], site)
        assert treatment.bits == 4
        expected = true_variance(model, site, replace(policy, rederive=False))
        expected /= relative_error(treatment)
        each = found.sites[site]
        error = abs(each.variance_per_error - expected)
        assert error < 4 * each.standard_error + 0.1 * expected, site


def test_a_measurement_has_the_operators_that_plans_have_with_as_many_chunks() -> None:
    """A quarter of the batch with a quarter's chunks saves at the same sites as all of it."""
    weights_bytes = 4 * EXAMPLES * 4 * 32 * 32  # a quarter's
    just_chunked = 4 * 4 * weights_bytes - 4  # attention's chunks are a quarter of others'
    assert Need.SCORE in needs_under(chunked(just_chunked)).values()
    assert Need.SCORE not in needs_under(chunked(just_chunked + 4)).values()
    assert measured_under(None, EXAMPLES) is MEASURED_UNDER
    own = made_up_profile([saving(index, 2, Need.NORM, MIB) for index in range(2)])
    same = replace(own, savings=own.savings[:1], chunk_bytes=MIB)
    assert measured_under(Room(own, same, 1), EXAMPLES) is MEASURED_UNDER
    assert Need.PROBABILITY in needs_under(MEASURED_UNDER).values()


@pytest.mark.parametrize("examples", [EXAMPLES, 10])
def test_pieces_of_the_batch_run_the_same_operators(
    examples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose weights PyTorch's own would hold at once, when everything is kept."""
    seen: dict[int, set[Need]] = {}
    sketch = Passes.sketch

    def watched(self: Passes, batch: Batch, policy: Policy, *rest: Any, **options: Any) -> Tensor:
        found = sketch(self, batch, policy, *rest, **options)
        seen.setdefault(len(batch[0]), set()).update(each.need for each in self.capture.sites())
        return found

    monkeypatch.setattr(Passes, "sketch", watched)
    weights_bytes = 4 * examples * 4 * 32 * 32
    policy = replace(chunked(), chunk_bytes=4 * weights_bytes - 4)
    batch = tuple(each[:examples] for each in batch_of())
    measure_sensitivity(Attending(), cross_entropy, batch, policy)
    assert set(seen) == {examples, 4 if examples == EXAMPLES else 2}
    assert all(Need.SCORE in needs for needs in seen.values())


class Stack(nn.Module):
    """Layers of attention one behind the other, large enough to be worth a plan."""

    def __init__(self, layers: int = 3, width: int = 64) -> None:
        super().__init__()
        torch.manual_seed(0)
        attention = partial(nn.MultiheadAttention, width, 4, dropout=0.1, batch_first=True)
        self.layers = nn.ModuleList(attention() for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.head = nn.Sequential(nn.Linear(width, 10), nn.BatchNorm1d(10))  # batches stay whole

    def forward(self, x: Tensor) -> Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            y = norm(x)
            x = x + layer(y, y, y, need_weights=False)[0]
        scores: Tensor = self.head(x.mean(1))
        return scores


def session_for(model: nn.Module, budget: str | int, **options: Any) -> Session:
    session = Session(model, torch.optim.SGD(model.parameters(), lr=0.01), budget, **options)
    session._plan_controller.selector.allow(CODES_ONLY)
    return session


def error_of(model: nn.Module, batch: Batch, policy: Policy, draws: int = 6) -> float:
    """The plain way: the mean squared distance from the gradient without codes."""

    def gradient(policy: Policy, index: int) -> Tensor:
        torch.manual_seed(7)
        with Capture(model).step(policy, 0, index, batch=batch):
            loss = cross_entropy(model, batch)
        gradients = torch.autograd.grad(loss, [*model.parameters()])
        return torch.cat([each.flatten() for each in gradients]).double()

    exact = gradient(plain_policy(), 0)
    found = [(gradient(policy, 100 + n) - exact).square().sum() for n in range(draws)]
    return float(torch.stack(found).mean())


@pytest.mark.thorough
def test_a_tight_session_gives_queries_and_keys_four_bits_and_tells_their_noise() -> None:
    torch.manual_seed(1)
    batch = torch.randn(256, 128, 64), torch.randint(0, 10, (256,))
    with session_for(Stack(), "10MB") as session, pytest.raises(BudgetError) as caught:
        session.prepare(batch, cross_entropy)
    assert caught.value.least_bytes is not None
    # A little above it, where sensitivities have no room to be measured, the same is told.
    with session_for(Stack(), caught.value.least_bytes + 8 * MIB) as session:
        session.prepare(batch, cross_entropy)
        told_bytes = session.least_feasible_bytes()
    assert told_bytes == pytest.approx(caught.value.least_bytes, abs=8 * MIB)
    roomy_bytes = caught.value.least_bytes + 40 * MIB
    with session_for(Stack(), roomy_bytes) as session:
        plan = session.prepare(batch, cross_entropy)
        profile = session._plan_controller.selector.profiles.of(plan)
        found, reported_bytes = session.sensitivity, session.least_feasible_bytes()
        learnt_bytes = session._plan_controller.selector.least_bytes()
    assert reported_bytes is not None
    assert learnt_bytes < reported_bytes
    assert found is not None
    assert found.batch_variance is not None
    scores = [each.site for each in profile.savings if each.need is Need.SCORE]
    assert len(scores) == 6
    assert set(scores) <= found.sites.keys()
    # What was learnt lets a session that is given it begin where another could not.
    between = reported_bytes - (reported_bytes - learnt_bytes) // 4
    with session_for(Stack(), between, sensitivity=found) as session:
        assert session.prepare(batch, cross_entropy).predicted_peak_bytes <= between
        assert session.least_feasible_bytes() == session._plan_controller.selector.least_bytes()
    least = partial(planned.least_budget, allowed=CODES_ONLY)
    saved_bytes = least(replace(profile, weights={})) - least(profile)
    assert saved_bytes >= 2 * batch[0].numel() / 2  # half a byte of a layer's q and k each
    plan = planned.make_plan(profile, least(profile), allowed=CODES_ONLY)
    four = Treatment(Method.ROTATED, 4, whole=True)
    assert four in {plan.policy.by_site[site] for site in scores} <= {four, KEEP}
    own = found.batch_variance * found.examples / len(batch[0])
    told = sum(expected_noise(profile, plan.policy, plan.micro_batch).values()) * own
    assert told == pytest.approx(error_of(Stack(), batch, plan.policy), rel=0.5)


def chunked_profile(model: nn.Module, batch: Batch) -> Profile:
    """As sessions measure it whose plans may compute attention again."""
    with session_for(model, "8GB") as session:
        session.prepare(batch, cross_entropy)
        with session._keeper.unbounded():
            profile = session._plan_controller.step_profiles.profile(
                session._context(batch, cross_entropy), 10**10, own=session.profile
            )
    assert profile.score_sites
    return profile


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_parts_of_one_memory_have_a_code_each_in_the_account_too(bits: int) -> None:
    """q, k and v of one projection lie side by side, and are as large as each other."""
    model, batch = Stack(layers=1), (torch.randn(128, 128, 64), torch.zeros(128).long())
    profile = chunked_profile(model, batch)
    parts = [each for each in profile.savings if each.site.operator == "multi_head_attention"]
    q_k_v = [each for each in parts if each.need in (Need.SCORE, Need.PRODUCT)]
    assert len({each.storage for each in q_k_v}) == 1
    assert len({each.content for each in q_k_v}) == 3
    table = make_table(profile, 128, CODES_ONLY)
    family = next(each for each in table.options if q_k_v[0].site in each[-1].treatments)
    coded = next(each for each in family if each.level == str(max(4, bits)))
    read = {each.read for each in q_k_v}
    reported_bytes = sum(each.nbytes for each in coded.spans if each.first not in read)
    capture = Capture(model)
    policy = with_planned_operators(coded_policy(bits), profile.chunk_bytes)
    with capture.step(policy, 0, 0, batch=batch):
        cross_entropy(model, batch)
    held = [each.held_bytes for each in capture.sites() if each.site in coded.treatments]
    assert len(held) == 3
    assert reported_bytes == sum(held)


def test_smaller_pieces_of_a_batch_save_what_the_profile_says() -> None:
    """Attention whose whole batch is worth chunks is computed again in pieces that are not."""
    torch.manual_seed(1)
    batch = torch.randn(128, 128, 64), torch.randint(0, 10, (128,))
    model = Stack(layers=1)
    model.head = nn.Linear(64, 10)  # so that the batch may be cut
    profile = chunked_profile(model, batch)
    table = make_table(profile, 8, CODES_ONLY)
    plan = Candidate(table, level_selection(table, "4")).as_plan(10**10, "4-bit")
    assert plan.micro_batch == 8
    capture, part = Capture(model), tuple(each[:8] for each in batch)
    with capture.step(plan.policy, 0, 0, batch=part):
        cross_entropy(model, part)
    needs = {each.site: each.need for each in capture.sites()}
    expected = {each.site: each.need for each in profile.savings}
    assert {site: needs.get(site) for site in expected} == expected


def test_the_last_piece_of_a_batch_goes_the_same_way_though_it_is_smaller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It had fewer examples than attention computes again, and saved what no plan had chosen for.

    What a plan says of another operator's saves is left: the last piece then ended in CodecError.
    """
    torch.manual_seed(1)
    batch = torch.randn(121, 128, 64), torch.randint(0, 10, (121,))
    model = Stack(layers=1)
    model.head = nn.Linear(64, 10)  # so that the batch may be cut
    profile = chunked_profile(model, batch)
    table = make_table(profile, 8, CODES_ONLY)
    plan = Candidate(table, level_selection(table, "4")).as_plan(10**10, "4-bit")
    expected = {each.site: each.need for each in profile.savings}
    pieces = []

    def needs_of(capture: Capture) -> dict[Site, Need]:
        return {each.site: each.need for each in capture.sites() if each.site in expected}

    with session_for(model, "8GB") as session:
        session.prepare(batch, cross_entropy)
        capture, selector = session._capture, session._plan_controller.selector
        selector.settle_on(plan)
        read = Capture.step

        def watched(self: Capture, policy: Policy, *arguments: Any, **options: Any) -> Any:
            pieces.append(policy)
            return read(self, policy, *arguments, **options)

        monkeypatch.setattr(Capture, "step", watched)
        session.step(batch, cross_entropy)
        assert len(pieces) >= 16
        assert pieces[-1].chunk_bytes == (pieces[-2].chunk_bytes or 0) // 8
        assert needs_of(capture) == expected  # of the last piece
    part = tuple(each[:1] for each in batch)
    capture = Capture(model)
    with capture.step(replace(plan.policy, chunk_bytes=8 << 20), 0, 0, batch=part):
        cross_entropy(model, part).backward()
    found = needs_of(capture)
    assert Need.TWO_VALUED in found.values()
    assert Need.TWO_VALUED not in expected.values()
    masked = {each.treatment for each in capture.sites() if each.need is Need.TWO_VALUED}
    assert masked == {Treatment(Method.MASK, 1)}


def test_no_plane_of_queries_and_keys_is_given_up() -> None:
    """Narrower than four bits they would bias the gradient; v's planes go, all but the first."""
    policy = coded_policy(4, score_bits=4)
    policy = replace(with_chunked_operators(policy, 1 << 18), rederive=False)
    model, batch = Attending(), batch_of()
    capture = Capture(model, PagedStore())
    with capture.step(policy, 0, 0, batch=batch):
        loss = cross_entropy(model, batch)
        capture.pool_bytes = 1
    evicted = {each.need: each.evicted_bytes for each in capture.sites()}
    assert evicted[Need.SCORE] == 0
    assert evicted[Need.PRODUCT] == 3 * DEFAULT_PAGE_BYTES  # of one plane each
    loss.backward()
