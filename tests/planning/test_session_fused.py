"""A session under a budget may fuse and chunk operators: same training, less memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf.execution.observation import unseen
from daf.memory.recycling import unsupported_reason
from daf.plan import Reading
from daf.planning import planner
from daf.session import Session

Batch = tuple[Tensor, Tensor]
MIB = 2**20
needs_limit = pytest.mark.skipif(unsupported_reason() is not None, reason=str(unsupported_reason()))


def network() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for channels in (3, 32, 32, 32, 32):
        convolution = nn.Conv2d(channels, 32, 3, padding=1, bias=False)
        layers += [convolution, nn.BatchNorm2d(32), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def images() -> Batch:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 3, 32, 32, generator=generator).to(memory_format=torch.channels_last)
    return x, torch.randint(10, (64,), generator=generator)


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)


def prepared(share: float) -> Session:
    """With a budget at a share of the way from the least one to keeping everything."""
    model = network()
    session = Session(model, sgd(model), "8GB")
    session.prepare(images(), cross_entropy)
    assert session.profile is not None
    kept = planner.kept_peak_bytes(session.profile)
    least = session.least_feasible_bytes()
    assert least is not None
    session.close()
    model = network()
    fresh = Session(
        model, sgd(model), int(least + share * (kept - least)), floor_bytes=session.floor_bytes
    )
    fresh.prepare(images(), cross_entropy)
    return fresh


@needs_limit
def test_fused_operators_are_measured_where_not_everything_fits() -> None:
    with prepared(0.3) as session:
        measured = session._choosing.fused_profile
        assert measured is not None
        assert measured.is_fused
        assert sum(bool(each.pattern) for each in measured.fusions) == 5
        in_place = [each for each in measured.savings if each.reading is Reading.IN_PLACE]
        assert {each.site.operator for each in in_place} == {"batch_norm"}
    with prepared(1.5) as session:
        assert session._choosing.fused_profile is None
        assert session.plan is not None
        assert session.plan.policy.name == "plain"


@needs_limit
def test_a_fused_plan_trains_within_its_budget_and_says_what_it_fuses() -> None:
    with prepared(0.3) as session:
        measured, budget_bytes = session._choosing.fused_profile, session.budget_bytes
        assert measured is not None
        assert budget_bytes is not None
        # Whichever is faster on this machine: here the fused plan is carried out.
        allowed = session._choosing.terms.allowed
        session.plan = planner.make_plan(measured, budget_bytes, allowed=allowed)
        session._choosing.first = session._choosing._search = None
        assert session.plan.policy.fused
        assert sum("fused as batch_norm + relu" in line for line in session.plan.choices) == 5
        reports = [session.step(images(), cross_entropy) for _ in range(3)]
        assert max(report.peak_bytes for report in reports) <= budget_bytes
        assert session.plan.policy.fused  # nothing was refused, and no tighter plan taken
        operators = {row["site"].split(":")[1].split("#")[0] for row in session.explain()}
        assert "batch_norm" in operators
    plain = network()
    optimizer = sgd(plain)
    for report in reports:
        loss = cross_entropy(plain, images())
        assert report.loss == pytest.approx(loss.item(), rel=0.02)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@needs_limit
def test_a_resumed_session_goes_on_with_fused_operators() -> None:
    with prepared(0.3) as session:
        state = session.state_dict()
        assert state["fused_profile"] is not None
    model = network()
    with Session(model, sgd(model), session.budget_bytes) as resumed:
        resumed.load_state_dict(state)
        assert resumed._choosing.fused_profile == session._choosing.fused_profile


def test_hooks_that_only_look_are_seen_by_no_function_mode() -> None:
    seen: list[str] = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    x = torch.ones(2)
    with Mode():
        unseen(lambda tensor: tensor.untyped_storage())(x)
        assert seen == []
        x.untyped_storage()
    assert seen == ["untyped_storage"]


@needs_limit
def test_a_loss_with_second_derivatives_keeps_pytorch_s_operators(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def penalised(model: nn.Module, batch: Batch) -> Tensor:
        x = batch[0].detach().requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return F.cross_entropy(out, batch[1]) + slope.square().mean()

    monkeypatch.setattr(planner, "kept_peak_bytes", lambda _: 10**12)  # fusing is always tried
    for loss_fn, refused in ((cross_entropy, False), (penalised, True)):
        model = network()
        with Session(model, sgd(model), "8GB") as session:
            plan = session.prepare(images(), loss_fn)
            assert bool(session.fusion_refusal) == refused
            assert (session._choosing.fused_profile is None) == refused
            if refused:
                assert "differentiate twice" in session.fusion_refusal
                assert not plan.policy.fused
            assert session.step(images(), loss_fn).loss > 0
