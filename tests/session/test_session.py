"""A session trains as plain PyTorch does, within its budget, and leaves nothing behind."""

from __future__ import annotations

import json
import math
import mmap
import subprocess
import sys
import textwrap
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf.core.errors import BudgetError, NonFiniteLossError, UnitError
from daf.core.policy import Need, coded_policy, with_host_codes
from daf.memory import process_memory
from daf.memory.process_limit import MemoryKeeper
from daf.memory.recycling_allocator import unsupported_reason
from daf.offload.spill import SpillOptions
from daf.planning import planner
from daf.profiling.model_memory import optimizer_bytes_to_come
from daf.profiling.profiler import Profiler
from daf.session.session import Session
from daf.step.state_snapshot import preserved_state

pytestmark = pytest.mark.smoke

Batch = tuple[Tensor, Tensor]

needs_peak = pytest.mark.skipif(
    not process_memory.peak_is_exact(), reason="this system keeps no resettable high-water mark"
)


def convolutional() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )


def deep() -> nn.Sequential:
    """Saves 200 MB for 64 images of 64 pixels, in tensors of 17 MB."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for channels in (3, 16, 16, 16, 16, 16):
        layers += [nn.Conv2d(channels, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


def images(count: int = 12, size: int = 32) -> Batch:
    torch.manual_seed(1)
    return torch.randn(count, 3, size, size), torch.randint(0, 10, (count,))


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def plain_steps(model: nn.Module, batch: Batch, count: int) -> list[float]:
    optimizer, losses = sgd(model), []
    for _ in range(count):
        optimizer.zero_grad()
        loss = cross_entropy(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("bits", [None, "plain", "exact"])
def test_exact_policies_train_bit_for_bit_as_plain_pytorch(bits: str | None) -> None:
    ours, theirs, batch = convolutional(), convolutional(), images()
    session = Session(ours, sgd(ours), None, bits=bits)
    losses = [session.step(batch, cross_entropy).loss for _ in range(3)]
    assert losses == plain_steps(theirs, batch, 3)
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name


def test_lossy_policy_saves_bytes_and_learns_as_plain_does() -> None:
    model, twin, batch = convolutional(), convolutional(), images()
    session = Session(model, sgd(model), None, bits=2)
    losses = [session.step(batch, cross_entropy).loss for _ in range(30)]
    plain = plain_steps(twin, batch, 30)
    assert losses[0] == plain[0]
    assert abs(losses[-1] - plain[-1]) < 0.1 * (plain[0] - plain[-1])
    assert session.saved_bytes_plain > 12 * session.saved_bytes_peak


class Sequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(20, 16)
        self.body = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 20))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.body(self.embedding(tokens))


def token_loss(model: nn.Module, tokens: Tensor) -> tuple[Tensor, Tensor]:
    scores, targets = model(tokens[:, :-1]), tokens[:, 1:]
    weight = (targets != 0).sum()
    return F.cross_entropy(scores.transpose(1, 2), targets, ignore_index=0, reduction="sum"), weight


def mean_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    scores, targets = model(tokens[:, :-1]), tokens[:, 1:]
    return F.cross_entropy(scores.transpose(1, 2), targets)


@pytest.mark.parametrize("micro_batch", [1, 3, 4, 7])
@pytest.mark.parametrize("loss_fn", [token_loss, mean_token_loss])
def test_micro_batches_join_to_the_gradient_of_the_whole_batch(
    micro_batch: int, loss_fn: Any
) -> None:
    torch.manual_seed(2)
    tokens = torch.randint(0, 20, (7, 9))
    whole, split = Sequence().double(), Sequence().double()
    one = Session(whole, torch.optim.SGD(whole.parameters(), lr=0.0), None)
    other = Session(split, torch.optim.SGD(split.parameters(), lr=0.0), None)
    one.step(tokens, loss_fn)
    other.plan = _with_pieces(other, tokens, loss_fn, micro_batch)
    report = other.step(tokens, loss_fn)
    assert report.micro_batch == micro_batch
    for mine, theirs in zip(split.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-10, atol=1e-12)


def _with_pieces(session: Session, batch: Any, loss_fn: Any, micro_batch: int) -> Any:
    return replace(session.prepare(batch, loss_fn), micro_batch=micro_batch)


def test_preparing_leaves_the_model_and_the_random_states_as_found() -> None:
    model, batch = convolutional(), images()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    session = Session(model, sgd(model), "8GB")
    session.prepare(batch, cross_entropy)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(random_state, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not session.optimizer.state
    session.close()


def test_what_is_apart_from_training_restores_even_after_an_error() -> None:
    model = convolutional()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    kept = model[0].weight.grad
    mean = model[1].running_mean.clone()

    def fail() -> None:
        with preserved_state(model, gradients=True):
            model(images()[0]).sum().backward()
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        fail()
    assert model[0].weight.grad is kept
    assert torch.equal(model[1].running_mean, mean)


@pytest.mark.parametrize(
    ("make", "numbers_per_parameter"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), 0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1),
        (lambda p: torch.optim.AdamW(p, lr=0.1), 2),
        (lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True), 3),
    ],
)
def test_optimizer_state_to_come_is_what_the_first_step_makes(
    make: Any, numbers_per_parameter: int
) -> None:
    model = nn.Linear(100, 100)
    optimizer = make(model.parameters())
    expected = optimizer_bytes_to_come(optimizer)
    size = sum(each.nbytes for each in model.parameters())
    assert expected == pytest.approx(numbers_per_parameter * size, rel=0.01, abs=64)
    model(torch.ones(1, 100)).sum().backward()
    optimizer.step()
    assert optimizer_bytes_to_come(optimizer) == 0


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize("kind", [torch.optim.SparseAdam, torch.optim.SGD, torch.optim.Adagrad])
@pytest.mark.parametrize("release", [False, "auto"])
def test_sparse_gradients_train_under_a_budget(
    kind: type[torch.optim.Optimizer], release: Literal["auto"] | bool
) -> None:
    torch.manual_seed(0)
    plain = nn.EmbeddingBag(1000, 16, sparse=True)
    model, batch = deepcopy(plain), (torch.randint(0, 1000, (64, 5)), torch.arange(64) % 16)
    optimizer = kind(plain.parameters(), lr=0.1)
    with Session(
        model, kind(model.parameters(), lr=0.1), "8GB", tolerance=0, release_gradients=release
    ) as session:
        for _ in range(3):
            optimizer.zero_grad()
            loss = cross_entropy(plain, batch)
            loss.backward()
            optimizer.step()
            assert session.step(batch, cross_entropy).loss == pytest.approx(loss.item())
    torch.testing.assert_close(model.weight, plain.weight)


def test_an_impossible_budget_is_refused_before_training() -> None:
    model = convolutional()
    with Session(model, sgd(model), "10MB") as session:  # the error would keep it alive
        with pytest.raises(BudgetError, match=r"asked for a budget of 10\.0 MB") as caught:
            session.step(images(), cross_entropy)
        assert caught.value.least_bytes is not None
        assert caught.value.least_bytes > 50_000_000
        assert not session.optimizer.state
        assert session.settings == []


def test_an_unknown_unit_is_refused() -> None:
    model = convolutional()
    with pytest.raises(UnitError, match="unknown unit 'XB'"):
        Session(model, sgd(model), "700XB")


class Poisoned(nn.Module):
    """Finite until told; then the second layer divides by zero."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.bad = False

    def forward(self, values: Tensor) -> Tensor:
        hidden = self.first(values)
        return self.norm(hidden / 0.0 if self.bad else hidden)


def test_a_nonfinite_loss_stops_before_anything_is_touched() -> None:
    torch.manual_seed(0)
    model = Poisoned()
    session = Session(model, sgd(model), None)
    batch = torch.randn(6, 4)

    def loss_fn(module: nn.Module, values: Tensor) -> Tensor:
        return module(values).square().mean()

    session.step(batch, loss_fn)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    model.bad = True
    with pytest.raises(
        NonFiniteLossError, match=r"at step 1; it began in .*'norm' \(BatchNorm1d\)"
    ):
        session.step(batch, loss_fn)
    for name, value in model.state_dict().items():
        assert torch.equal(before[name], value), name
    assert torch.equal(random_state, torch.get_rng_state())
    model.bad = False
    assert math.isfinite(session.step(batch, loss_fn).loss)


def test_a_resumed_session_goes_on_as_the_first_would_have() -> None:
    batch = images()
    model, twin = convolutional(), convolutional()
    session = Session(model, sgd(model), None, bits=2, seed=7)
    straight = [session.step(batch, cross_entropy).loss for _ in range(4)]

    first = Session(twin, sgd(twin), None, bits=2, seed=7)
    begun = [first.step(batch, cross_entropy).loss for _ in range(2)]
    state = json.loads(json.dumps(first.state_dict()))
    second = Session(twin, first.optimizer, None, bits=2)
    second.load_state_dict(state)
    assert begun + [second.step(batch, cross_entropy).loss for _ in range(2)] == straight


def test_a_plan_that_travels_is_not_resumed_without_host_memory() -> None:
    model, batch = convolutional(), images()
    session = Session(model, sgd(model), None, bits=2)
    session.step(batch, cross_entropy)
    plan = session.plan
    assert plan is not None
    session._plan_controller.selector.settle_on(replace(plan, policy=with_host_codes(plan.policy)))
    with pytest.raises(ValueError, match="give host_bytes as the session had"):
        Session(model, sgd(model), None, bits=2).load_state_dict(session.state_dict())


def test_a_session_resumed_before_its_first_step_still_measures_that_step() -> None:
    model, batch = convolutional(), images()
    with Session(
        model, sgd(model), process_memory.resident_bytes() + 200_000_000, bits=2
    ) as session:
        session.prepare(batch, cross_entropy)
        session._plan_controller.selector.first = replace(session.plan, policy=coded_policy(1))
        state = json.loads(json.dumps(session.state_dict()))
    with Session(
        model, sgd(model), process_memory.resident_bytes() + 200_000_000, bits=2
    ) as resumed:
        resumed.load_state_dict(state)
        assert resumed._plan_controller.selector.first == session._plan_controller.selector.first
        assert resumed.profile == session.profile
        assert resumed.plan == session.plan


@pytest.mark.skipif(unsupported_reason() is not None, reason=str(unsupported_reason()))
def test_a_step_that_is_refused_memory_is_retried_under_a_tighter_plan() -> None:
    batch = images(64, 64)
    model, twin = deep(), deep()
    with Session(model, sgd(model), "8GB") as session:
        session.prepare(batch, cross_entropy)
        session._plan_controller.selector.first = None
        assert session.plan is not None
        assert session.plan.policy.name == "plain"
        # As if other memory had grown since: plain no longer fits, codes do.
        session.budget_bytes = process_memory.resident_bytes() + 135_000_000
        report = session.step(batch, cross_entropy)
        assert session.plan.policy.name not in ("plain", "exact")
        assert session.peak_bytes <= session.budget_bytes
    # One step's statistics, not two; and the loss that plain would have had.
    assert report.loss == plain_steps(twin, batch, 1)[0]
    assert torch.equal(model[1].running_mean, twin[1].running_mean)
    assert int(model[1].num_batches_tracked) == 1


@pytest.mark.skipif(unsupported_reason() is not None, reason=str(unsupported_reason()))
def test_a_step_that_nothing_can_hold_leaves_the_parameters_alone() -> None:
    model, batch = convolutional(), images(64, 64)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with Session(model, sgd(model), "8GB") as session:
        session.prepare(batch, cross_entropy)
        session._plan_controller.selector.first = None
        session.budget_bytes = process_memory.resident_bytes() + 20_000_000
        with pytest.raises(BudgetError) as caught:
            session.step(batch, cross_entropy)
        assert caught.value.least_bytes is not None
        assert caught.value.least_bytes > session.budget_bytes
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        session.budget_bytes = process_memory.resident_bytes() + 400_000_000
        assert math.isfinite(session.step(batch, cross_entropy).loss)


def test_a_larger_batch_is_planned_for_anew_and_a_smaller_one_is_not() -> None:
    model = convolutional()
    with Session(model, sgd(model), "8GB", bits=4) as session:
        session.step(images(8), cross_entropy)
        small = session.profile
        session.step(images(6), cross_entropy)
        assert session.profile is small
        session.step(images(16), cross_entropy)
        assert session.profile is not None
        assert session.profile.batch_size == 16
        assert session.plan is not None
        assert session.plan.micro_batch == 16


def test_what_is_set_is_stated_and_undone() -> None:
    model, batch = convolutional(), images()
    with Session(model, sgd(model), process_memory.resident_bytes() + 60_000_000) as session:
        session.step(batch, cross_entropy)
        stated = list(session.settings)
    assert any("glibc" in line for line in stated)
    assert session.settings == []


def run_in_fresh_process(body: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(body)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


BUDGETED = """
import json, torch, torch.nn.functional as F
from daf.core.errors import BudgetError
from daf.memory import process_memory
from daf.memory.process_limit import MemoryKeeper
from daf.session.session import Session
from daf.offload.spill import SpillOptions
from daf.training.models import find_model

recipe = find_model("resnet18")
process_memory.warm_up()
floor = process_memory.resident_bytes()
torch.manual_seed(0)
model = recipe.build({{"classes": 10, "channels": 3, "image_size": 32}})
model = model.to(memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
batch = (
    torch.randn(48, 3, 32, 32).contiguous(memory_format=torch.channels_last),
    torch.randint(0, 10, (48,)),
)
loss_fn = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])
budget = {budget}
try:
    with Session(model, optimizer, budget, baseline_bytes=floor) as session:
        for _ in range(3):
            session.step(batch, loss_fn)
        answer = dict(peak=session.peak_bytes, predicted=session.predicted_peak_bytes,
                      policy=session.plan.policy.name)
except BudgetError as error:
    answer = dict(least=error.least_bytes)
print(json.dumps(answer | dict(floor=floor)))
"""


def test_without_a_budget_a_larger_batch_is_not_cut() -> None:
    model, expected = convolutional(), convolutional()
    with Session(model, sgd(model), None) as session:
        found = [session.step(images(count), cross_entropy) for count in (6, 12, 6)]
    assert [report.micro_batch for report in found] == [6, 12, 12]
    optimizer = sgd(expected)
    for report, count in zip(found, (6, 12, 6), strict=True):
        optimizer.zero_grad()
        loss = cross_entropy(expected, images(count))
        loss.backward()
        optimizer.step()
        assert report.loss == loss.item()
    assert all(map(torch.equal, model.state_dict().values(), expected.state_dict().values()))


@needs_peak
def test_a_budget_that_comes_later_cuts_batches_as_it_must() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10))
    with Session(model, sgd(model), None) as session:
        session.step(images(6), cross_entropy)
        session.budget = "8GB"
        session.step(images(12), cross_entropy)
        assert session.plan is not None
        session.plan = replace(session.plan, micro_batch=6)
        assert session.step(images(12), cross_entropy).micro_batch == 6


def test_a_buffer_that_a_forward_pass_makes_or_grows_stays_and_the_rest_is_restored() -> None:
    class Caching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.zeros(2))
            self.register_buffer("mean", torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            self.cache = torch.ones(len(x))
            self.mean += x.mean()
            self.register_buffer("made", torch.ones(1))
            return x * torch.rand(())

    model, before = Caching(), torch.get_rng_state()
    with preserved_state(model, gradients=True):
        model(torch.ones(5))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(model.mean, torch.zeros(3))
    assert len(model.cache) == 5
    assert torch.equal(model.made, torch.ones(1))


@needs_peak
@pytest.mark.thorough
def test_the_process_stays_below_its_budget_and_the_least_budget_works() -> None:
    refused = run_in_fresh_process(BUDGETED.format(budget="floor + 100_000_000"))
    least = refused["least"]
    # The least depends on a floor that varies by a few MB from process to process.
    held = run_in_fresh_process(BUDGETED.format(budget=least + 8_000_000))
    assert held["peak"] <= least + 8_000_000
    assert held["policy"] != "plain"
    assert abs(held["predicted"] - held["peak"]) <= 0.25 * (held["peak"] - held["floor"])


@needs_peak
def test_where_one_size_fits_a_smaller_one_is_measured_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one alone, what every step takes would seem to grow with the batch."""
    sizes: list[int] = []
    observe = Profiler._observe

    def noted(profiler: Profiler, context: Any, examples: int, *more: Any, **options: Any) -> Any:
        if options.get("again", True):  # not a second time, for the code that the first one read
            sizes.append(examples)
        return observe(profiler, context, examples, *more, **options)

    monkeypatch.setattr(Profiler, "_observe", noted)
    model, batch = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten()), images(48)
    with Session(model, sgd(model), "10MB") as session, pytest.raises(BudgetError):
        session.prepare(batch, cross_entropy)
    assert sizes[-2:] == [6, 3]


@needs_peak
def test_peak_covers_profiling_and_steps() -> None:
    model, batch = convolutional(), images()
    with Session(model, sgd(model), "8GB") as session:
        report = session.step(batch, cross_entropy)
        assert (
            session.peak_bytes >= report.peak_bytes >= process_memory.resident_bytes() - 64 * 2**20
        )
        assert session.predicted_peak_bytes is not None


@needs_peak
@pytest.mark.skipif(unsupported_reason() is not None, reason=str(unsupported_reason()))
def test_measuring_takes_no_more_examples_than_the_budget_has_room_for() -> None:
    def mean_square(model: nn.Module, batch: Batch) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1])

    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())]
    model, batch = nn.Sequential(*layers), (torch.randn(4, 30_000, 64), torch.randn(4, 30_000, 64))
    # Such room does not suffice to show that two examples are the sum of both: it is promised.
    with (
        Session(model, sgd(model), "10MB", split=True) as session,
        pytest.raises(BudgetError) as caught,
    ):
        session.prepare(batch, mean_square)
    assert caught.value.least_bytes is not None
    budget = caught.value.least_bytes + 4 * 2**20
    with (
        Session(model, sgd(model), budget) as session,
        pytest.raises(BudgetError, match=r"no room to show that its parts add up.*split=True"),
    ):
        session.prepare(batch, mean_square)
    process_memory.reset_peak()
    with Session(model, sgd(model), budget, split=True) as session:
        session.prepare(batch, mean_square)
        assert session.peak_bytes <= budget
        for _ in range(3):
            assert session.step(batch, mean_square).peak_bytes <= budget
    assert session.plan is not None
    assert session.plan.micro_batch == 1
    assert session.profile is not None
    # Two examples, as would be measured in any larger room, would not have fitted.
    assert planner.level_peak_bytes(session.profile, 2, "1") > budget


class TakingBeside(nn.Module):
    """Takes memory in passing that is no tensor, as libraries' matrix products do."""

    bytes_of_each = 24 * 2**20

    def forward(self, x: Tensor) -> Tensor:
        with mmap.mmap(-1, self.bytes_of_each * len(x)) as room:
            for place in range(0, len(room), 4096):
                room[place] = 1
        return x


@needs_peak
@pytest.mark.skipif(unsupported_reason() is not None, reason=str(unsupported_reason()))
@pytest.mark.parametrize(
    ("room_mb", "is_watched"),
    [
        (230, True),
        *(
            pytest.param(room_mb, is_watched, marks=pytest.mark.thorough)
            for room_mb in (260, 290, 320)
            for is_watched in ((True, False) if room_mb > 260 else (True,))
        ),
    ],
)
def test_measuring_leaves_room_for_what_libraries_take_in_passing(
    room_mb: int, is_watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether four examples fit beside that memory was predicted from tensors alone.

    On a busy machine whoever watches what grows beside them may come too late.
    """
    if not is_watched:
        monkeypatch.setattr(MemoryKeeper, "follow_growth", lambda _: False)

    def mean_square(model: nn.Module, batch: Batch) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1])

    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())]
    model = nn.Sequential(*layers, TakingBeside())
    batch = (torch.randn(16, 30_000, 64), torch.randn(16, 30_000, 64))
    budget = process_memory.resident_bytes() + room_mb * 10**6
    process_memory.reset_peak()
    with Session(model, sgd(model), budget) as session:
        session.prepare(batch, mean_square)
        assert session.peak_bytes <= budget


class Cells(nn.Module):
    """A cell's first state is all zeros, of two values as dropout's noise is."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(16, 32)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), 32), x.new_zeros(len(x), 32)
        for step in range(x.shape[1]):
            state = self.cell(x[:, step], state)
        return state[0]


@pytest.mark.usefixtures("whole_batches_are_fastest")
@pytest.mark.parametrize("share", [0.2, pytest.param(0.5, marks=pytest.mark.thorough)])
def test_cells_that_run_again_and_again_train_within_a_budget(share: float) -> None:
    """What a site saves need not be of one kind, but it has one treatment."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    batch = torch.randn(2048, 16, 16)
    torch.manual_seed(0)
    model = Cells()
    options = {"sensitivity": False}
    with Session(model, torch.optim.SGD(model.parameters(), 0.1), "8GB", **options) as session:
        whole = session.prepare(batch, loss).predicted_peak_bytes
        least = session.least_feasible_bytes()
        cells = [each for each in session.profile.savings if each.site.operator == "lstm_cell"]
        needs = {
            site: {e.need for e in cells if e.site == site} for site in {e.site for e in cells}
        }
        assert any(len(each) > 1 for each in needs.values())
        assert not any(Need.TWO_VALUED in each for each in needs.values())
    budget = int(least + share * (whole - least))
    with Session(model, torch.optim.SGD(model.parameters(), 0.1), budget, **options) as session:
        peaks = [session.step(batch, loss).peak_bytes for _ in range(3)]
    assert max(peaks) <= budget < whole


@needs_peak
def test_what_waits_for_the_disk_is_within_the_budget(tmp_path: Path) -> None:
    """Nothing waits to be written, or is read ahead, but in memory that a plan leaves over."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(8))
    model = nn.Sequential(nn.BatchNorm1d(64), *blocks)  # so that the batch stays whole
    optimizer, batch = torch.optim.SGD(model.parameters(), 0.1), torch.randn(256, 64, 256)
    options = {
        "tolerance": 0.0,
        "sensitivity": False,
        "spill": SpillOptions(tmp_path, allow_memory=True),
    }
    with Session(model, optimizer, "8GB", **options) as session:
        session.prepare(batch, loss)
        least = session.least_feasible_bytes()
    assert least is not None
    budget = least + 6 * 2**20
    with Session(model, optimizer, budget, **options) as session:
        reports = [session.step(batch, loss) for _ in range(2)]
        spilled_bytes = session._capture.stats.spilled_peak_bytes
    assert max(each.peak_bytes for each in reports) <= budget
    assert spilled_bytes >= 4 * batch.nbytes
