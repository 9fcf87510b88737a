"""``compress(model, budget=...)``: loops that keep their step are plain's, within a budget."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import io
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from daf._native import allocator as native
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import daf
from daf.core.errors import BudgetError, ClosedSessionError
from daf.memory import glibc, process_memory
from daf.session.forward.compress import BudgetedForward

WIDTH, ROWS = 1024, 2048
torch.optim.SGD([torch.zeros(1)], lr=0.1)  # loads what every optimizer does
PLAIN_CALL = nn.Module.__call__


def block(outer: int) -> nn.Sequential:
    """Saves 16 KB a row, or its input of 256 bytes."""
    acts = (nn.GELU(), nn.Tanh(), nn.SiLU())
    return nn.Sequential(nn.Linear(outer, WIDTH), *acts, nn.Linear(WIDTH, outer), nn.Dropout(0.1))


class Blocks(nn.Module):
    """Saves 200 MB for a batch; ``checkpointed``: its first block saves its input only."""

    def __init__(self, *, checkpointed: bool = False, outer: int = 64) -> None:
        super().__init__()
        self.first = nn.Linear(16, outer)
        self.blocks = nn.ModuleList(block(outer) for _ in range(6))
        self.last = nn.Linear(outer, 4)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for index, each in enumerate(self.blocks):
            again = self.checkpointed and index == 0
            x = x + (checkpoint(each, x, use_reentrant=False) if again else each(x))
        return self.last(x)


def rows(seed: int = 0, count: int = ROWS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 4, (count,), generator=generator)
    return torch.randn(count, 16, generator=generator), labels


def roomy(room_bytes: int) -> int:
    gc.collect()
    glibc.return_free_memory()
    return process_memory.resident_bytes() + room_bytes


TIGHT, AMPLE = 160_000_000, 600_000_000  # in the first, plain does not fit by 30 MB or more
TIGHTER = 100_000_000  # exact treatments take much longer than codes


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    yield
    gc.collect()
    assert native.settings()[1] is None
    assert nn.Module.__call__ is PLAIN_CALL


def train(
    model: nn.Module,
    forward: Callable[[Tensor], Tensor],
    steps: int = 4,
    *,
    amp: bool = False,
    batches: Callable[[int], tuple[Tensor, Tensor]] = rows,
) -> list[float]:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    torch.manual_seed(1)
    for step in range(steps):
        inputs, labels = batches(step)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16) if amp else contextlib.nullcontext():
            loss = F.cross_entropy(forward(inputs), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def compared(
    model: nn.Module, *, is_tight: bool = True, amp: bool = False, count: int = ROWS
) -> BudgetedForward:
    """Train under a budget and plainly; the same losses and weights must result."""
    plain, budget = copy.deepcopy(model), roomy(TIGHT if is_tight else AMPLE)
    batches = functools.partial(rows, count=count)

    def forward(inputs: Tensor) -> Tensor:
        with daf.compress(model, budget=budget, tolerance=0):
            return model(inputs)

    losses = train(model, forward, amp=amp, batches=batches)
    found = BudgetedForward.of(model)
    assert found is not None
    assert found.report()["unplanned_because"] == ""
    assert found.peak_bytes <= budget
    found.close()
    expected = train(plain, plain, amp=amp, batches=batches)
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
    return found


@pytest.mark.parametrize("is_tight", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_trains_as_plain_within_the_budget(*, is_tight: bool) -> None:
    found = compared(Blocks(), is_tight=is_tight)
    assert found.plan is not None
    assert (found.plan.policy.name == "plain") != is_tight


@pytest.mark.thorough
def test_checkpoints_inside() -> None:
    compared(Blocks(checkpointed=True))


def in_child(code: str, *arguments: str) -> str:
    """Run code that imports this file, in a process of its own; return what it printed."""
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    folder = Path(__file__).parent
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def test_autocast_inside() -> None:
    """In a process of its own: oneDNN keeps kernels of every shape in half types for good.

    Small: processors without instructions for half types multiply them a hundred times slower.
    """
    in_child("import test_compress as own; own.compared(own.Blocks(outer=16), amp=True, count=512)")


def test_codes_hold_less() -> None:
    model, budget = Blocks(), roomy(TIGHTER)
    with daf.compress(model, budget=budget, tolerance=1.0) as found:
        losses = train(model, model, 6)
    report = found.report()
    assert report["saved_bytes_peak"] < report["saved_bytes_plain"] / 2
    assert found.peak_bytes <= budget
    assert losses[-1] < 1.5
    found.close()


def test_evaluation_nesting_and_copies_inside() -> None:
    model, budget = Blocks(), roomy(AMPLE)
    average = torch.optim.swa_utils.AveragedModel(model)
    inputs, labels = rows()
    with daf.compress(model, budget=budget) as found, daf.compress(model, budget=budget) as same:
        assert same is found
        with torch.no_grad():
            model(inputs)
        assert found.plan is None  # nothing is saved, so nothing was planned
        F.cross_entropy(model(inputs), labels).backward()
        average.update_parameters(model)
        copied = copy.deepcopy(model)
    assert found.report()["calls"] == 1
    assert BudgetedForward.of(copied) is None
    torch.save(model, io.BytesIO())
    found.close()
    assert BudgetedForward.of(model) is None
    with pytest.raises(ClosedSessionError, match="again"), found:
        pass
    with daf.compress(model, budget=budget) as another:
        assert another is not found
    another.close()


def test_two_models_of_an_adversarial_pair_are_plains() -> None:
    def pair() -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(0)
        maker = nn.Sequential(nn.Linear(8, WIDTH), nn.GELU(), nn.Linear(WIDTH, 16))
        return maker, nn.Sequential(nn.Linear(16, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 1))

    def play(maker: nn.Module, judge: nn.Module, budget: int | None) -> list[float]:
        ours = (
            torch.optim.Adam(maker.parameters(), 1e-3),
            torch.optim.Adam(judge.parameters(), 1e-3),
        )
        losses = []
        entered = [daf.compress(m, budget=budget, tolerance=0) for m in (maker, judge) if budget]
        for step in range(4):
            noise = torch.randn(512, 8, generator=torch.Generator().manual_seed(step))
            with (
                entered[0] if entered else contextlib.nullcontext(),
                entered[1] if entered else contextlib.nullcontext(),
            ):
                made = maker(noise)
                loss = (
                    F.softplus(judge(made.detach())).mean() + F.softplus(-judge(rows()[0])).mean()
                )
                ours[1].zero_grad()
                loss.backward()
                ours[1].step()
                ours[0].zero_grad()
                wrong = F.softplus(-judge(made)).mean()
            wrong.backward()
            ours[0].step()
            losses += [float(loss.detach()), float(wrong.detach())]
        if budget:
            assert max(each.peak_bytes for each in entered) <= budget
            for each in entered:
                each.close()
        return losses

    torch.testing.assert_close(play(*pair(), roomy(AMPLE)), play(*pair(), None), rtol=1e-4, atol=0)


def test_larger_batches_are_planned_for() -> None:
    model, budget = Blocks(), roomy(TIGHT)

    def growing(step: int) -> tuple[Tensor, Tensor]:
        return rows(step, 512 * (1 + step))

    with daf.compress(model, budget=budget, tolerance=0.5) as found:
        train(model, model, 4, batches=growing)
    assert found.peak_bytes <= budget
    found.close()


def test_a_backward_pass_without_room_is_refused_too() -> None:
    model = Blocks()
    with daf.compress(model, budget=roomy(AMPLE)) as found:
        loss = F.cross_entropy(model(rows()[0]), rows()[1])
    found.budget = roomy(1)
    with pytest.raises(BudgetError, match="asked for a budget"):
        loss.backward()
    found.close()


def test_a_forgotten_model_leaves_no_limit() -> None:
    model = Blocks()
    with daf.compress(model, budget=roomy(AMPLE)):
        model(rows()[0])
    assert native.settings()[1] is not None
    found = weakref.ref(model)
    del model
    gc.collect()
    assert found() is None


def test_bits_and_a_budget_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="one of the two"):
        daf.compress(Blocks(), 2, budget="2GB")  # type: ignore[call-overload]


LOOP = """
    import sys
    import torch, daf
    from test_compress import Blocks, rows, train
    from daf.memory import process_memory
    model = Blocks()
    budget = int(sys.argv[1]) or process_memory.resident_bytes() + 60_000_000
    try:
        with daf.compress(model, budget=budget, tolerance=0) as found:
            train(model, model, batches=lambda step: rows(step, 16_384))
    except daf.BudgetError as error:
        print(error.least_bytes)
    else:
        print(max(found.peak_bytes, process_memory.peak_bytes()) <= budget)
"""


@pytest.mark.thorough
def test_the_least_budget_that_is_named_holds_in_another_process() -> None:
    least = in_child(LOOP, "0")
    assert in_child(LOOP, least) == "True"


CLASSES = 16_000
LOGITS_BYTES = 1024 * CLASSES * 4  # 66 MB; plain PyTorch's cross-entropy holds two more


class Words(nn.Module):
    """A model of many classes, whose loss lies outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(16, 32), nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.first(x))).unsqueeze(1)


def words(step: int) -> tuple[Tensor, Tensor]:
    return rows(step, 1024)


def trained_words(model: Words, budget: int, *, is_inside: bool) -> list[float]:
    """Four steps; the loss inside ``with`` or behind it."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(4):
        inputs, labels = words(step)
        optimizer.zero_grad()
        with daf.compress(model, budget=budget, tolerance=0) as forward:
            scores = model(inputs).flatten(0, 1)
            if is_inside:
                loss = F.cross_entropy(scores, labels)
        loss = loss if is_inside else F.cross_entropy(scores, labels)
        del scores
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert forward.peak_bytes <= budget
    return losses


def test_a_loss_inside_holds_its_logits_once() -> None:
    model = Words()
    plain, budget = copy.deepcopy(model), roomy(int(2.2 * LOGITS_BYTES))
    losses = trained_words(model, budget, is_inside=True)
    assert torch._C._len_torch_function_stack() == 0
    found = BudgetedForward.of(model)
    assert found is not None
    found.close()
    expected = train(plain, lambda x: plain(x).flatten(0, 1), batches=words)
    assert losses[0] == pytest.approx(expected[0], rel=1e-6)  # later ones were clipped


def test_of_two_models_inside_either_may_have_the_loss() -> None:
    first, second = Words(), Words()
    budget = roomy(int(2.2 * LOGITS_BYTES))  # two more tensors would not fit
    inputs, labels = words(0)
    with (
        daf.compress(first, budget=budget, tolerance=0) as outer,
        daf.compress(second, budget=budget, tolerance=0) as inner,
    ):
        F.cross_entropy(first(inputs).flatten(0, 1), labels).backward()
        F.cross_entropy(second(inputs).flatten(0, 1), labels).backward()
    for each in (outer, inner):
        assert each.peak_bytes <= budget
        each.close()


def test_a_loss_behind_holds_what_plain_pytorch_holds_and_the_least_budget_says_so() -> None:
    model = Words()
    with pytest.raises(BudgetError) as refused:
        trained_words(model, roomy(int(2.2 * LOGITS_BYTES)), is_inside=False)
    found, least = BudgetedForward.of(model), refused.value.least_bytes
    assert found is not None
    assert least is not None
    found.close()
    del refused
    again = Words()
    trained_words(again, least, is_inside=False)
    forward = BudgetedForward.of(again)
    assert forward is not None
    forward.close()
