"""A session whose plan recomputes by the graph of values: plain's training bit for bit, in less."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf.core.errors import BudgetError, SavedTensorError
from daf.core.plan import Plan
from daf.core.policy import KEEP, RECOMPUTE, Method, Policy, policy_for
from daf.core.profile import Profile
from daf.memory import process_memory
from daf.memory.glibc import return_free_memory
from daf.planning import planner
from daf.planning.options import RECOMPUTED, Allowed
from daf.planning.table import make_table
from daf.session.session import Session

Batch = tuple[Tensor, Tensor]
MIB = 2**20


class Dense(nn.Module):
    """As DenseNet: every layer reads the concatenation of all that came before."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm2d(24 + 12 * at) for at in range(4))
        self.layers = nn.ModuleList(nn.Conv2d(24 + 12 * at, 12, 3, padding=1) for at in range(4))
        self.stem = nn.Conv2d(3, 24, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.stem(x)]
        for norm, layer in zip(self.norms, self.layers, strict=True):
            parts.append(layer(F.relu(norm(torch.cat(parts, 1)))))
        return torch.cat(parts, 1).mean((2, 3))


class Residual(nn.Module):
    """Normalisations, activations and a sum, in place where users write it so."""

    def __init__(
        self, activation: Callable[[Tensor], Tensor], *, depth: int = 4, inplace: bool = False
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 24, 3, padding=1)
        self.layers = nn.ModuleList(nn.Conv2d(24, 24, 3, padding=1) for _ in range(depth))
        self.norms = nn.ModuleList(nn.BatchNorm2d(24) for _ in range(depth))
        self.activation, self.inplace = activation, inplace

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            y = norm(layer(x))
            if self.inplace:
                y += x
                x = F.relu(y, inplace=True)
            else:
                x = self.activation(y + x)
        return x.mean((2, 3))


class Attending(nn.Module):
    """Attention whose weights are dropped: a mask holds every bit of the noise."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 4, stride=4)
        self.layers = nn.ModuleList(nn.Linear(32, 96) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).mT
        for layer in self.layers:
            q, k, v = layer(x).unflatten(2, (3, 4, 8)).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
            x = x + y.transpose(1, 2).flatten(2)
        return x.mean(1)


def functional(model: nn.Module, x: Tensor) -> Tensor:
    """The same network as ``Residual`` from its parameters, without a module's call."""
    named = dict(model.named_parameters())
    x = F.conv2d(x, named["stem.weight"], named["stem.bias"], padding=1)
    for at in range(4):
        y = F.conv2d(x, named[f"layers.{at}.weight"], named[f"layers.{at}.bias"], padding=1)
        weight, bias = named[f"norms.{at}.weight"], named[f"norms.{at}.bias"]
        y = F.batch_norm(y, None, None, weight, bias, training=True)
        x = F.silu(y + x)
    return x.mean((2, 3))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "concatenations": Dense,
    "residual": lambda: Residual(F.silu),
    "in place": lambda: Residual(F.relu, depth=9, inplace=True),
    "hardswish": lambda: Residual(F.hardswish),
    "dropped attention": Attending,
}
SHARES = {
    "concatenations": 0.72,
    "residual": 0.72,
    "in place": 0.8,
    "hardswish": 0.72,
    "dropped attention": 0.65,
}
LONG = ("residual", "in place", "hardswish")  # the first is in other tests, too


def images() -> Batch:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(32, 3, 48, 48, generator=generator), torch.arange(32) % 12


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def functional_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(functional(model, batch[0]), batch[1])


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)


def trained_plainly(model: nn.Module, loss_fn: Any, batch: Batch, steps: int) -> dict[str, Tensor]:
    optimizer = sgd(model)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()
    return model.state_dict()


def return_what_earlier_tests_held() -> None:
    """What is free but resident would be returned in mid-test, and numbers would not add up."""
    gc.collect()
    return_free_memory()


@cache
def kept_and_saved(name: str, loss_fn: Any) -> tuple[int, int]:
    """What keeping everything takes above the floor, and what plain PyTorch saves of that."""
    trained_plainly(made(name), loss_fn, images(), 1)  # what libraries keep is no part of it
    return_what_earlier_tests_held()
    model = made(name)
    with Session(model, sgd(model), "8GB", tolerance=0.0, operators="pytorch") as roomy:
        roomy.prepare(images(), loss_fn)
        profile = roomy.profile
    assert profile is not None
    return planner.kept_peak_bytes(profile) - profile.floor_bytes, profile.plain_saved_bytes


def session_at(
    name: str, share: float, loss_fn: Any, model: nn.Module | None = None, **terms: Any
) -> Session:
    """Return a prepared session with room for this share of what plain PyTorch would save."""
    above, saved = kept_and_saved(name, loss_fn)
    return_what_earlier_tests_held()
    model = model or made(name)
    budget = process_memory.resident_bytes() + above - int((1.0 - share) * saved)
    session = Session(model, sgd(model), budget, tolerance=0.0, operators="pytorch", **terms)
    session.prepare(images(), loss_fn)
    return session


def methods(session: Session) -> Counter[Method]:
    return Counter(each.treatment.method for each in session._capture.sites())


def planned_bytes(profile: Profile, policy: Policy) -> float:
    """Return the most that the planner's table holds for backward under a policy."""
    table = make_table(profile, profile.batch_size, Allowed(replay=False, widths=()))
    first, chosen = table.first, []
    for family, options in zip(table.families, table.options, strict=True):
        sites = {each.site for each in family}
        wanted = {s: t for s, t in policy.by_site.items() if s in sites and t != KEEP}
        place = next(at for at, each in enumerate(options) if each.treatments == wanted)
        chosen.append(int(first[len(chosen)]) + place)
    leaves = {leaf for column in chosen for leaf in table.leaves_of(column)}
    return float((table.usage_of([*chosen, *leaves]) - table.base_bytes).max())


@pytest.mark.usefixtures("whole_batches_are_fastest")
@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[pytest.mark.thorough] * (each in LONG)) for each in MODELS]
)
def test_training_is_plains_bit_for_bit_and_holds_what_was_planned(name: str) -> None:
    batch = images()
    expected = trained_plainly(made(name), loss_of, batch, 3)
    model = made(name)
    with session_at(name, SHARES[name], loss_of, model, policy="checkpoint") as session:
        reports = [session.step(batch, loss_of) for _ in range(3)]
        assert methods(session)[Method.RECOMPUTE] >= 1
        assert not methods(session)[Method.ROTATED]
        assert all(torch.equal(each, expected[key]) for key, each in model.state_dict().items())
        held = max(each.saved_bytes for each in reports)
        assert session.profile is not None
        assert held <= 1.02 * planned_bytes(session.profile, session.plan.policy) + MIB
        assert held < 0.95 * session.profile.plain_saved_bytes
        moments = session.plan.saved_by_moment
        assert held == pytest.approx(max(moments["held"]), rel=0.05)
        assert max(moments["plain"]) == pytest.approx(session.profile.plain_saved_bytes, rel=0.01)
        assert max(moments["again"][: session.plan.forward_moments]) < 0.1 * held
        assert 0 < max(moments["again"]) <= max(moments["held"])
        assert all(each.overrun_bytes == 0 for each in reports)
        assert any("recompute" in line for line in session.plan.choices)
        assert not any(each.added_noise for each in reports)


def test_the_planner_takes_recipes_where_they_are_the_cheapest_exact_way() -> None:
    batch = images()
    with session_at("residual", 0.75, loss_of) as session:
        session.step(batch, loss_of)
        assert methods(session)[Method.RECOMPUTE] >= 1


def test_a_step_that_fits_records_nothing() -> None:
    model, batch = made("residual"), images()
    with Session(model, sgd(model), "8GB", tolerance=0.0) as session:
        session.step(batch, loss_of)
        assert session.profile is not None
        assert all(each.recipe is None for each in session.profile.savings)
        assert not session.plan.policy.records_values


def recomputable_bytes(profile: Profile) -> int:
    """What the tensors take that some option computes again."""
    table = make_table(profile, profile.batch_size, Allowed(replay=False, widths=()))
    pairs = zip(table.families, table.options, strict=True)
    again = (own for own, options in pairs if any(o.level == RECOMPUTED for o in options))
    return int(sum(own[0].storage_bytes.at(profile.batch_size) for own in again))


def test_a_model_without_modules_gets_the_same_recipes() -> None:
    batch, found = images(), []
    for loss_fn in (loss_of, functional_loss):
        with session_at("residual", 0.75, loss_fn) as session:
            assert session.profile is not None
            found.append(recomputable_bytes(session.profile))
    assert found[0] == pytest.approx(found[1], rel=0.05)
    assert found[0] > 4 * batch[0].nbytes


def test_concatenations_share_the_parts_that_they_are_made_of() -> None:
    with session_at("concatenations", 0.75, loss_of) as session:
        assert session.profile is not None
        recipes = [each.recipe for each in session.profile.savings if each.recipe]
        numbers = [number for recipe in recipes for number, _ in recipe.held]
    assert max(Counter(numbers).values()) >= 3
    assert len(set(numbers)) == 4  # the stem's and the layers', but for the last


def test_a_leaf_is_kept_and_what_is_computed_from_it_is_not() -> None:
    with session_at("residual", 0.72, loss_of, policy="checkpoint") as session:
        profile, policy = session.profile, session.plan.policy
        assert profile is not None
        again = [s for s in profile.savings if policy.by_site.get(s.site) == RECOMPUTE]
        kept = {s.site for s in profile.savings if policy.by_site.get(s.site, KEEP) == KEEP}
        assert again
        assert all(each.recipe and each.recipe.kept <= kept for each in again)


def fill_with_ones(tensors: list[Tensor]) -> None:
    for each in tensors:
        each.numpy(force=True).fill(1.0)


def test_what_changes_between_forward_and_backward_is_an_error_and_no_step() -> None:
    batch = images()
    model = made("residual")
    state = {"on": False}

    def meddling(model: nn.Module, batch: Batch) -> Tensor:
        kept: list[Tensor] = []
        layers: Any = model.layers
        hooks = [each.register_forward_hook(lambda *a: kept.append(a[2])) for each in layers]
        loss = loss_of(model, batch)
        for hook in hooks:
            hook.remove()
        if state["on"]:  # where PyTorch does not see it; which are computed from, the plan says
            loss.register_hook(lambda _: fill_with_ones(kept))
        return loss

    with session_at("residual", 0.72, meddling, model, policy="checkpoint") as session:
        session.step(batch, meddling)
        before = {key: each.clone() for key, each in model.named_parameters()}
        state["on"] = True
        with pytest.raises(SavedTensorError, match="computed again"):
            session.step(batch, meddling)
        assert all(torch.equal(each, before[key]) for key, each in model.named_parameters())


class Block(nn.Module):
    """A transformer's: attention with dropout, GELU, two shortcuts."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 4, dropout=0.1, batch_first=True)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + F.dropout(self.down(F.gelu(self.up(self.norms[1](x)))), 0.1, self.training)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(("micro_batch", "releases"), [(8, False), (8, True), (3, False)])
def test_parts_released_gradients_and_autocast_change_no_bit(
    autocast: bool, micro_batch: int, releases: bool
) -> None:
    torch.manual_seed(0)
    base = nn.Sequential(nn.Embedding(50, 48), Block(), Block(), nn.Linear(48, 50))
    tokens = torch.randint(50, (8, 33))
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def next_token(model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            scores = model(batch[0])
        return F.cross_entropy(scores.float().flatten(0, 1), batch[1].flatten())

    def trained(bits: str) -> tuple[dict[str, Tensor], Counter[Method]]:
        model = deepcopy(base)
        options = {"release_gradients": True} if releases else {}
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with Session(model, optimizer, None, seed=1, **options) as session:  # type: ignore[arg-type]
            session.plan = Plan(
                policy_for(bits),
                micro_batch,
                0,
                return_freed_blocks=False,
                release_gradients=releases,
            )
            torch.manual_seed(5)
            reports = [session.step(batch, next_token) for _ in range(3)]
            assert (reports[-1].released_gradients > 0) == releases
            return model.state_dict(), methods(session)

    expected, _ = trained("plain")
    found, used = trained("exact")
    assert used[Method.RECOMPUTE] >= 4
    assert all(torch.equal(each, expected[name]) for name, each in found.items())


def test_a_budget_without_room_for_any_step_names_a_least_that_has_recipes() -> None:
    kept_and_saved("in place", loss_of)
    return_what_earlier_tests_held()
    model, terms = made("in place"), {"tolerance": 0.0, "operators": "pytorch", "split": False}
    resident = process_memory.resident_bytes()
    with pytest.raises(BudgetError) as refused:
        Session(model, sgd(model), resident + MIB, **terms).prepare(images(), loss_of)
    named = refused.value.least_bytes
    assert named is not None
    with Session(model, sgd(model), named, **terms) as within:
        within.prepare(images(), loss_of)
    with session_at("in place", 0.7, loss_of, split=False) as roomy:
        least = roomy.least_feasible_bytes()
    assert least is not None
    assert named - resident <= 1.1 * (least - resident)  # without recipes a third more


class Heavy(nn.Sequential):
    """Products alone, which no recipe runs again."""

    def __init__(self) -> None:
        super().__init__(*(nn.Conv2d(16, 16, 3, padding=1) for _ in range(4)))


def test_a_budget_without_room_for_any_step_names_a_least_that_has_replays() -> None:
    batch = torch.randn(64, 16, 32, 32), torch.zeros(0)

    def energy(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch[0]).square().mean()

    return_what_earlier_tests_held()
    terms: dict[str, Any] = {"tolerance": 0.0, "operators": "pytorch", "split": False}
    model, resident = nn.Sequential(*(Heavy() for _ in range(4))), process_memory.resident_bytes()
    with pytest.raises(BudgetError) as refused:
        Session(model, sgd(model), resident + MIB, cache=False, **terms).prepare(batch, energy)
    named = refused.value.least_bytes
    assert named is not None
    with Session(model, sgd(model), named, cache=False, **terms) as within:
        within.prepare(batch, energy)
        assert within.plan is not None
        assert within.plan.policy.replayed
    with Session(model, sgd(model), named + 2**25, cache=False, **terms) as roomy:
        roomy.prepare(batch, energy)
        least = roomy.least_feasible_bytes()
    assert least is not None
    assert named - resident <= 1.3 * (least - resident)  # without replays half as much again
