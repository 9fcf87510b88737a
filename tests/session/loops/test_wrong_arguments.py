"""What is no model, optimizer, loss, batch or budget is one clear error, before anything ran."""

from __future__ import annotations

import copy
import functools
import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import daf
from daf.core.errors import ClosedSessionError, DafError, DataError, OptionError, UnitError

Batch = tuple[Tensor, Tensor]
DOORS = ("step", "backward", "evaluate", "prepare")


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


def batch_of(rows: int = 6) -> Batch:
    return torch.randn(rows, 8), torch.randint(0, 4, (rows,))


def classified(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def through(door: str, batch: Any, loss: Any, budget: Any = None) -> Any:
    """Go through a door of a new session; its model must not change if that fails."""
    model = network()
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with daf.Session(model, optimizer, budget) as session:
        try:
            return getattr(session, door)(batch, loss)
        finally:
            if door != "step":
                assert all(torch.equal(each, before[n]) for n, each in model.state_dict().items())


class Loss:
    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        return classified(model, batch)

    def short(self, model: nn.Module) -> Tensor:
        return model(torch.randn(2, 8)).sum()


def decorated(function: Callable[..., Any]) -> Callable[[nn.Module, Batch], Any]:
    @functools.wraps(function)
    def loss(model: nn.Module, batch: Batch) -> Any:
        return function(model(batch[0]), batch[1])

    return loss


UNCALLABLE: list[Any] = [
    *(None, "cross_entropy", 3, torch.ones(())),
    *(lambda: 1, lambda _: 1, lambda a, b, c: a + b + c, lambda _, *, batch: batch),
    *(functools.partial(classified, 1, 2), Loss().short),
    *(F.cross_entropy, F.mse_loss, nn.CrossEntropyLoss(), nn.MSELoss),
]
RIGHT: list[Any] = [
    *(classified, Loss(), Loss().__call__, functools.partial(classified)),
    *(
        decorated(F.cross_entropy),
        lambda *both: classified(*both),
        lambda m, b, c=1: classified(m, b) * c,
    ),
]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("loss", UNCALLABLE)
def test_a_loss_that_takes_no_model_and_batch_is_refused_before_it_is_called(
    loss: Any, door: str
) -> None:
    with pytest.raises(DataError, match="which it does not take; give a function such as"):
        through(door, batch_of(), loss, "8GB" if door == "prepare" else None)


@pytest.mark.parametrize("loss", RIGHT)
def test_every_callable_of_a_model_and_a_batch_trains(loss: Any) -> None:
    assert math.isfinite(through("step", batch_of(), loss).loss)


def test_a_function_of_native_code_is_left_alone() -> None:
    with pytest.raises(TypeError, match="must be Tensor"):
        through("evaluate", batch_of(), torch.add)


WRONG_RESULTS: list[Any] = [
    *(None, 1.0, "loss", {}, (), torch.zeros(3, requires_grad=True) * 1, torch.zeros(())),
    *((torch.zeros((), requires_grad=True) * 1, each) for each in (None, "x", torch.ones(3), 1j)),
]


@pytest.mark.parametrize("budget", [None, "8GB"])
@pytest.mark.parametrize("door", ["step", "backward"])
@pytest.mark.parametrize("result", WRONG_RESULTS)
def test_what_is_no_loss_is_named(result: Any, door: str, budget: Any) -> None:
    def loss(model: nn.Module, batch: Batch) -> Any:
        model(batch[0])
        return result

    with pytest.raises(DataError, match="must return a scalar tensor"):
        through(door, batch_of(), loss, budget)


@pytest.mark.parametrize("budget", [None, "8GB"])
@pytest.mark.parametrize("door", DOORS[:3])
@pytest.mark.parametrize("kind", [TypeError, ValueError, KeyError, RuntimeError])
def test_what_a_loss_itself_raises_is_passed_on(
    kind: type[Exception], door: str, budget: Any
) -> None:
    mine = kind("takes 1 positional argument but 2 were given")

    def loss(_model: nn.Module, _batch: Batch) -> Tensor:
        raise mine

    with pytest.raises(kind) as found:
        through(door, batch_of(), loss, budget)
    assert found.value is mine


WRONG_BATCHES: list[Any] = [
    *(None, 3, "rows", {"x": torch.randn(6, 8)}, (torch.randn(6, 8),), (3, 4)),
    *((torch.randn(6, 8), torch.randint(0, 4, (5,))), (torch.randn(6, 7), torch.zeros(6).long())),
]


@pytest.mark.parametrize("door", DOORS[:3])
@pytest.mark.parametrize("batch", WRONG_BATCHES)
def test_what_the_model_does_not_take_fails_as_plainly_and_the_next_step_trains(
    batch: Any, door: str
) -> None:
    model, plain = network(), network()
    with pytest.raises(Exception) as expected:
        classified(plain, batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with daf.Session(model, optimizer, None) as session:
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(type(expected.value)) as found:
            getattr(session, door)(batch, classified)
        assert str(found.value) == str(expected.value)
        assert all(torch.equal(each, before[n]) for n, each in model.state_dict().items())
        assert math.isfinite(session.step(batch_of(), classified).loss)


NO_BUDGETS = st.one_of(
    st.sampled_from(
        [True, False, "", "12XB", "-1", "nan", "inf", "200%", "0.0", [], {}, (1,), b"1GB"]
    ),
    st.integers(max_value=0),
    st.floats().filter(lambda each: not 0 < each <= 1),
    st.from_regex(r"[a-z]{1,6}", fullmatch=True).filter(lambda text: text not in ("auto", "b")),
)


@given(NO_BUDGETS)
@settings(max_examples=60, deadline=None)
def test_what_is_no_budget_is_refused_at_every_door(budget: Any) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UnitError):
        daf.Session(model, optimizer, budget)
    with pytest.raises(UnitError):
        daf.compress(model, budget=budget)
    with daf.Session(model, optimizer, "64GB") as session:
        with pytest.raises(UnitError):
            session.budget = budget
        assert session.budget == "64GB"


NO_MODELS: list[Any] = [None, nn.Linear, lambda x: x, 3, torch.ones(1), [nn.Linear(2, 2)]]


@pytest.mark.parametrize("model", NO_MODELS)
def test_what_is_no_model_is_named(model: Any) -> None:
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
    for door in (
        lambda: daf.Session(model, optimizer, None),
        lambda: daf.Session(model, optimizer, "8GB"),
        lambda: daf.compress(model),
        lambda: daf.compress(model, budget="8GB"),
    ):
        with pytest.raises(OptionError, match=r"give a torch\.nn\.Module"):
            door()


@pytest.mark.parametrize("optimizer", [None, torch.optim.SGD, [], "sgd", nn.Linear(2, 2)])
def test_what_is_no_optimizer_is_named(optimizer: Any) -> None:
    with pytest.raises(OptionError, match=r"give a torch\.optim\.Optimizer"):
        daf.Session(network(), optimizer, None)


@pytest.mark.parametrize("budget", [None, "8GB"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_an_optimizer_of_another_model_is_told_before_it_steps(kind: Any, budget: Any) -> None:
    model, other = network(), network()
    before = copy.deepcopy(other.state_dict())
    with (
        daf.Session(model, kind(other.parameters(), lr=0.1), budget) as session,
        pytest.raises(OptionError, match="make the optimizer over this model's"),
    ):
        session.step(batch_of(), classified)
    assert all(torch.equal(each, before[name]) for name, each in other.state_dict().items())


@pytest.mark.parametrize("budget", [None, "8GB"])
def test_a_frozen_model_and_one_without_parameters_are_told(budget: Any) -> None:
    frozen = network().requires_grad_(False)
    for model in (frozen, nn.Flatten()):
        optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
        with daf.Session(model, optimizer, budget) as session, pytest.raises(DafError):
            session.step(batch_of(), lambda m, b: m(b[0]).sum())


def test_numbers_of_numpy_are_numbers() -> None:
    """A tolerance or a norm that was computed."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    norm: Any = np.float32(1)
    options: dict[str, Any] = {"bits": 2, "tolerance": np.float32(0.5)}
    with daf.Session(model, optimizer, None, **options) as session:
        session.step(torch.ones(8, 4), lambda m, x: m(x).square().mean(), max_grad_norm=norm)
    assert session.noise.tolerance == 0.5


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("seed", "now", "a whole number"),
        ("seed", None, "a whole number"),
        ("seed", -1, "from 0 up to"),
        ("seed", 2**64, "from 0 up to"),
        ("fused", "off", "True or False"),
        ("allow_batchnorm_split", "no", "True or False"),
        ("rollback", 3, "a bool, or a folder"),
        ("baseline_bytes", "20MB", "None measures them"),
        ("batch_dim", "rows", "a dimension"),
        ("spill", "/tmp", "SpillOptions"),
        ("sensitivity", "high", "Sensitivity"),
    ],
)
def test_an_argument_of_another_kind_is_one_error(name: str, value: Any, words: str) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    options: dict[str, Any] = {name: value}
    with pytest.raises(OptionError, match=rf"asked for {name}={value!r}; .*{words}"):
        daf.Session(model, optimizer, "8GB", **options)


@pytest.mark.parametrize("state", [{}, None, {"seed": 1}, "state"])
def test_what_is_no_state_is_one_error_and_changes_nothing(state: Any) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with daf.Session(model, optimizer, None, seed=3) as session:
        with pytest.raises(OptionError, match=r"asked to go on from .*what state_dict"):
            session.load_state_dict(state)
        assert session.state_dict()["seed"] == 3


@pytest.mark.parametrize("budget", [None, "8GB"])
@pytest.mark.parametrize("bits", [2, "4-bit"])
def test_codes_and_a_tolerance_of_0_exclude_one_another(budget: Any, bits: Any) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(OptionError, match="tolerance of 0, which treats exactly; give one of the"):
        daf.Session(model, optimizer, budget, bits=bits, tolerance=0)
    with daf.Session(model, optimizer, budget, bits="exact", tolerance=0) as session:
        assert session.noise.tolerance == 0.0


def test_a_closed_session_is_neither_entered_nor_given_a_budget() -> None:
    model = nn.Linear(4, 4)
    session = daf.Session(model, torch.optim.SGD(model.parameters(), 0.1), None)
    session.close()
    with pytest.raises(ClosedSessionError):
        session.budget = "1GB"
    with pytest.raises(ClosedSessionError), session:
        raise AssertionError
    session.close()  # as often as one likes


def test_one_compress_is_of_one_thread_at_a_time() -> None:
    model, found = network(), list[Exception]()
    door = daf.compress(model, bits="exact")

    def enter() -> None:
        try:
            with door:
                model(batch_of()[0])
        except OptionError as error:
            found.append(error)

    with door:
        other = threading.Thread(target=enter)
        other.start()
        other.join()
        loss = classified(model, batch_of())
    loss.backward()
    assert "in two threads; make one for each" in str(found[0])
    enter()
    assert len(found) == 1
