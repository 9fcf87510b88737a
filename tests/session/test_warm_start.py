"""A second session of the same job begins at once, and believes nothing that has changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from daf._native import allocator as native
from torch import Tensor, nn

from daf import Session
from daf.core.errors import BudgetError, ClosedSessionError
from daf.memory import process_memory
from daf.planning import candidate
from daf.profiling import split_choice
from daf.profiling.profiler import Profiler
from daf.session import warm_start
from daf.session.plan_selector import PlanSelector
from daf.session.step_profiles import StepProfiles
from daf.session.step_runner import StepRunner
from daf.session.warm_start import WarmStart

pytestmark = pytest.mark.skipif(
    bool(native.unsupported_reason()), reason="needs redirected allocations"
)
EXAMPLES = 64


class Network(nn.Module):
    """Its examples read one another where the buffer ``mixes`` is not 0: they cannot be cut."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(64, width), nn.GELU(), nn.Linear(width, width), nn.GELU()
        )
        self.head = nn.Linear(width, 10)
        self.register_buffer("mixes", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x).mean(1)
        result: Tensor = self.head(hidden + self.mixes * hidden.mean(0))
        return result


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def other_loss(model: nn.Module, batch: Any) -> Tensor:
    return 0.5 * F.cross_entropy(model(batch[0]), batch[1])


def batch(examples: int = EXAMPLES) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(examples, 256, 64), torch.randint(0, 10, (examples,))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DAF_CACHE", str(tmp_path))
    return tmp_path / "starts"


@pytest.fixture
def profiles(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many profiles were measured so far: one entry each."""
    found: list[int] = []
    measure = Profiler.profile

    def counted(self: Profiler, *arguments: Any, **options: Any) -> Any:
        found.append(1)
        return measure(self, *arguments, **options)

    monkeypatch.setattr(Profiler, "profile", counted)
    return found


def budget_of(megabytes: int) -> int:
    return process_memory.taken_bytes() + megabytes * 1_000_000


def run(
    steps: int = 2,
    width: int = 256,
    loss_fn: Callable[..., Any] = loss,
    examples: int = EXAMPLES,
    mixes: float = 0.0,
    **options: Any,
) -> Session:
    torch.manual_seed(0)
    model = Network(width)
    model.mixes.fill_(mixes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    budget = options.pop("budget", None) or budget_of(400)
    with Session(model, optimizer, budget, **options) as session:
        for _ in range(steps):
            session.step(batch(examples), loss_fn)
    return session


@pytest.mark.parametrize("is_roomy", [True, False])
def test_what_is_proven_again_takes_one_small_step_where_there_is_room(
    is_roomy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first step reads code, so that its bytes are too many: if they fit, a second is spared."""
    sizes: list[int] = []
    observe = Profiler._observe_once

    def noted(self: Profiler, context: Any, examples: int, *rest: Any) -> Any:
        sizes.append(examples)
        return observe(self, context, examples, *rest)

    budget = budget_of(400)
    run(steps=1, budget=budget)
    monkeypatch.setattr(Profiler, "_observe_once", noted)
    if not is_roomy:
        monkeypatch.setattr(split_choice, "MOST_EXAMPLES", 10_000)
    assert run(steps=1, budget=budget).began_warm
    assert sizes[:2] == ([1] if is_roomy else [1, 1])


def test_a_second_session_measures_nothing_and_trains_the_same(profiles: list[int]) -> None:
    budget = budget_of(400)
    cold = run(budget=budget, tolerance=0.0)
    measured = len(profiles)
    assert measured
    assert not cold.began_warm
    warm = run(budget=budget, tolerance=0.0)
    assert warm.began_warm
    assert len(profiles) == measured
    assert warm.profile is not None
    assert cold.profile is not None
    assert warm.profile.savings == cold.profile.savings
    for ours, before in zip(warm.model.parameters(), cold.model.parameters(), strict=True):
        torch.testing.assert_close(ours, before)  # in other parts: rounded otherwise


def test_whatever_else_a_job_is_it_is_measured(profiles: list[int]) -> None:
    budget = budget_of(400)
    run(budget=budget)
    others: tuple[dict[str, Any], ...] = (
        {"width": 192},
        {"loss_fn": other_loss},
        {"examples": 48},
        {"tolerance": 0.0},
        {"budget": 2 * budget},
        {"cache": False},
    )
    for other in others:
        before = len(profiles)
        assert not run(**{"budget": budget, **other}).began_warm
        assert len(profiles) > before, other
    assert run(budget=budget).began_warm  # that of the first is still there


def test_a_cut_that_values_have_made_wrong_is_not_believed(profiles: list[int]) -> None:
    """Buffers' values are in no key, and the same operators run."""
    budget = budget_of(60)
    known = run(budget=budget, tolerance=0.0)
    assert known.plan is not None
    assert known.plan.micro_batch < EXAMPLES
    assert run(budget=budget, tolerance=0.0).began_warm
    measured = len(profiles)
    with pytest.raises(BudgetError):
        run(budget=budget, tolerance=0.0, mixes=1.0)
    assert len(profiles) > measured


@pytest.mark.usefixtures("whole_batches_are_fastest")
def test_nor_where_the_plan_would_not_cut_it_yet(profiles: list[int]) -> None:
    """Budgets fall, and then a cut that was proven for other values would be used."""
    budget = budget_of(400)
    known = run(budget=budget, tolerance=0.0)
    assert known.plan is not None
    assert known.plan.micro_batch == EXAMPLES
    measured = len(profiles)
    mixing = run(budget=budget, tolerance=0.0, mixes=1.0)
    assert not mixing.began_warm
    assert len(profiles) > measured
    assert mixing.split_refusal


def test_an_interrupt_in_the_proof_leaves_nothing_believed(
    profiles: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = budget_of(400)
    run(budget=budget)
    measured = len(profiles)
    prove = StepProfiles.prove_cut
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Session(model, optimizer, budget) as session:
        monkeypatch.setattr(StepProfiles, "prove_cut", raises(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            session.step(batch(), loss)
        assert session.plan is None
        assert session.sensitivity is None
        monkeypatch.setattr(StepProfiles, "prove_cut", prove)
        session.step(batch(), loss)
        assert not session.began_warm
    assert len(profiles) > measured


def raises(error: type[BaseException]) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


def test_a_first_step_that_does_not_fit_is_measured_and_what_was_known_dropped(
    folder: Path, profiles: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = budget_of(400)
    run(budget=budget)
    measured = len(profiles)
    step, refused = StepRunner.run, []

    def refuses_once(*arguments: Any, **options: Any) -> Any:
        if not refused:
            refused.append(sorted(folder.iterdir()))
            raise BudgetError("no room", 1)
        return step(*arguments, **options)

    monkeypatch.setattr(StepRunner, "run", refuses_once)
    again = run(budget=budget)
    assert not again.began_warm
    assert len(profiles) > measured
    assert len(refused[0]) == 1
    assert run(budget=budget).began_warm  # of what was measured then


def test_so_it_is_in_a_process_that_holds_more(
    profiles: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = budget_of(400)
    run(budget=budget, tolerance=0.0)
    measured, step, refused = len(profiles), StepRunner.run, [BudgetError("no room", 1)]
    held = torch.ones(45_000_000)  # 180 MB

    def refuses_once(*arguments: Any, **options: Any) -> Any:
        if refused:
            raise refused.pop()
        return step(*arguments, **options)

    monkeypatch.setattr(StepRunner, "run", refuses_once)
    assert not run(budget=budget, tolerance=0.0).began_warm
    assert len(profiles) > measured
    del held


def test_a_plan_of_the_user_s_is_no_other_session_s(folder: Path) -> None:
    budget = budget_of(400)
    model = Network()
    with Session(model, torch.optim.SGD(model.parameters(), lr=0.01), budget) as session:
        plan = session.prepare(batch(), loss)
        session.plan = replace(plan, reason="mine")
        session.step(batch(), loss)
    assert list(folder.iterdir()) == []


def test_what_was_measured_of_another_loss_or_beside_gradients_is_not_kept(folder: Path) -> None:
    budget = budget_of(400)
    model = Network()
    with Session(model, torch.optim.SGD(model.parameters(), lr=0.01), budget) as session:
        session.step(batch(), loss)
        (kept,) = folder.iterdir()
        before = kept.read_bytes()
        session._plan_controller.selector.forget()
        session.step(batch(), other_loss)
        assert session._warm_start._measured < session._plan_controller.step_profiles.measured
    assert kept.read_bytes() == before
    kept.unlink()
    accumulating = Network()
    optimizer = torch.optim.SGD(accumulating.parameters(), lr=0.01)
    with Session(accumulating, optimizer, budget) as session:
        for _ in range(2):
            session.backward(batch(), loss)
        session.update()
        session.step(batch(), loss)
        assert session._plan_controller.most_users_gradient_bytes > 0
        kept.unlink(missing_ok=True)  # of the first pass, beside no gradients
    assert list(folder.iterdir()) == []


def test_a_session_ends_even_where_nothing_can_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Network()
    session = Session(model, torch.optim.SGD(model.parameters(), lr=0.01), budget_of(400))
    session.step(batch(), loss)
    monkeypatch.setattr(WarmStart, "keep", raises(ZeroDivisionError))
    with pytest.raises(ZeroDivisionError):
        session.close()
    assert native.settings() == (None, None)
    with pytest.raises(ClosedSessionError):
        session.step(batch(), loss)


def test_a_process_that_holds_more_plans_beside_it() -> None:
    budget = budget_of(400)
    first = run(budget=budget, tolerance=0.0)
    held = torch.ones(45_000_000)  # 180 MB
    again = run(budget=budget, tolerance=0.0)
    assert again.began_warm
    assert again.profile is not None
    assert first.profile is not None
    more_bytes = again.profile.resident_bytes - first.profile.resident_bytes
    assert more_bytes > held.nbytes / 2  # part of it took the place of what measuring left
    assert again.peak_bytes <= budget


def test_a_damaged_or_older_file_is_measured_anew(
    folder: Path, profiles: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    budget = budget_of(400)
    run(budget=budget)
    (kept,) = folder.iterdir()
    kept.write_bytes(kept.read_bytes()[:-20])
    before = len(profiles)
    assert not run(budget=budget).began_warm
    assert len(profiles) > before
    assert "is damaged" in caplog.text


def test_nothing_is_kept_where_no_folder_is_wanted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DAF_CACHE", "")
    run()
    assert not folder.exists()


@pytest.mark.usefixtures("whole_batches_are_fastest")
def test_a_budget_near_the_one_that_was_kept_has_a_plan_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(warm_start, "NEAR", 1e9)  # all are
    known = run(tolerance=0.0)
    assert known.plan is not None
    assert known.plan.micro_batch == EXAMPLES
    less = known.plan.predicted_peak_bytes - 40_000_000
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Session(model, optimizer, less, tolerance=0.0) as session:
        assert session.prepare(batch(), loss).predicted_peak_bytes <= less
        assert session.began_warm
        assert session.step(batch(), loss).peak_bytes <= less


def test_a_near_budget_that_holds_no_plan_is_refused_as_by_a_cold_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # So that less than the least would do, whatever earlier tests in this process give back.
    monkeypatch.setattr(candidate, "MARGIN_BYTES", 1_000_000_000)
    monkeypatch.setattr(warm_start, "NEAR", 10.0)
    with pytest.raises(BudgetError) as cold:
        run(budget=budget_of(50), cache=False)
    least = cold.value.least_bytes
    assert least is not None
    run(budget=least + 200_000_000)
    assert run(budget=least + 200_000_000).began_warm
    with pytest.raises(BudgetError) as warm:
        run(budget=least - 300_000_000)
    assert (warm.value.least_bytes or 0) > least - 300_000_000


@pytest.mark.usefixtures("whole_batches_are_fastest")
def test_a_near_budget_and_a_process_that_holds_more_take_one_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(warm_start, "NEAR", 1e9)
    budget = budget_of(400)
    run(budget=budget, tolerance=0.0)
    planned: list[str] = []
    for name in ("regrow", "again"):
        plan = getattr(PlanSelector, name)

        def counted(*arguments: Any, _plan: Any = plan, _name: str = name, **options: Any) -> Any:
            planned.append(_name)
            return _plan(*arguments, **options)

        monkeypatch.setattr(PlanSelector, name, counted)
    held = torch.ones(45_000_000)  # 180 MB
    again = run(budget=budget + 30_000_000, tolerance=0.0)
    assert again.began_warm
    assert again.peak_bytes <= budget + 30_000_000
    assert planned == ["regrow"]
    del held
