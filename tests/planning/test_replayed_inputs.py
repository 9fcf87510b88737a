"""Inputs of replayed calls: they are held whole, by the replay or by whoever keeps them anyway."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from daf.core.policy import Method
from daf.planning.candidate import Candidate
from daf.planning.options import Allowed
from daf.planning.table import Table, lawful, level_selection, make_table
from daf.profiling import replay_proof
from daf.profiling.step_observer import Observer
from daf.session.session import Session

ALLOWED = Allowed(methods=frozenset(Method) - {Method.SPILL})


class Rectified(nn.Module):
    """Its result is saved by its own last operator and by the next block's first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.down(torch.tanh(self.up(x))))


class Gated(nn.Module):
    """What it replays has an input that is saved beside it too."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = Rectified(width)

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.inner(x) + 1)


def square_mean(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def replaying(table: Table, level: str, modules: set[str]) -> list[int]:
    """The rest at one level; the first column of each module needs inputs that others keep."""
    places = {each.module: place for place, each in reversed(list(enumerate(table.replays)))}
    chosen = [places[module] for module in sorted(modules)]
    covered = frozenset[int]().union(*(table.replays[place].families for place in chosen))
    rest = [c for family, c in enumerate(level_selection(table, level)) if family not in covered]
    return lawful(table, rest + [table.replay_column(place) for place in chosen])


@pytest.fixture(autouse=True)
def time_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is busy refuses no proof."""
    monkeypatch.setattr(replay_proof, "_SMALL_STEP_MS", math.inf)


@pytest.mark.parametrize(("block", "inner"), [(Rectified, ""), (Gated, ".inner")])
@pytest.mark.parametrize("level", ["keep", "8", "1"])
def test_the_account_has_them_at_the_end_of_forward(
    block: type[nn.Module], inner: str, level: str
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), *(block(64) for _ in range(4)))
    batch = torch.randn(64, 64, 64)
    with Session(model, torch.optim.SGD(model.parameters(), 0.1), "8GB") as session:
        session.prepare(batch, square_mean)
        profile, capture = session.profile, session._capture
        assert profile is not None
        table = make_table(profile, 64, ALLOWED)
        selection = replaying(table, level, {f"{n}{inner}" for n in range(1, 5)})
        shared = [each for each in table.replays if each.shared]
        assert shared
        taken = {table.replay_column(place) for place in range(len(table.replays))} & set(selection)
        alone = [table.replays[column - int(table.first[-1])].shared == () for column in taken]
        assert len(alone) == 4
        assert (sum(alone) < 4) == (level == "keep")
        told = table.usage_of(selection) - table.base_bytes
        policy = Candidate(table, selection).as_plan(10**10, "optimal").policy
        with capture.step(policy, 0, 0, batch=batch):
            loss = square_mean(model, batch)
            held_bytes = capture.stats.held_bytes
        loss.backward()
    reported_bytes = told[profile.timeline.forward - 1]
    # The model's own result counts although the loss still has it.
    assert held_bytes <= reported_bytes <= held_bytes + 1.05 * batch.nbytes


class Beside(nn.Module):
    """One input of three readers: a linear layer beside what is replayed, two operators inside."""

    class Inner(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

        def forward(self, x: Tensor) -> Tensor:
            # Backward reads atan's first, which may only be kept, and the other one last.
            return self.down(torch.tanh(self.up(x))) * torch.atan(x)

    def __init__(self, width: int) -> None:
        super().__init__()
        self.beside, self.inner = nn.Linear(width, width), Beside.Inner(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.beside(x) + self.inner(x)


def test_who_lets_go_of_an_input_too_early_does_not_keep_it() -> None:
    """A family of which only a tensor that is read soon is kept; the rest is coded."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), Beside(64), nn.Linear(64, 64))
    batch = torch.randn(64, 64, 64)
    with Session(model, torch.optim.SGD(model.parameters(), 0.1), "8GB") as session:
        session.prepare(batch, square_mean)
        profile = session.profile
    assert profile is not None
    table = make_table(profile, 64, ALLOWED)
    needs = {
        column: alternatives
        for column, alternatives in table.requires
        if column >= table.first[-1] and table.replays[column - int(table.first[-1])].shared
    }
    assert needs
    for column, alternatives in needs.items():
        replay = table.replays[column - int(table.first[-1])]
        alone = table.replays[column - int(table.first[-1]) + 1]
        assert (alone.module, alone.shared) == (replay.module, ())
        own = {(span.first, span.last, span.nbytes) for span in alone.spans}
        missing = own - {(span.first, span.last, span.nbytes) for span in replay.spans}
        assert missing
        last = max(last for _, last, _ in missing)
        most = max(nbytes for _, _, nbytes in missing)
        for moment in range(profile.timeline.forward, last + 1):
            assert all(table.row(moment)[alternative] >= most for alternative in alternatives)


class Chain(nn.Module):
    """What it saves piles up while it runs; nothing else is alive for long."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def test_a_run_in_backward_counts_what_it_holds_once() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), Chain(64), Chain(64), Chain(64), nn.Linear(64, 64))
    batch = torch.randn(512, 64, 64)
    with Session(model, torch.optim.SGD(model.parameters(), 0.1), "8GB") as session:
        session.prepare(batch, square_mean)
        profile, capture = session.profile, session._capture
        assert profile is not None
        table = make_table(profile, 512, ALLOWED)
        selection = replaying(table, "keep", {"1", "2", "3"})
        policy = Candidate(table, selection).as_plan(10**10, "optimal").policy
        observer = Observer(capture, 512)
        with observer.watching():
            with capture.step(policy, 0, 0, batch=batch, watcher=observer):
                loss = square_mean(model, batch)
            observer.begin_backward()
            loss.backward()
    assert len(capture.replays) == 3
    measured_bytes = max(observer.found.peak_bytes)
    told = table.usage_of(selection)[:-1] - profile.resident_bytes - profile.optimizer_bytes
    # Backward's own transients count beside the run's. Were the run's input, or what it makes and
    # holds, counted twice, there would be one tensor more, or two.
    assert measured_bytes <= told.max() <= measured_bytes + 2.1 * batch.nbytes
