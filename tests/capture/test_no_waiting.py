"""Between the forward pass and the end of backward the host waits for no device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from typing import Any

import pytest
import torch
from daf_bench.harness.ablation_loop import LeveredLoop
from torch import Tensor, nn
from waits import Waits, without_waiting

from daf.capture.capture import Capture
from daf.core.errors import NonFiniteLossError
from daf.core.plan import Plan
from daf.core.policy import Policy, plain_policy, policy_for
from daf.memory.process_limit import MemoryKeeper
from daf.recompute.python_state import Surroundings
from daf.session.session import Session
from daf.step import gradient
from daf.step.context import StepContext
from daf.step.gradient import GradientStep
from daf.step.gradient_release import GradientRelease
from daf.step.microbatch import likely_cut
from daf.step.splitting import SplitChoice
from daf.step.state_snapshot import StepSnapshot

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
EXAMPLES = 12


class Fragile(nn.Module):
    """With running statistics, draws, and numbers that cease to be finite when it is told so."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(8, 2)
        self.bad_call = -1
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        self.calls += 1
        if self.calls == self.bad_call:
            hidden = hidden * float("inf")
        return self.last(self.drop(self.norm(hidden)))


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def total_square(model: nn.Module, x: Tensor) -> tuple[Tensor, float]:
    found = model(x).square()
    return found.sum(), found.numel()


def weighted_square(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Pieces weigh what only the device has summed up."""
    weights = x[:, 0].abs()
    return (model(x).square().sum(1) * weights).sum(), weights.sum()


def weighted_square_read_at_once(model: nn.Module, x: Tensor) -> tuple[Tensor, float]:
    total, weight = weighted_square(model, x)
    return total, float(weight)


LOSSES = [mean_square, total_square, weighted_square]


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor counts as a device that the host would wait for."""
    monkeypatch.setattr(gradient, "is_processor", lambda _: False)


class Steps:
    """Gradient steps of a model, without a session around them."""

    def __init__(
        self, model: nn.Module, *, release: bool = False, policy: Policy | None = None
    ) -> None:
        self.model = model
        self.policy = policy or plain_policy()
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        capture = Capture(model)
        released = GradientRelease(release, model, self.optimizer, capture.parameter_reads)
        self.gradient = GradientStep(model, self.optimizer, capture, released, MemoryKeeper())

    def run(self, batch: Any, loss_fn: Callable[..., Any], micro_batch: int) -> float:
        plan = Plan(self.policy, micro_batch, predicted_peak_bytes=0)
        context = StepContext.of(self.model, batch, loss_fn, index=3)
        context.choose(SplitChoice(likely_cut(batch)))
        snapshot = StepSnapshot(Surroundings.of(self.model))
        return self.gradient.run(context, plan, snapshot, planned=False)


def state(model: nn.Module) -> list[Tensor]:
    return [each.clone() for each in model.state_dict().values()] + [torch.get_rng_state()]


@pytest.mark.parametrize("loss_fn", LOSSES)
@pytest.mark.parametrize("micro_batch", [4, EXAMPLES])
def test_losses_are_looked_at_when_all_of_backward_was_asked_for(
    loss_fn: Callable[..., Any], micro_batch: int, simulated: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces, waits, before = EXAMPLES // micro_batch, Waits(), []
    steps = Steps(Fragile())
    backward = steps.gradient._backward

    def noted(*arguments: Any, **keywords: Any) -> None:
        backward(*arguments, **keywords)
        before.append(waits.count)

    monkeypatch.setattr(steps.gradient, "_backward", noted)
    with waits:
        steps.run(torch.randn(EXAMPLES, 4), loss_fn, micro_batch)
    assert before == [0] * pieces
    assert waits.count == pieces * (2 if loss_fn is weighted_square else 1)


@pytest.mark.parametrize("micro_batch", [4, EXAMPLES])
@pytest.mark.parametrize("loss_fn", LOSSES)
def test_loss_and_gradients_are_those_of_who_looks_first(
    loss_fn: Callable[..., Any], micro_batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, batch = [], torch.randn(EXAMPLES, 4)
    for looks_first in (True, False):
        monkeypatch.setattr(gradient, "is_processor", lambda _, is_one=looks_first: is_one)
        torch.manual_seed(0)
        model = Fragile()
        loss = Steps(model).run(batch, loss_fn, micro_batch)
        found.append([torch.tensor(loss), *state(model), *(p.grad for p in model.parameters())])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


@pytest.mark.parametrize("micro_batch", [4, EXAMPLES])
def test_a_weight_on_the_device_counts_as_its_number_does(
    micro_batch: int, simulated: None
) -> None:
    found, batch = [], torch.randn(EXAMPLES, 4)
    for loss_fn in (weighted_square, weighted_square_read_at_once):
        torch.manual_seed(0)
        model = Fragile()
        loss = Steps(model).run(batch, loss_fn, micro_batch)
        found.append([torch.tensor(loss), *(each.grad for each in model.parameters())])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


@pytest.fixture(params=["on the processor", "on a device", "on a device that tells of NaN"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where backward itself fails, too: that a loss was not finite is still what is said."""
    if request.param != "on the processor":
        monkeypatch.setattr(gradient, "is_processor", lambda _: False)
    tells = request.param.endswith("NaN")
    with torch.autograd.set_detect_anomaly(True) if tells else nullcontext():
        yield


@pytest.mark.filterwarnings(
    "ignore:Anomaly Detection:UserWarning", "ignore:Error detected:UserWarning"
)
@pytest.mark.parametrize("bad_piece", [1, 2])
def test_where_a_loss_is_not_finite_nothing_was_touched(place: None, bad_piece: int) -> None:
    model, batch = Fragile(), torch.randn(EXAMPLES, 4)
    steps, before = Steps(model), state(model)
    model.bad_call = bad_piece
    with pytest.raises(NonFiniteLossError, match=r"became nan at step 3; it began in"):
        steps.run(batch, mean_square, 6)
    assert all(torch.equal(ours, was) for ours, was in zip(state(model), before, strict=True))
    assert all(each.grad is None for each in model.parameters())
    assert model.calls == 0
    model.bad_call = -1
    assert math.isfinite(steps.run(batch, mean_square, 6))


def test_a_piece_that_fails_because_of_the_one_before_is_explained(simulated: None) -> None:
    """Whose batch statistics are not finite any more, which the model itself refuses."""
    model, batch = Fragile(), torch.randn(EXAMPLES, 4)
    steps, before = Steps(model), state(model)

    def refuse(*_: Any) -> None:
        if model.calls == 1 and not model.norm.running_mean.isfinite().all():
            raise ValueError("statistics are not finite")

    model.register_forward_pre_hook(refuse)
    model.bad_call = 1
    with pytest.raises(NonFiniteLossError, match="became nan at step 3") as caught:
        steps.run(batch, mean_square, 6)
    assert isinstance(caught.value.__context__, ValueError)
    assert all(torch.equal(ours, was) for ours, was in zip(state(model), before, strict=True))


def test_a_session_s_step_that_is_not_finite_updates_nothing(simulated: None) -> None:
    model, batch = Fragile(), torch.randn(EXAMPLES, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with Session(model, optimizer, None) as session:
        session.step(batch, mean_square)
        before = state(model)
        momentum = [optimizer.state[each]["momentum_buffer"].clone() for each in optimizer.state]
        model.bad_call = model.calls + 1
        with pytest.raises(NonFiniteLossError, match="at step 1; it began in"):
            session.step(batch, mean_square)
        assert all(torch.equal(ours, was) for ours, was in zip(state(model), before, strict=True))
        for each, was in zip(optimizer.state, momentum, strict=True):
            assert torch.equal(optimizer.state[each]["momentum_buffer"], was)
        model.bad_call = -1
        assert math.isfinite(session.step(batch, mean_square).loss)


@pytest.mark.parametrize("who", ["gradient release", "a hook of the user's"])
def test_whoever_updates_inside_backward_is_not_asked_for_what_is_not_finite(
    who: str, simulated: None
) -> None:
    model, batch = Fragile(), torch.randn(EXAMPLES, 4)
    steps = Steps(model, release=who == "gradient release")

    def update(parameter: Tensor) -> None:
        with torch.no_grad():
            parameter.add_(parameter.grad, alpha=-0.1)

    if who != "gradient release":
        for each in model.parameters():
            each.register_post_accumulate_grad_hook(update)
    before, model.bad_call = state(model), 1
    with pytest.raises(NonFiniteLossError, match="began in"):
        steps.run(batch, mean_square, EXAMPLES)
    assert all(torch.equal(ours, was) for ours, was in zip(state(model), before, strict=True))
    model.bad_call = -1
    assert math.isfinite(steps.run(batch, mean_square, EXAMPLES))
    assert not torch.equal(model.first.weight, before[0])


def test_the_loop_of_the_gpu_bench_looks_after_the_update() -> None:
    model, waits, before = Fragile(), Waits(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: before.append(waits.count))
    loop = LeveredLoop(model, optimizer, (), bits="plain", seed=0)
    with waits:
        loss = loop.step(torch.randn(EXAMPLES, 4), mean_square)
    assert before == [0]
    assert waits.count == 1
    assert math.isfinite(loss)


# --- on a GPU -------------------------------------------------------------------------------


def activations() -> tuple[nn.Module, Tensor]:
    """A model on the GPU with what is coded there, and its batch."""
    device = torch.device("cuda", torch.cuda.current_device())
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.ReLU())
    return model.to(device), torch.randn(128, 64, device=device)


@needs_cuda
@pytest.mark.parametrize("bits", ["plain", 2])
@pytest.mark.parametrize(
    ("micro_batch", "loss_fn"),
    [(64, mean_square), (128, mean_square), (64, weighted_square), (128, weighted_square)],
)
def test_on_a_gpu_nothing_waits_from_forward_to_the_end_of_backward(
    bits: str | int,
    micro_batch: int,
    loss_fn: Callable[..., Any],
    code_everything: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the second step: in the first, kernels are compiled."""
    model, batch = activations()
    steps = Steps(model, policy=policy_for(bits))
    expected = steps.run(batch, loss_fn, micro_batch)
    forward, backward = steps.gradient._forward, steps.gradient._backward

    def quietly(run: Callable[..., Any]) -> Callable[..., Any]:
        def quiet(*arguments: Any, **keywords: Any) -> Any:
            with without_waiting(batch.device):
                return run(*arguments, **keywords)

        return quiet

    monkeypatch.setattr(steps.gradient, "_forward", quietly(forward))
    monkeypatch.setattr(steps.gradient, "_backward", quietly(backward))
    assert steps.run(batch, loss_fn, micro_batch) == pytest.approx(expected, rel=1e-5)


@needs_cuda
@pytest.mark.parametrize("levers", [(), ("codes",), ("codes", "fused", "chunked")])
def test_on_a_gpu_the_bench_s_loop_waits_for_nothing_before_the_update(
    levers: tuple[str, ...], code_everything: None
) -> None:
    model, batch = activations()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loop, quiet = LeveredLoop(model, optimizer, levers, bits=2, seed=0), ExitStack()

    def loss_fn(trained: nn.Module, x: Tensor) -> Tensor:
        quiet.enter_context(without_waiting(x.device))
        return mean_square(trained, x)

    for _ in range(2):  # kernels are compiled, operators are fused
        loop.step(batch, mean_square)
    optimizer.register_step_post_hook(lambda *_: quiet.close())
    with quiet:
        assert math.isfinite(loop.step(batch, loss_fn))
