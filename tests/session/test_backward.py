"""``session.backward`` leaves the loop to the user: gradients, clipping and updates are plain's."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from daf._native import allocator as native
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from daf import Session
from daf.core.errors import BudgetError, ReleaseRefusedError
from daf.memory import glibc, process_memory
from daf.memory.process_limit import MemoryKeeper

Batch = tuple[Tensor, Tensor]
Make = Callable[[nn.Module], torch.optim.Optimizer]

WIDTH = 1024


def mlp(inputs: int = 16) -> nn.Sequential:
    """Saves 20 KB for each of its examples."""
    smooth = (nn.GELU(), nn.Tanh(), nn.SiLU(), nn.Sigmoid())
    return nn.Sequential(nn.Linear(inputs, WIDTH), *smooth, nn.Linear(WIDTH, 4))


def rows(count: int, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 4, (count,), generator=generator)
    return torch.randn(count, 16, generator=generator), labels


def mean(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def tight(room_bytes: int = 50_000_000) -> int:
    """Of a budget that holds 4,096 rows only in parts."""
    gc.collect()
    glibc.return_free_memory()
    return process_memory.resident_bytes() + room_bytes


def gradients(model: nn.Module) -> list[Tensor]:
    return [each.grad.clone() for each in model.parameters() if each.grad is not None]


def assert_same_weights(model: nn.Module, plain: nn.Module) -> None:
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3)


@settings(max_examples=12, deadline=None)
@given(
    accumulated=st.integers(1, 4),
    clip=st.one_of(st.none(), st.floats(0.01, 2.0)),
    make=st.sampled_from([sgd, adam]),
    scale=st.sampled_from([None, 1024.0]),
    is_tight=st.booleans(),
)
def test_a_loop_of_ones_own_trains_as_plain(
    accumulated: int, clip: float | None, make: Make, scale: float | None, is_tight: bool
) -> None:
    torch.manual_seed(0)
    model = mlp()
    plain = copy.deepcopy(model)
    batches = [rows(512 if is_tight else 64, seed) for seed in range(2 * accumulated)]

    def train(model: nn.Module, backward: Callable[[Batch, torch.amp.GradScaler], None]) -> None:
        optimizer, scaler = optimizers[model is plain], torch.amp.GradScaler("cpu", init_scale=1024)
        for index, batch in enumerate(batches):
            backward(batch, scaler)
            if (index + 1) % accumulated:
                continue
            if scale:
                scaler.unscale_(optimizer)
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            if scale:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            optimizer.zero_grad()

    optimizers = make(model), make(plain)

    def loss_of(model: nn.Module, batch: Batch, scaler: torch.amp.GradScaler) -> Tensor:
        loss = mean(model, batch) / accumulated
        return scaler.scale(loss) if scale else loss

    with Session(model, optimizers[0], tight(40_000_000) if is_tight else None, tolerance=0) as s:

        def ours(batch: Batch, scaler: torch.amp.GradScaler) -> None:
            expected = float(mean(model, batch).detach()) / accumulated
            report = s.backward(batch, lambda m, b: loss_of(m, b, scaler))
            assert report.loss == pytest.approx(expected, rel=1e-3)

        train(model, ours)
    train(plain, lambda batch, scaler: loss_of(plain, batch, scaler).backward())
    assert_same_weights(model, plain)


def test_a_batch_that_fits_only_in_parts_is_added_to_what_was_accumulated() -> None:
    model, batches = mlp(), [rows(4096, seed) for seed in range(3)]
    plain = copy.deepcopy(model)
    for batch in batches:
        for inputs, labels in zip(batch[0].split(256), batch[1].split(256), strict=True):
            (mean(plain, (inputs, labels)) / 16).backward()
    expected = gradients(plain)
    del plain
    with Session(model, sgd(model), tight(), tolerance=0) as session:
        parts = [session.backward(batch, mean).micro_batch for batch in batches]
        assert max(parts) < 4096
        torch.testing.assert_close(gradients(model), expected, rtol=1e-3, atol=1e-6)
        assert session.peak_bytes <= (session.budget_bytes or 0)


def test_what_was_accumulated_survives_a_refusal() -> None:
    model, batch = mlp(), rows(4096)
    with Session(model, sgd(model), None) as session:
        session.backward(rows(64), mean)
        held = gradients(model)
        session.budget = process_memory.resident_bytes() + 2_000_000
        with pytest.raises(BudgetError) as raised:
            session.backward(batch, mean)
        assert all(map(torch.equal, gradients(model), held))
        assert raised.value.least_bytes is not None
        session.budget = None
        session.backward(batch, mean)


def test_two_optimizers_of_an_adversarial_pair_are_plains() -> None:
    """The generator's loss reaches the discriminator, whose gradients are its own loop's."""
    torch.manual_seed(1)
    maker, judge = mlp(), nn.Linear(4, 1)
    plain_maker, plain_judge = copy.deepcopy(maker), copy.deepcopy(judge)
    noise, real = rows(4096)[0], torch.randn(4096, 4)

    def maker_loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
        return F.softplus(-judge(model(batch))).sum(), len(batch)

    def judge_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.no_grad():
            made = maker(batch[0])
        return F.softplus(-model(batch[1])).mean() + F.softplus(model(made)).mean()

    optimizers = sgd(maker), sgd(judge)
    budget = tight()
    with (
        Session(maker, optimizers[0], budget, tolerance=0) as first,
        Session(judge, optimizers[1], budget, tolerance=0) as second,
    ):
        for _ in range(2):
            optimizers[1].zero_grad()
            second.backward((noise, real), judge_loss)
            optimizers[1].step()
            optimizers[0].zero_grad()
            report = first.backward(noise, maker_loss)
            optimizers[0].step()
    assert report.micro_batch < 4096
    optimizers = sgd(plain_maker), sgd(plain_judge)
    for _ in range(2):
        optimizers[1].zero_grad()
        made = plain_maker(noise).detach()
        loss = F.softplus(-plain_judge(real)).mean() + F.softplus(plain_judge(made)).mean()
        loss.backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        F.softplus(-plain_judge(plain_maker(noise))).mean().backward()
        optimizers[0].step()
    assert_same_weights(maker, plain_maker)
    assert_same_weights(judge, plain_judge)
    torch.testing.assert_close(gradients(judge), gradients(plain_judge), rtol=1e-3, atol=1e-6)


def test_update_steps_and_the_next_backward_begins_anew() -> None:
    model = mlp()
    plain = copy.deepcopy(model)
    with Session(model, sgd(model), None) as session:
        for seed in (0, 1):
            session.backward(rows(32, seed), mean)
            assert session.update(max_grad_norm=0.5) is not None
    optimizer = sgd(plain)
    for seed in (0, 1):
        optimizer.zero_grad()
        mean(plain, rows(32, seed)).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
    assert_same_weights(model, plain)


def test_step_clips_and_reports_the_norm() -> None:
    model = mlp()
    plain, optimizer = copy.deepcopy(model), sgd(model)
    with Session(model, optimizer, tight(), tolerance=0, release_gradients="auto") as session:
        report = session.step(rows(4096), mean)
        assert report.gradient_norm is None
        model.load_state_dict(plain.state_dict())
        optimizer.state.clear()
        report = session.step(rows(4096), mean, max_grad_norm=0.05)
        with pytest.raises(ValueError, match="max_grad_norm=0"):
            session.step(rows(4096), mean, max_grad_norm=0)
    mean(plain, rows(4096)).backward()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
    sgd(plain).step()
    assert report.gradient_norm == pytest.approx(float(norm), rel=1e-3)
    assert report.released_gradients == 0
    assert_same_weights(model, plain)


def test_gradients_that_are_the_users_are_never_released() -> None:
    model = mlp()
    with Session(model, sgd(model), None, release_gradients="auto") as session:
        assert session.step(rows(32), mean).released_gradients > 0
        assert session.backward(rows(32), mean).released_gradients == 0
        assert "session.backward leaves gradients" in session.release_refusal
        assert len(gradients(model)) == 4
        model.zero_grad()
        assert session.step(rows(32), mean).released_gradients > 0
    with (
        Session(model, sgd(model), None, release_gradients=True) as session,
        pytest.raises(ReleaseRefusedError, match=r"session\.backward leaves"),
    ):
        session.backward(rows(32), mean)


def test_an_update_without_room_changes_nothing_and_the_bound_stays() -> None:
    model = nn.Linear(4096, 2048)  # 32 MB; Adam's state takes 64
    optimizer = torch.optim.Adam(model.parameters())
    batch = torch.randn(64, 4096)
    before = model.weight.detach().clone()
    budget = process_memory.resident_bytes() + 300_000_000
    with Session(model, optimizer, budget, tolerance=0) as session:
        session.backward(batch, lambda m, b: m(b).square().mean())
        assert isinstance(session._keeper, MemoryKeeper)
        limit = session._keeper._claim.limit_bytes
        assert limit is not None
        held = torch.ones(limit - native.take_watermark()[1] - 20_000_000, dtype=torch.uint8)
        with pytest.raises(BudgetError, match="least") as raised:
            optimizer.step()
        assert isinstance(raised.value, torch.OutOfMemoryError)
        assert torch.equal(model.weight, before)
        assert not optimizer.state
        assert native.settings()[1] is not None
        del held
        optimizer.step()
        assert not torch.equal(model.weight, before)
        assert session.peak_bytes <= budget
        assert native.settings()[1] is not None


def test_the_state_of_another_optimizer_takes_room_too() -> None:
    model = nn.Linear(4096, 2048)  # 32 MB; Adam's state takes 64
    own, other = sgd(model), torch.optim.Adam(model.parameters())
    before = model.weight.detach().clone()
    budget = process_memory.resident_bytes() + 300_000_000
    with Session(model, own, budget, tolerance=0) as session:
        session.backward(torch.randn(64, 4096), lambda m, b: m(b).square().mean())
        assert isinstance(session._keeper, MemoryKeeper)
        limit = session._keeper._claim.limit_bytes
        assert limit is not None
        held = torch.ones(limit - native.take_watermark()[1] - 50_000_000, dtype=torch.uint8)
        with pytest.raises(BudgetError):
            other.step()
        assert torch.equal(model.weight, before)
        del held
        other.step()
        assert not torch.equal(model.weight, before)
        assert session.peak_bytes <= budget


class Failing(torch.optim.SGD):
    is_broken = False

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        if self.is_broken:
            raise ArithmeticError("of the optimizer's own")
        super().step()


def test_an_update_that_fails_leaves_the_next_one_and_the_bound_as_they_were() -> None:
    model = mlp()
    optimizer = Failing(model.parameters(), lr=0.1)
    with Session(model, optimizer, tight(300_000_000), tolerance=0) as session:
        for is_broken in (True, True, False):
            session.backward(rows(64), mean)
            optimizer.is_broken = is_broken
            before = model[0].weight.detach().clone()
            if is_broken:
                with pytest.raises(ArithmeticError):
                    optimizer.step()
            else:
                optimizer.step()
            assert torch.equal(model[0].weight, before) == is_broken
        assert native.settings()[1] is not None
        optimizer.is_broken = True
        with pytest.raises(ArithmeticError):
            optimizer.step()
        session.backward(rows(64), mean)
        assert native.settings()[1] is not None
        assert not session._runner.is_updating


def test_a_scaled_loss_that_overflows_is_the_scalers_business() -> None:
    model = mlp()
    plain, batch = copy.deepcopy(model), rows(64)
    optimizers = sgd(model), sgd(plain)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**127) for _ in range(2)]
    with Session(model, optimizers[0], None) as session:
        for _ in range(4):
            optimizers[0].zero_grad()
            session.backward(batch, lambda m, b: scalers[0].scale(16 * mean(m, b)))
            scalers[0].step(optimizers[0])
            scalers[0].update()
            optimizers[1].zero_grad()
            scalers[1].scale(16 * mean(plain, batch)).backward()
            scalers[1].step(optimizers[1])
            scalers[1].update()
    assert scalers[0].get_scale() == scalers[1].get_scale() < 2.0**127
    assert_same_weights(model, plain)


def test_another_door_plans_anew_where_gradients_may_be_released() -> None:
    model = mlp()
    options = {"tolerance": 0, "release_gradients": "auto"}
    with Session(model, sgd(model), tight(300_000_000), **options) as session:
        session.backward(rows(64), mean)
        reasons = [row.get("reason", "") for row in session.explain()]
        assert any("session.backward leaves" in reason for reason in reasons)
        model.zero_grad()
        session.step(rows(64), mean)
        reasons = [row.get("reason", "") for row in session.explain()]
        assert not any("session.backward leaves" in reason for reason in reasons)


def test_hooks_end_with_the_session() -> None:
    model = mlp()
    hooks = len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks)
    with Session(model, sgd(model), None) as session:
        session.backward(rows(8), mean)
        session.backward(rows(8), mean)
        assert len(_global_optimizer_pre_hooks) == hooks[0] + 1
    assert (len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks)) == hooks
    session = Session(model, sgd(model), None)
    session.backward(rows(8), mean)
    del session
    gc.collect()
    assert (len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks)) == hooks


def test_a_refusal_is_what_recovery_in_other_libraries_looks_for() -> None:
    utils = pytest.importorskip("accelerate.utils.memory")
    model = mlp()
    with (
        Session(model, sgd(model), 50_000_000, tolerance=0) as session,
        pytest.raises(torch.OutOfMemoryError) as raised,
    ):
        session.step(rows(4096), mean)
    assert isinstance(raised.value, BudgetError)
    assert utils.should_reduce_batch_size(raised.value)
