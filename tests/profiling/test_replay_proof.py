"""Sessions offer the replay of what repeated itself while they measured, and say why not others."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from daf.core.plan import Plan
from daf.core.policy import exact_policy
from daf.core.profile import Profile
from daf.core.reports import LeverRefusal
from daf.profiling import replay_proof
from daf.profiling.replay_proof import (
    LEAST_MS,
    MOST_STEPS,
    PASS_STEPS,
    ProofLimits,
    _candidates,
    _judged_by_kind,
    _kind,
    most_ms,
)
from daf.recompute.proof import NO_ROOM, NO_TIME
from daf.saved_tensors.observation import NO_CALL, ModuleCall, Observation
from daf.session.session import Session

WIDTH = 64
GENERATOR = torch.Generator()
DRAWS: dict[str, Callable[[], float]] = {
    "torch": lambda: torch.rand(()).item(),
    "python": random.random,
    "generator": lambda: torch.rand((), generator=GENERATOR).item(),
}


class Layer(nn.Module):
    """A residual layer behind a drawn factor; with ``keep`` below 1 it may be dropped."""

    def __init__(self, kind: str, keep: float = 1.0) -> None:
        super().__init__()
        self.draw = DRAWS[kind]
        self.keep = keep
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.keep < 1 and self.draw() > self.keep:
            return x
        found: Tensor = x + self.down(F.gelu(self.up(self.norm(x) * (0.25 + self.draw()))))
        return found


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    random.seed(5)
    GENERATOR.manual_seed(3)
    return F.cross_entropy(model(batch[0]), batch[1])


def model_of(kind: str, keep: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    layers = [Layer(kind, keep) for _ in range(4)]
    return nn.Sequential(nn.BatchNorm1d(WIDTH), *layers, nn.Linear(WIDTH, 8))


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(512, WIDTH), torch.randint(8, (512,))


def profile_of(model: nn.Module) -> tuple[Profile, list[LeverRefusal]]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Session(model, optimizer, "8GB") as session:
        session.prepare(batch(), loss_of)
        assert session.profile is not None
        assert session.plan is not None
        return session.profile, [each for each in session.left_alone() if each.lever == "replay"]


@pytest.fixture(autouse=True)
def time_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is busy refuses no proof."""
    monkeypatch.setattr(replay_proof, "_SMALL_STEP_MS", math.inf)


@pytest.mark.parametrize("keep", [1.0, 0.5])
@pytest.mark.parametrize("kind", ["torch", "python"])
def test_what_draws_from_default_generators_is_offered(kind: str, keep: float) -> None:
    profile, refused = profile_of(model_of(kind, keep))
    assert profile.replay_refusals == {}
    assert all(call.replayable for call in profile.calls)
    assert refused == []


def test_what_draws_from_a_generator_elsewhere_is_not_and_the_reason_is_told() -> None:
    profile, refused = profile_of(model_of("generator"))
    assert set(profile.replay_refusals) == {"1", "2", "3", "4"}
    inside = {call.module for call in profile.calls if call.replayable}
    assert {"1.norm", "1.up", "1.down"} <= inside
    (told,) = refused
    assert told.modules == ("1", "2", "3", "4")
    assert "a generator elsewhere" in told.reason


@pytest.mark.parametrize("kind", sorted(DRAWS))
def test_replaying_all_that_is_offered_trains_as_plain_does(kind: str) -> None:
    def trained(replays: bool) -> dict[str, Tensor]:
        model, examples = model_of(kind), batch()
        with Session(model, torch.optim.SGD(model.parameters(), 0.1), "8GB") as session:
            session.prepare(examples, loss_of)
            assert session.profile is not None
            offered = {call.module for call in session.profile.calls if call.replayable} - {""}
            assert {"1.up", "2.down", "5"} <= offered
            assert ({"1", "2", "3", "4"} <= offered) == (kind != "generator")
            policy = replace(exact_policy(), replayed=frozenset(offered if replays else ()))
            session.plan = Plan(policy, 512, 0, return_freed_blocks=False)
            for seed in range(2):
                torch.manual_seed(seed)
                session.step(examples, loss_of)
        return model.state_dict()

    expected, found = trained(False), trained(True)
    assert all(torch.equal(value, found[name]) for name, value in expected.items())


def test_a_gradient_penalty_in_the_loss_is_measured_all_the_same() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Layer("python"), nn.Linear(WIDTH, 8))

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x = batch[0].clone().requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.cross_entropy(out, batch[1]) + slope.square().mean()

    with Session(model, torch.optim.SGD(model.parameters(), 0.1), "8GB") as session:
        session.prepare(batch(), loss)
        assert session.profile is not None
        assert session.profile.replay_refusals == {}


@given(st.integers(1, 4096), st.floats(0.1, 10_000))
def test_proofs_take_at_most_part_of_a_step(examples: int, step_ms: float) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay_proof, "_SMALL_STEP_MS", 40.0)
        assert_short(examples, step_ms)


def assert_short(examples: int, step_ms: float) -> None:
    tried = max(1, examples // 8)
    most = most_ms(tried, examples, step_ms)
    if examples >= 16 and step_ms >= 50:
        assert most <= (MOST_STEPS + PASS_STEPS) * step_ms < 0.8 * step_ms
        assert most_ms(examples // 8, examples, step_ms) <= 0.41 * step_ms
    if step_ms < 40:
        assert most >= LEAST_MS


REASONS = st.sampled_from([NO_TIME, NO_ROOM, "differs"])


@given(
    kinds=st.dictionaries(st.text("abc", min_size=1), st.integers(0, 3), max_size=12),
    data=st.data(),
)
def test_what_was_not_tried_is_judged_by_its_kind(
    kinds: dict[str, int], data: st.DataObject
) -> None:
    found = {path: data.draw(REASONS, label=path) for path in kinds if data.draw(st.booleans())}
    refused = _judged_by_kind(kinds, found)
    for path, kind in kinds.items():
        alike = [found.get(other, "") for other in kinds if kinds[other] == kind]
        if found.get(path) in (NO_TIME, NO_ROOM):
            offered = "" in alike and "differs" not in alike
        else:
            offered = path not in found
        assert (path not in refused) == offered


def test_kinds_are_classes_with_their_options_not_their_numbers() -> None:
    def layer(change: Callable[[Layer], object] = lambda _: None, kind: str = "torch") -> Layer:
        made = Layer(kind, 0.5)
        change(made)
        return made

    alike = [layer(), layer(lambda m: setattr(m, "keep", 0.75))]
    assert _kind(alike[0], {}) == _kind(alike[1], {})
    others = [
        layer(kind="generator"),
        layer(lambda m: m.eval()),
        layer(lambda m: setattr(m, "keep", 0.0)),
        layer(lambda m: setattr(m, "up", nn.Identity())),
        layer(lambda m: m.norm.register_forward_hook(lambda *_: None)),
        layer(lambda m: setattr(m, "is_last", True)),
    ]
    assert all(_kind(other, {}) != _kind(alike[0], {}) for other in others)


def test_no_pass_is_watched_for_modules_whose_second_run_would_come_too_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replay_proof.time, "thread_time", lambda: 0.0)
    trials = replay_proof._Trials(nn.Identity(), lambda: None, ProofLimits(None, 30.0), {})
    trials._pass_ms = 10.0
    assert trials.in_time({"large": 25.0, "small": 12.0, "later": 8.0, "tiny": 2.0}) == [
        "small",
        "tiny",
    ]
    assert trials.in_time({"large": 25.0}) == []
    assert trials.run([], 1.0) == []


def test_equal_layers_are_tried_before_what_is_nearly_the_whole_model() -> None:
    calls = [ModuleCall("", NO_CALL, 0, 9, 12.0), ModuleCall("body", 0, 0, 9, 11.0)]
    calls += [ModuleCall(f"body.{n}", 1, n, n, 5.0) for n in range(2)]
    observation = Observation(4, calls=calls)
    observation.saves += [SimpleNamespace(call=n) for n in (2, 3)]
    assert _candidates(observation) == (["body.0", "body.1"], ["body"])
