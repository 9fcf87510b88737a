"""What the proof's examples did not show is found when it begins to act, or before."""

from __future__ import annotations

import array
import math
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf import Session
from daf.core.errors import OtherPathError
from daf.memory import process_memory
from daf.memory.glibc import return_free_memory
from daf.memory.recycling_allocator import unsupported_reason
from daf.profiling.split_choice import CutChooser, examples_of
from daf.profiling.split_proof import LEAST_PROVEN, SplitProof
from daf.recompute.python_state import Surroundings
from daf.session.step_profiles import StepProfiles
from daf.step.batch_cut import BatchCut, uncut_rows
from daf.step.context import StepContext
from daf.step.loss_weights import LossWeights, PartWeights, Weighing
from daf.step.microbatch import read_loss
from daf.step.splitting import NO_ROOM_TO_PROVE, SplitChoice
from daf.step.state_snapshot import StateSnapshot

EXAMPLES, CUT = 16, 4
Loss = Callable[[nn.Module, Any], Tensor]


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8))


def labelled(*more: Any) -> tuple[Any, ...]:
    return torch.randn(EXAMPLES, 6) + 1, torch.arange(EXAMPLES) % 8, *more


def each(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def steps(
    model: nn.Module, loss: Loss, batches: list[Any], before: Callable[[int], None] = lambda _: None
) -> list[bool]:
    """Train in parts where that is proven, hold gradients against plain's; return what was cut."""
    budget = process_memory.resident_bytes() + 10**9
    cut: list[bool] = []
    with Session(
        model, torch.optim.SGD(model.parameters(), lr=0.0), budget, tolerance=0, cache=False
    ) as session:
        for index, batch in enumerate(batches):
            before(index)
            if not index:
                session.plan = replace(session.prepare(batch, loss), micro_batch=CUT)
            report = session.step(batch, loss)
            found = [parameter.grad for parameter in model.parameters()]
            session.optimizer.zero_grad()
            value = loss(model, batch)
            expected = torch.autograd.grad(value, list(model.parameters()), allow_unused=True)
            assert report.loss == pytest.approx(value.item(), rel=1e-5)
            for one, other in zip(found, expected, strict=True):
                if other is not None:
                    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
            cut.append(report.micro_batch == CUT)
    return cut


@pytest.mark.parametrize("adds_up", [True, False])
def test_a_term_whose_factor_was_0_is_proven_when_it_begins(adds_up: bool) -> None:
    beta = 0.0

    def loss(model: nn.Module, batch: Any) -> Tensor:
        logits = model(batch[0])
        term = logits.square().mean() if adds_up else logits.mean(0).square().sum()
        return F.cross_entropy(logits, batch[1]) + beta * term

    def rise(index: int) -> None:
        nonlocal beta
        beta = 0.0 if index < 3 else 0.5  # not in a step where a proof is due anyway

    cut = steps(mlp(), loss, [labelled() for _ in range(5)], rise)
    assert cut == [True, True, True, adds_up, adds_up]


class Routed(nn.Module):
    """Two experts, by the larger of two scores that are 0 at first; a loss balances their use."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.head = nn.Linear(6, 2), nn.Linear(6, 8)
        nn.init.zeros_(self.router.weight)
        nn.init.zeros_(self.router.bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.router(x).softmax(-1)
        used = F.one_hot(scores.argmax(-1), 2).float()
        return self.head(x), 2 * (used.mean(0) * scores.mean(0)).sum()


def test_a_choice_that_was_one_for_all_examples_is_proven_again() -> None:
    model = Routed()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        logits, balance = model(batch[0])
        return F.cross_entropy(logits, batch[1]) + balance

    def learn(index: int) -> None:
        if index == 1:
            nn.init.normal_(model.router.weight, generator=torch.Generator().manual_seed(1))

    batches = [(torch.randn(EXAMPLES, 6), labelled()[1]) for _ in range(3)]
    assert steps(model, loss, batches, learn) == [True, False, False]


NORMALISED: dict[str, Callable[[Tensor], Tensor]] = {
    "over a sum that keeps its dimension": lambda w: w / w.sum(0, keepdim=True),
    "by F.normalize": lambda w: F.normalize(w, p=1, dim=0),
    "by softmax": lambda w: w.softmax(0),
    "less their mean": lambda w: (1 + w - w.mean()) / EXAMPLES,
}


@pytest.mark.parametrize("kind", NORMALISED)
@pytest.mark.parametrize("first_uneven", [1, 2])
def test_weights_that_were_alike_are_proven_again_once_they_differ(
    kind: str, first_uneven: int
) -> None:
    even, uneven = torch.ones(EXAMPLES), torch.arange(EXAMPLES) % 7 / 2

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return (each(model, batch) * NORMALISED[kind](batch[2])).sum()

    batches = [labelled(even if index < first_uneven else uneven) for index in range(4)]
    cut = steps(mlp(), loss, batches)
    assert not any(cut[first_uneven:])


def one_hot() -> Any:
    return torch.randn(EXAMPLES, 6), F.one_hot(torch.arange(EXAMPLES) % 5, 8).float()


def multi_label() -> Any:
    rows = torch.arange(EXAMPLES)[:, None] % 5 == torch.arange(8) % 5
    return torch.randn(EXAMPLES, 6), rows.float()


def by_class(model: nn.Module, batch: Any) -> Tensor:
    weights = 1 / batch[1].sum(0).clamp(min=1)
    losses = F.binary_cross_entropy_with_logits(model(batch[0]), batch[1], reduction="none")
    return (losses.sum(1) * (batch[1] @ weights)).sum()


def pulled_together(model: nn.Module, batch: Any) -> Tensor:
    z = model(batch[0])
    like = (batch[1] @ batch[1].T) * (1 - torch.eye(len(z)))
    apart = (z[:, None] - z[None]).square().mean(-1)
    return z.square().mean() + ((apart * like).sum(1) / (like.sum(1) + 1e-6)).mean()


@pytest.mark.parametrize("loss", [by_class, pulled_together])
@pytest.mark.parametrize("make", [one_hot, multi_label])
def test_classes_in_rows_show_what_couples_the_examples_of_one(
    loss: Loss, make: Callable[[], Any]
) -> None:
    torch.manual_seed(3)
    assert steps(mlp(), loss, [make(), make()]) == [False, False]


def test_a_proof_takes_three_examples_or_two_pairs() -> None:
    assert {examples_of(size) >= LEAST_PROVEN for size in range(3, 200)} == {True}
    chooser = CutChooser(
        nn.Linear(1, 1),
        observe=lambda *_: None,  # type: ignore[arg-type, return-value]
        expected=lambda _, examples: 100.0 * examples,
        recover=lambda: None,
        within=lambda _, run: run(),
        begun=StateSnapshot(Surroundings.of(nn.Linear(1, 1))),
        allow_statistics=False,
    )
    found: Any = SimpleNamespace(examples=1, plain_bytes=0, saved=(), saves=(), treatments=())
    chooser._needed_bytes = lambda _, examples, __: 100.0 * examples  # type: ignore[assignment]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("daf.profiling.split_choice.terse_bytes", lambda _: 0)
        rooms = (500, 499, 400, 399, 200, 199)  # one example more than needed, but for the fewest
        sizes = [chooser._room(found, range(4, 1, -1), room)[0] for room in rooms]
    assert sizes == [4, 3, 3, 2, 2, None]


@pytest.mark.parametrize("is_terse", [False, True])
@pytest.mark.parametrize("loss", [by_class, pulled_together])
def test_pairs_show_what_couples_the_examples_of_a_class(loss: Loss, is_terse: bool) -> None:
    torch.manual_seed(3)
    proof = SplitProof(mlp(), loss, statistics=True, is_terse=is_terse)
    refusal = proof.run(one_hot(), BatchCut((0, 0)), 2)[1]
    assert refusal.startswith("its parts do not add up to it: on 2 examples")


@dataclass
class Row:
    weight: Tensor


FIRST, LATER = [1.0] * EXAMPLES, [1.0] * CUT + [5.0] * (EXAMPLES - CUT)
CUT_WITH_EXAMPLES: dict[str, tuple[Callable[[list[float]], Any], Callable[[Any], float]]] = {
    "numbers": (list, float),
    "tensors": (lambda values: [torch.tensor(value) for value in values], float),
    "mappings": (lambda values: [{"w": torch.tensor(v)} for v in values], lambda w: float(w["w"])),
    "tuples": (lambda values: tuple((v, torch.zeros(3)) for v in values), lambda w: w[0]),
    "dataclasses": (lambda values: [Row(torch.tensor(v)) for v in values], lambda w: w.weight),
}


@pytest.mark.parametrize("kind", CUT_WITH_EXAMPLES)
def test_rows_in_lists_are_cut_with_the_examples(kind: str) -> None:
    make, read = CUT_WITH_EXAMPLES[kind]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        losses = each(model, batch)
        return sum(read(w) * one for w, one in zip(batch[2], losses, strict=True)) / len(losses)  # type: ignore[return-value, misc]

    batches = [labelled(make(values)) for values in (FIRST, LATER, LATER)]
    assert steps(mlp(), loss, batches) == [True] * 3


NOT_CUT: dict[str, tuple[Callable[[list[float]], Any], Callable[[Any, int], float]]] = {
    "deque": (deque, lambda w, i: w[i]),
    "array": (lambda values: array.array("d", values), lambda w, i: w[i]),
    "dict": (lambda values: dict(enumerate(values)), lambda w, i: w[i]),
    "list": (lambda values: SimpleNamespace(w=values), lambda w, i: w.w[i]),
    "Tensor": (lambda values: torch.tensor([values, values]), lambda w, i: float(w[0, i])),
}


@pytest.mark.parametrize("kind", NOT_CUT)
def test_what_may_hold_rows_and_cannot_be_cut_leaves_the_batch_whole(kind: str) -> None:
    make, read = NOT_CUT[kind]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        losses = each(model, batch)
        return sum(read(batch[2], i) * one for i, one in enumerate(losses)) / len(losses)  # type: ignore[return-value]

    batches = [labelled(make(values)) for values in (FIRST, LATER)]
    assert steps(mlp(), loss, batches) == [False, False]
    cut = BatchCut((0, 0, None))
    assert uncut_rows(batches[0], cut) == f"a {kind} with as many entries"


@pytest.mark.parametrize("more", ["words", {"a": 1}, (torch.ones(3, 2),), None, torch.ones(())])
def test_what_holds_no_rows_does_not_keep_a_batch_whole(more: Any) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return each(model, batch).mean()

    assert steps(mlp(), loss, [labelled(more)] * 2) == [True, True]


def swapped(model: nn.Module, batch: Any) -> Tensor:
    """Swap noise: a tenth of the numbers come from another example."""
    x, labels = batch
    return F.cross_entropy(
        model(torch.where(torch.rand(x.shape) < 0.1, x[torch.randperm(len(x))], x)), labels
    )


def mixed_by_chance(model: nn.Module, batch: Any) -> Tensor:
    x, labels = batch
    return F.cross_entropy(model(x if torch.rand(()) < 0.05 else (x + x.flip(0)) / 2), labels)


@pytest.mark.parametrize("loss", [swapped, mixed_by_chance])
def test_a_rare_draw_that_mixes_examples_is_tried(loss: Loss) -> None:
    model, batch = mlp(), labelled()
    budget = process_memory.resident_bytes() + 10**9
    with Session(model, torch.optim.SGD(model.parameters(), lr=0.0), budget, tolerance=0) as s:
        s.prepare(batch, loss)
        assert s.split_refusal.startswith("its parts do not add up to it")


def test_noise_of_each_example_is_still_cut() -> None:
    model, batch = mlp(), labelled()
    budget = process_memory.resident_bytes() + 10**9

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x = batch[0] + 0.1 * torch.randn_like(batch[0])
        return F.cross_entropy(model(F.dropout(x, 0.2)), batch[1])

    with Session(model, torch.optim.SGD(model.parameters(), lr=0.0), budget, tolerance=0) as s:
        s.prepare(batch, loss)
        assert s.split_refusal == ""


class Kept(nn.Module):
    """Keeps something in a plain attribute: what was last, a moving mean, or how often it ran."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net, self.kind = mlp(), kind
        self.last: Any = None
        self.mean, self.written, self.calls = torch.zeros(8), torch.zeros(8), 0

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.net(x)
        if self.kind == "last":
            self.last = found
        elif self.kind == "mean":
            self.mean = 0.9 * self.mean + 0.1 * found.detach().mean(0)
        elif self.kind == "written":
            self.written.mul_(0.9).add_(found.detach().mean(0), alpha=0.1)
        else:
            self.calls += 1
        return found


@pytest.mark.parametrize("kind", ["last", "mean", "written", "calls"])
def test_what_each_pass_moves_in_an_attribute_is_moved_once_a_step(kind: str) -> None:
    model, batch = Kept(kind), labelled()
    budget = process_memory.resident_bytes() + 10**9
    with Session(model, torch.optim.SGD(model.parameters(), lr=0.0), budget, tolerance=0) as s:
        s.plan = replace(
            s.prepare(batch, lambda m, b: F.cross_entropy(m(b[0]), b[1])), micro_batch=CUT
        )
        for _ in range(3):
            s.step(batch, lambda m, b: F.cross_entropy(m(b[0]), b[1]))
    assert (s.split_refusal == "") == (kind == "last")
    assert model.calls == (3 if kind == "calls" else 0)


def test_a_task_that_a_part_leaves_out_keeps_the_batch_whole() -> None:
    """Cross-entropy of what has a label, and a mean of what has a value, which some parts lack."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, labels, values = batch
        out, has_value = model(x), ~values.isnan()
        known = F.cross_entropy(out, labels, ignore_index=-100)
        return (
            known + F.mse_loss(out[:, 7][has_value], values[has_value])
            if has_value.any()
            else known
        )

    x, labels = labelled()
    values = torch.full((EXAMPLES,), math.nan)
    labels[0], labels[1], values[1] = -100, 7, 4.0
    assert steps(mlp(), loss, [(x, labels, values)] * 2) == [False, False]


def test_hooks_on_parameters_see_the_whole_gradient() -> None:
    model, batch = mlp(), labelled()
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    budget = process_memory.resident_bytes() + 10**9

    scale = 1e-6  # the hooks do nothing at first, in the proof too

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return scale * F.cross_entropy(model(batch[0]), batch[1])

    with Session(model, torch.optim.SGD(model.parameters(), lr=0.0), budget, tolerance=0) as s:
        s.plan = replace(s.prepare(batch, loss), micro_batch=CUT)
        assert s.step(batch, loss).micro_batch == EXAMPLES
        scale = 50.0
        assert s.step(batch, loss).micro_batch == EXAMPLES
    largest = max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None)
    assert largest == pytest.approx(0.01)


@pytest.mark.parametrize("refusal", [NO_ROOM_TO_PROVE, "its loss weighs nothing on a few examples"])
def test_a_proof_that_cannot_be_renewed_leaves_what_was_proven(
    refusal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the parts were weighed by: here by nothing, since the loss is a sum."""
    proved: list[int] = []
    prove = StepProfiles.prove_cut

    def later(profiles: StepProfiles, context: StepContext, budget_bytes: int | None) -> None:
        prove(profiles, context, budget_bytes)
        proved.append(context.index)
        context.choose(SplitChoice(context.choice.cut, refusal=refusal))

    monkeypatch.setattr(StepProfiles, "prove_cut", later)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return each(model, batch).sum()

    assert steps(mlp(), loss, [labelled() for _ in range(5)]) == [True] * 5
    assert proved == [1, 3]  # the second step that is cut, and the fourth


def test_a_pair_of_tensors_of_other_first_dimensions_is_no_list_of_rows() -> None:
    """Two examples in the second dimension of two tensors: the pair has as many entries."""
    batch = (torch.arange(10.0).view(5, 2), torch.arange(6.0).view(3, 2))
    cut = BatchCut((1, 1))
    one, other = cut.take(batch, 1, 2)
    assert one.tolist() == [[1.0], [3.0], [5.0], [7.0], [9.0]]
    assert other.tolist() == [[1.0], [3.0], [5.0]]
    assert [each.shape for each in cut.pick(batch, [1, 0])] == [(5, 2), (3, 2)]


def test_the_user_s_word_stands_for_what_may_hold_rows() -> None:
    model, batch = mlp(), labelled(deque(FIRST))
    budget = process_memory.resident_bytes() + 10**9
    for told in ({"split": True}, {"batch_dim": 0}):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with Session(model, optimizer, budget, tolerance=0, cache=False, **told) as session:  # type: ignore[arg-type]
            session.prepare(batch, lambda m, b: each(m, b).mean())
            assert session.split_refusal == ""


def renew_beside_gradients() -> None:
    """Beside the gradients that a step left there is no room for others of a large layer."""
    model = nn.Sequential(nn.Linear(6, 4096), nn.Tanh(), nn.Linear(4096, 4096))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    optimizer, batch = torch.optim.SGD(model.parameters(), lr=0.01), labelled()
    budget = process_memory.resident_bytes() + 10**9
    with Session(model, optimizer, budget, tolerance=0, cache=False) as session:
        session.plan = replace(session.prepare(batch, loss), micro_batch=CUT)
        session.step(batch, loss)
        session._keeper.flush()
        return_free_memory()
        session.budget = process_memory.resident_bytes() + 30 * 10**6
        plan, context = session.plan, session._context(batch, loss)
        assert plan is not None
        process_memory.reset_peak()
        running = replace(plan, micro_batch=CUT)
        assert session._plan_controller._renewed(context, running) is running
        assert session._plan_controller.cut_steps == 2
        assert process_memory.peak_bytes() <= (session.budget_bytes or 0)
        assert session.split_refusal == ""


@pytest.mark.skipif(unsupported_reason() is not None, reason=str(unsupported_reason()))
def test_a_proof_is_renewed_within_the_budget_or_not_at_all() -> None:
    """In a process of its own, which has no free memory to hide in."""
    code = "from tests.profiling import test_proofs_renewed as own; own.renew_beside_gradients()"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("has_both", [True, False])
def test_parts_that_divide_by_as_many_numbers_alone_add_up(has_both: bool) -> None:
    """A part without a value leaves its mean out, and with it the number that it is over."""
    model, weights = mlp(), PartWeights(Weighing.EXAMPLES)
    for index in range(2):
        x, labels = labelled()
        with LossWeights(EXAMPLES) as operators:
            out = model(x)
            loss = out.square().sum() / EXAMPLES
            if has_both or not index:
                loss = loss + F.mse_loss(out[:, 0], labels.float())
        operators.leave_out_beside(loss)
        weights.weighed(read_loss(loss, EXAMPLES), operators)
    with nullcontext() if has_both else pytest.raises(OtherPathError, match="other shares"):
        weights.check_scalings()
