"""Batches are cut where parts were shown to add up to the whole, and nowhere else."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf import BatchSplit, BudgetError, Session
from daf.memory import process_memory
from daf.memory.recycling_allocator import unsupported_reason
from daf.profiling import gradient_sketches
from daf.profiling.split_proof import SplitProof
from daf.profiling.terse_saves import terse_saves
from daf.step.batch_cut import BatchCut, possible_cuts
from daf.step.loss_weights import Weighing

needs_peak = pytest.mark.skipif(
    not process_memory.peak_is_exact(), reason="this system keeps no resettable high-water mark"
)
LossFunction = Callable[[nn.Module, Any], Any]


def mlp(features: int = 6, classes: int = 5) -> nn.Sequential:
    return nn.Sequential(nn.Linear(features, 16), nn.Tanh(), nn.Linear(16, classes))


def images(size: int = 12, classes: int = 5) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 6), torch.randint(0, classes, (size,))


class TokenModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.layer(torch.tanh(self.table(tokens)))
        return result


class FirstToken(nn.Module):
    """Classifies sequences by what lies at their first place, as BERT does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        first = torch.tanh(self.layer(x))[:, 0]
        expanded = first[:, :, None].expand(-1, -1, 3).sin().sum(2)
        result: Tensor = self.out(first * expanded)
        return result


class Recurrent(nn.Module):
    """Reads (time, batch, features), as ``nn.LSTM`` does by default."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.out = nn.GRU(6, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.out(self.cells(x)[0][-1])
        return result


class Codebook(nn.Module):
    """Writes a running mean of what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = mlp()
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        self.mean.mul_(0.9).add_(0.1 * out.detach().mean(0))
        return out


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.batch_norm(self.first(x), None, None, training=True)
        result: Tensor = self.last(torch.relu(hidden))
        return result


class Carrying(nn.Module):
    """Goes on from where the call before ended, as truncated backpropagation does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out, self.state = nn.Linear(6, 6), nn.Linear(6, 5), torch.zeros(6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.layer(x + self.state))
        self.state = hidden.detach().mean(0)
        result: Tensor = self.out(hidden)
        return result


class Initialised(nn.Module):
    """Scales by what its first batch was: by a buffer, or a parameter as ActNorm does."""

    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.layer, self.scale, self.is_ready = mlp(), scale, False

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        if not self.is_ready:
            self.scale.data = out.detach().abs().mean(0) + 1.0
            self.is_ready = True
        return out / self.scale


def mean(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def tokens(counted: Callable[[int], int], size: int = 12) -> tuple[Tensor, Tensor]:
    """Sequences of which so many labels count."""
    words = torch.randint(0, 11, (size, 7))
    labels = torch.randint(0, 11, (size, 7))
    for row in range(size):
        labels[row, counted(row) :] = -100
    return words, labels


def half_empty() -> tuple[Tensor, Tensor]:
    return tokens(lambda row: 5 * (row > 7))


def square() -> tuple[Tensor, Tensor]:
    """As many steps as sequences."""
    return torch.randn(4, 4, 6), images(4)[1]


def token_mean(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def token_sum(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    logits = model(batch[0]).flatten(0, 1)
    counts = (batch[1] != -100).sum()
    return F.cross_entropy(logits, batch[1].flatten(), reduction="sum"), counts


def likelihood(model: nn.Module, batch: Any) -> Tensor:
    scores = F.log_softmax(model(batch["x"]), dim=1)
    return F.nll_loss(scores, batch["y"], weight=batch["class_weights"])


def weighted(size: int = 12) -> dict[str, Tensor]:
    x, y = images(size)
    return {"x": x, "y": y, "class_weights": torch.linspace(1, 3, 5)}


def as_many_classes_as_examples() -> dict[str, Tensor]:
    x, y = images(5)
    return {"x": x, "y": y, "class_weights": torch.linspace(1, 3, 5)}


def contrastive(model: nn.Module, batch: Any) -> Tensor:
    one, other = (F.normalize(model(batch[0] + shift), dim=1) for shift in (0.0, 0.1))
    return F.cross_entropy(one @ other.T / 0.1, torch.arange(len(one)))


def masked_mean(model: nn.Module, batch: Any) -> Tensor:
    """Divides by what only the loss knows."""
    counts = (batch[1] > 1).float()
    losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return (losses * counts).sum() / counts.sum().clamp(min=1)


def own_token_mean(model: nn.Module, batch: Any) -> Tensor:
    """Divides by the labels that count itself, as loops do that predate ``ignore_index``."""
    counts = (batch[1] != -100).float()
    losses = F.cross_entropy(model(batch[0]).transpose(1, 2), batch[1], reduction="none")
    return (losses * counts).sum() / counts.sum()


def beside_a_loss_that_nobody_uses(model: nn.Module, batch: Any) -> Tensor:
    """As a model does that computes a loss of its own, over labels that count."""
    own_token_mean(model, batch)
    return model(batch[0]).square().mean()


def selected_mean(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0])[batch[1] > 1], batch[0][:, :5][batch[1] > 1])


def alike_within_classes(model: nn.Module, batch: Any) -> Tensor:
    """Couples examples of one class only, which few examples of many classes have none of."""
    made = model(batch[0])
    same = (batch[1][:, None] == batch[1]).float().triu(1)
    apart = (made[:, None] - made).square().sum(-1)
    return mean_of_squares(lambda _: made, (None, 0.0)) + (apart * same).sum() / len(made)


def hardest(model: nn.Module, batch: Any, order: Any = None) -> Tensor:
    """As many of the hardest examples as a few are all of."""
    losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    if order is not None:
        return order(losses)[-8:].mean()
    return torch.topk(input=losses, k=min(8, len(losses)), sorted=False).values.mean()


class Hooked(TokenModel):
    """Clamps its gradients, so that their length decides which are."""

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        found.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        return found


def below_a_quantile(model: nn.Module, batch: Any) -> Tensor:
    """Leaves out outliers, which a few examples have none of."""
    losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    most = losses.detach().quantile(0.9) if len(losses) > 8 else losses.max().detach()
    return losses.clamp(max=losses.detach().median() + most).mean()


def best_two_classes(model: nn.Module, batch: Any) -> Tensor:
    order = batch[1].argsort()  # of whole numbers, as lengths are sorted for packing
    return (model(batch[0])[order].topk(2, dim=-1).values.diff() - 1.0).square().mean()


def sequences() -> tuple[Tensor, Tensor]:
    return torch.randn(12, 4, 6), torch.randint(0, 5, (12,))


def many_classes() -> tuple[Tensor, Tensor]:
    return torch.randn(40, 6), torch.arange(40) % 20


def balanced(model: nn.Module, batch: Any) -> Tensor:
    """Squares a mean over the batch, as a mixture's balance loss does."""
    logits = model(batch[0])
    return F.cross_entropy(logits, batch[1]) + 0.5 * logits.softmax(1).mean(0).square().sum()


def batch_sum(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def rooted_sum(model: nn.Module, batch: Any) -> Tensor:
    return batch_sum(model, batch) / len(batch[0]) ** 0.5


def squared_error(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[0][:, :5])


def unreduced(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none").mean()


def with_dropout(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(F.dropout(batch[0], 0.5)), batch[1])


def noisy(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0] + torch.randn_like(batch[0])), batch[1])


def deep(layers: int = 24, width: int = 64) -> nn.Sequential:
    parts = [each for _ in range(layers) for each in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*parts)


def long_batch(examples: int = 12, length: int = 4096, width: int = 64) -> tuple[Tensor, Tensor]:
    """Large enough saves that a proof without room codes them."""
    return torch.randn(examples, length, width), torch.randn(examples, length, width)


def mean_of_squares(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]) - batch[1]).pow(2).mean()


def against_the_mean(model: nn.Module, batch: Any) -> Tensor:
    """Couples examples: each is drawn to the mean of all."""
    made = model(batch[0])
    return (made - batch[1]).pow(2).mean() + (made - made.mean(0)).pow(2).mean()


@dataclass
class Case:
    model: Callable[[], nn.Module]
    batch: Callable[[], Any]
    loss: LossFunction
    draws: bool = False  # random numbers, of which parts draw others


ADD_UP = {
    "mean over examples": Case(mlp, images, mean),
    "labels that do not count": Case(TokenModel, lambda: tokens(lambda row: row % 7), token_mean),
    "parts without a label": Case(
        TokenModel, lambda: tokens(lambda row: 5 * (row > 7)), token_mean
    ),
    "a mean over a mask": Case(TokenModel, lambda: tokens(lambda row: 1 + row % 6), own_token_mean),
    "a loss of its own that nobody uses": Case(
        TokenModel, lambda: tokens(lambda row: 1 + row % 6), beside_a_loss_that_nobody_uses
    ),
    "sum and weight": Case(TokenModel, lambda: tokens(lambda row: row % 7), token_sum),
    "weight 0": Case(TokenModel, half_empty, token_sum),
    "weights of classes": Case(mlp, weighted, likelihood),
    "as many classes as examples": Case(mlp, as_many_classes_as_examples, likelihood),
    "an operator that divides by nothing told": Case(mlp, images, squared_error),
    "a mean taken afterwards": Case(mlp, images, unreduced),
    "picked among classes": Case(mlp, images, best_two_classes),
    "a sum": Case(mlp, images, batch_sum),
    "a deep model": Case(lambda: deep(3), lambda: long_batch(6, 8), mean_of_squares),
    "first tokens": Case(FirstToken, sequences, mean),  # of one example, in one run of memory
    "dropout": Case(mlp, images, with_dropout, draws=True),
    "noise": Case(mlp, images, noisy, draws=True),
}
DO_NOT = {
    "a sum over a root": Case(mlp, images, rooted_sum),
    "drawn to the mean of all": Case(lambda: deep(3), lambda: long_batch(6, 8), against_the_mean),
    "coupled examples": Case(mlp, images, contrastive),
    "a mean over something else": Case(mlp, images, masked_mean),
    "a mean over a mask that is empty for a part": Case(TokenModel, half_empty, own_token_mean),
    "a mean over what is selected": Case(mlp, images, selected_mean),
    "coupled examples of one class": Case(mlp, many_classes, alike_within_classes),
    "a gradient that a hook clamps": Case(Hooked, lambda: tokens(lambda row: row % 7), token_mean),
    "the hardest of all, sorted": Case(
        mlp, lambda: images(64), lambda model, batch: hardest(model, batch, torch.Tensor.msort)
    ),
    "the hardest examples": Case(mlp, lambda: images(64), hardest),
    "clamped at a quantile": Case(mlp, lambda: images(64), below_a_quantile),
    "a mean that is squared": Case(mlp, images, balanced),
    "batch statistics in a function": Case(Functional, images, mean),
    "a buffer that forward writes": Case(Codebook, images, mean),
    "a carried state": Case(Carrying, images, mean),
    "a buffer of the first batch": Case(
        lambda: Initialised(nn.Buffer(torch.ones(5))), images, mean
    ),
    "a parameter of the first batch": Case(
        lambda: Initialised(nn.Parameter(torch.ones(5))), images, mean
    ),
    "time first": Case(Recurrent, lambda: (torch.randn(9, 4, 6), images(4)[1]), mean),
    "as many steps as sequences": Case(Recurrent, square, mean),
}


def plain_gradients(case: Case, model: nn.Module, batch: Any) -> tuple[float, list[Tensor]]:
    model = copy.deepcopy(model)
    loss = case.loss(model, batch)
    loss = loss[0] / loss[1] if isinstance(loss, tuple) else loss
    loss.backward()
    return loss.item(), [each.grad for each in model.parameters() if each.grad is not None]


def still(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.0)


@pytest.fixture
def budget() -> int:
    return process_memory.resident_bytes() + 2**31


def in_micro_batches(session: Session, batch: Any, loss: LossFunction, examples: int) -> Any:
    """Step in micro-batches, as a tight budget would."""
    plan = session.prepare(batch, loss)
    session.plan = replace(plan, micro_batch=examples)
    return session.step(batch, loss)


@pytest.mark.parametrize("name", ADD_UP)
@pytest.mark.parametrize("examples", [1, 5])
def test_what_adds_up_is_cut_and_leaves_the_whole_gradient(
    name: str, examples: int, budget: int
) -> None:
    case, calls = ADD_UP[name], []
    model, batch = case.model(), case.batch()

    def loss(asked: nn.Module, part: Any) -> Any:
        calls.append(len(part["x"] if isinstance(part, dict) else part[0]))
        return case.loss(asked, part)

    expected, gradients = plain_gradients(case, model, batch)
    with Session(model, still(model), budget, tolerance=0) as session:
        session.prepare(batch, loss)
        calls.clear()
        report = in_micro_batches(session, batch, loss, examples)
        assert session.split_refusal == ""
    size = sum(calls)
    assert calls[0] == min(examples, size)
    assert len(calls) == -(-size // examples)
    if not case.draws:
        assert report.loss == pytest.approx(expected, rel=1e-6)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", DO_NOT)
def test_what_does_not_add_up_stays_whole_and_says_why(name: str, budget: int) -> None:
    case = DO_NOT[name]
    model, batch = case.model(), case.batch()
    expected, gradients = plain_gradients(case, model, batch)
    before = copy.deepcopy(model.__dict__.get("state"))
    with Session(model, still(model), budget, tolerance=0) as session:
        session.prepare(batch, case.loss)
        assert before is None or torch.equal(model.state, before)
        report = in_micro_batches(session, batch, case.loss, 1)
        assert session.split_refusal
    assert report.loss == pytest.approx(expected, rel=1e-6)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-5, atol=1e-7)


class Graphs:
    """A batch of one's own: nodes of several graphs, and which graph each belongs to."""

    def __init__(self, nodes: Tensor, graph: Tensor, labels: Tensor) -> None:
        self.nodes, self.graph, self.labels = nodes, graph, labels

    def take(self, start: int, stop: int) -> Graphs:
        chosen = (self.graph >= start) & (self.graph < stop)
        return Graphs(self.nodes[chosen], self.graph[chosen] - start, self.labels[start:stop])


def graphs() -> Graphs:
    graph = torch.tensor([0, 0, 1, 2, 2, 2, 3, 3, 4])
    return Graphs(torch.randn(len(graph), 6), graph, torch.randint(0, 5, (5,)))


def graph_loss(model: nn.Module, batch: Graphs) -> Tensor:
    hidden = torch.zeros(len(batch.labels), 5).index_add(0, batch.graph, model(batch.nodes))
    return F.cross_entropy(hidden, batch.labels)


GRAPH_SPLIT = BatchSplit(lambda batch: len(batch.labels), lambda batch, i, j: batch.take(i, j))


@pytest.mark.parametrize(("split", "is_cut"), [("auto", False), (GRAPH_SPLIT, True)])
def test_a_batch_of_ones_own_runs_whole_or_as_the_user_cuts_it(
    split: Any, is_cut: bool, budget: int
) -> None:
    model, batch = mlp(), graphs()
    expected, gradients = plain_gradients(Case(mlp, graphs, graph_loss), model, batch)
    with Session(model, still(model), budget, tolerance=0, split=split) as session:
        report = in_micro_batches(session, batch, graph_loss, 1)
        assert (session.split_refusal == "") == is_cut
    assert report.loss == pytest.approx(expected, rel=1e-6)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("batch_dim", [1, (1, 0)])
def test_the_user_names_the_dimension_of_examples(batch_dim: Any, budget: int) -> None:
    case = DO_NOT["time first"]
    model, batch = case.model(), case.batch()
    _, gradients = plain_gradients(case, model, batch)
    with Session(model, still(model), budget, tolerance=0, batch_dim=batch_dim) as session:
        report = in_micro_batches(session, batch, case.loss, 1)
        assert session.split_refusal == ""
        assert session.profile is not None
        assert session.profile.batch_size == 4
    assert report.micro_batch == 1
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


def test_splitting_can_be_forbidden_and_promised(budget: int) -> None:
    for split, loss, refusal in ((False, mean, "split=False"), (True, batch_sum, "")):
        model, batch = mlp(), images()
        with Session(model, still(model), budget, split=split) as session:
            session.prepare(batch, loss)
            assert refusal in session.split_refusal
            assert bool(refusal) == bool(session.split_refusal)
    with pytest.raises(ValueError, match="asked for split='never'"):
        Session(mlp(), still(mlp()), None, split="never")  # type: ignore[arg-type]


def test_what_was_proven_or_refused_is_known_when_a_batch_is_measured_again(
    budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    proofs, run = [], SplitProof.run
    monkeypatch.setattr(SplitProof, "run", lambda *a: proofs.append(a) or run(*a))
    for loss, is_proven in ((mean, True), (contrastive, False)):
        model = mlp()
        with Session(model, still(model), budget) as session:
            session.step(images(8), loss)
            first, count = session.split_refusal, len(proofs)
            assert (first == "") == is_proven
            session._plan_controller.selector.forget()
            session.step(images(8), loss)
            assert session.split_refusal == first
            assert len(proofs) == count > 0


@pytest.mark.parametrize("given", [lambda loss: loss, lambda loss: lambda m, b: loss(m, b)])
def test_another_loss_is_proven_anew(budget: int, given: Callable[..., Any]) -> None:
    """Also where a function of the same code calls it."""
    model, batch = mlp(), images()
    with Session(model, still(model), budget, tolerance=0) as session:
        in_micro_batches(session, batch, given(mean), 3)
        assert session.split_refusal == ""
        expected, gradients = plain_gradients(Case(mlp, images, contrastive), model, batch)
        report = session.step(batch, given(contrastive))
        assert "do not add up" in session.split_refusal
    assert report.loss == pytest.approx(expected, rel=1e-6)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-5, atol=1e-7)


def test_labels_that_stop_counting_alike_in_mid_training_are_not_cut_wrongly(budget: int) -> None:
    """Two losses of which each may ignore labels have no common weight."""

    def spans(asked: nn.Module, part: Any) -> Tensor:
        logits = asked(part[0])
        return F.cross_entropy(logits, part[1]) + F.cross_entropy(logits.flip(1), part[2])

    model, (x, y), ends = mlp(), images(), torch.randint(0, 5, (12,))
    with Session(model, still(model), budget, tolerance=0) as session:
        first = in_micro_batches(session, (x, y, ends), spans, 4)
        assert (first.micro_batch, session.split_refusal) == (4, "")
        ignored = ends.clone()
        ignored[:3] = -100
        expected, gradients = plain_gradients(Case(mlp, images, spans), model, (x, y, ignored))
        report = session.step((x, y, ignored), spans)
        assert "its loss operators divide by [4.0, 1.0]" in session.split_refusal
    assert report.loss == pytest.approx(expected, rel=1e-6)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("size", [3, 5, 8, 9])
def test_batch_statistics_are_never_taken_of_one_example(size: int, budget: int) -> None:
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 5))
    calls = []

    def loss(asked: nn.Module, part: Any) -> Tensor:
        calls.append(len(part[0]))
        return mean(asked, part)

    with Session(model, still(model), budget, allow_batchnorm_split=True) as session:
        in_micro_batches(session, images(size), loss, 2)
        assert session.split_refusal == "" or size < 4
    assert min(calls) >= 2


def test_a_resumed_session_goes_on_cutting(budget: int) -> None:
    model, batch = mlp(), images()
    with Session(model, still(model), budget, tolerance=0) as session:
        in_micro_batches(session, batch, mean, 3)
        state = session.state_dict()
    with Session(model, still(model), budget, tolerance=0) as session:
        session.load_state_dict(state)
        assert session.state_dict()["splitting"] == state["splitting"]
        assert session.step(batch, mean).micro_batch == 3
        assert session.split_refusal == ""


def judged(proof: SplitProof, batch: Any, cut: BatchCut) -> tuple[Weighing, bool] | str:
    """Return how parts are weighed and whether that is refused, or what a part raised."""
    try:
        weighing, refusal = proof.run(batch, cut, min(4, cut.size(batch)))
    except Exception as error:
        return str(error)
    return weighing, bool(refusal)


@pytest.mark.parametrize("name", [*ADD_UP, *DO_NOT])
def test_a_terse_proof_judges_every_case_as_the_plain_one(name: str) -> None:
    case = (ADD_UP | DO_NOT)[name]
    model, batch = case.model(), case.batch()
    for cut in possible_cuts(batch):
        plain, terse = (
            judged(SplitProof(model, case.loss, statistics=True, is_terse=is_terse), batch, cut)
            for is_terse in (False, True)
        )
        # The terse one tries two orders: of what does not add up it may find what the other leaves
        # to the checks of each step.
        is_found = name in DO_NOT and terse[1] is True and plain[1] is False
        assert plain == terse or is_found


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 5)

    def forward(self, sequences: Tensor) -> Tensor:
        return self.head(self.cell(sequences)[0][:, -1])


def test_a_terse_proof_codes_a_batch_that_only_the_whole_copies() -> None:
    """One sequence transposed lies as before; of two an operator makes a copy, and saves that."""
    batch = torch.randn(2, 7, 6), torch.randint(0, 5, (2,))
    (cut, *_) = possible_cuts(batch)
    for is_terse in (False, True):
        proof = SplitProof(Recurrent(), mean, statistics=True, is_terse=is_terse)
        assert proof.run(batch, cut, 2)[1] == ""


@pytest.mark.parametrize("name", [*ADD_UP, *DO_NOT])
def test_sketches_of_gradients_judge_every_case_as_the_gradients_do(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = (ADD_UP | DO_NOT)[name]
    model, batch = case.model(), case.batch()
    for cut in possible_cuts(batch):
        found = []
        for least in (2**62, 1):
            monkeypatch.setattr(gradient_sketches, "LEAST_ELEMENTS", least)
            found.append(judged(SplitProof(model, case.loss, statistics=True), batch, cut))
        assert found[0] == found[1]


def test_terse_saves_keep_the_scale_of_each_number() -> None:
    x = (torch.randn(64, 64) * torch.logspace(-15, 15, 64)).requires_grad_()
    with torch.no_grad():
        x[0] = 0.0
    with terse_saves(iter([])):
        y = x * 1.0
        total = (y * y).sum() + y.pow(2).sum()
    total.backward()
    assert x.grad is not None
    ratio = x.grad[1:] / (4 * x.detach()[1:])
    assert 0.75 <= ratio.min() <= ratio.max() <= 1.5
    assert not x.grad[0].any()


def test_terse_saves_hold_a_byte_for_each_number_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    original = torch.empty_like

    def counted(tensor: Tensor, **options: Any) -> Tensor:
        if options.get("dtype") is torch.int8:
            made.append(tensor.numel())
        return original(tensor, **options)

    monkeypatch.setattr(torch, "empty_like", counted)
    x, factor = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64)
    with terse_saves(iter([factor])):
        y = x * factor  # an external tensor stays as it is
        total = (y * y).sum() + y.t().tanh().sum()
    assert made == [64 * 64] * 2  # y once, and what tanh returned
    total.backward()


def test_terse_saves_give_back_strides_and_repetitions() -> None:
    x = torch.randn(5, 4, 6, requires_grad=True)
    with terse_saves(iter([])):
        first = (2.0 * x)[:, 0]
        repeated = (2.0 * first)[:, :, None].expand(-1, -1, 3)
        total = (first * repeated[..., 0]).sum() + repeated.pow(2).sum()
    total.backward()
    assert x.grad is not None
    ratio = x.grad[:, 0] / (112.0 * x.detach()[:, 0])
    assert 0.75 <= ratio.min() <= ratio.max() <= 1.5
    assert not x.grad[:, 1:].any()


@needs_peak
@pytest.mark.skipif(unsupported_reason() is not None, reason=str(unsupported_reason()))
def test_a_budget_without_room_to_save_two_examples_plainly_is_still_proven(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, batch = deep(), long_batch()
    tried: list[bool] = []
    run = SplitProof.run

    def watched(proof: SplitProof, *arguments: Any) -> Any:
        tried.append(proof.is_terse)
        return run(proof, *arguments)

    with Session(model, still(model), "10MB") as session, pytest.raises(BudgetError) as caught:
        session.prepare(batch, mean_of_squares)
    assert caught.value.least_bytes is not None
    budget = caught.value.least_bytes  # which counts the proof's room
    monkeypatch.setattr(SplitProof, "run", watched)
    process_memory.reset_peak()
    with Session(model, still(model), budget) as session:
        report = session.step(batch, mean_of_squares)
        assert session.split_refusal == ""
        assert session.peak_bytes <= budget
    assert tried
    assert all(tried)
    assert report.micro_batch < len(batch[0])
