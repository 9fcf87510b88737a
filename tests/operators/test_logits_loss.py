"""The loss of logits that exist is plain PyTorch's, and its gradient takes their place."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from daf.operators.chunked import logits_cross_entropy as tested
from daf.operators.chunked.cross_entropy import RowLoss
from daf.operators.chunked.logits_cross_entropy import logits_cross_entropy

pytestmark = pytest.mark.smoke

ROWS, CLASSES = 12, 1500


@pytest.fixture(autouse=True)
def _several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tested, "_CHUNK_ELEMENTS", 5 * CLASSES)  # 5, 5 and 2 rows


def made(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(3, 4, CLASSES, generator=generator).to(dtype).requires_grad_()
    target = torch.randint(0, CLASSES, (ROWS,), generator=generator)
    target[[1, 7]] = -100
    return scores, target


def plain(logits: Tensor, target: Tensor, loss: RowLoss) -> Tensor:
    return F.cross_entropy(logits, target, **loss._asdict())


def trained(
    run: Callable[[Tensor, Tensor, RowLoss], Tensor], loss: RowLoss, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    scores, target = made(dtype)
    found = run((scores * 2).flatten(0, 1), target, loss)
    (3 * found).backward()
    assert scores.grad is not None
    return found.detach().float(), scores.grad.float()


@pytest.mark.parametrize(
    "loss",
    [
        RowLoss(),
        RowLoss(reduction="sum"),
        RowLoss(label_smoothing=0.2),
        RowLoss(reduction="sum", label_smoothing=1.0),
    ],
)
def test_loss_and_gradient_are_plain_pytorch_s(loss: RowLoss) -> None:
    for dtype, error in ((torch.float32, 2e-6), (torch.bfloat16, 2e-2)):
        ours, theirs = (trained(run, loss, dtype) for run in (logits_cross_entropy, plain))
        assert (ours[0] - theirs[0]).abs() <= error * theirs[0].abs()
        assert (ours[1] - theirs[1]).norm() <= error * theirs[1].norm()


@pytest.mark.parametrize(
    "rows",
    [
        lambda scores: scores.flatten(1),  # a view of rows that are no classes
        lambda scores: scores.flatten(0, 1).t().contiguous().t(),
        lambda scores: scores.flatten(0, 1)[:, :CLASSES].transpose(0, 1).reshape(CLASSES, -1).t(),
        lambda scores: scores[0],
        lambda scores: scores[:, ::2].flatten(0, 1),
        lambda scores: scores[0, :1].expand(4, -1),  # rows that are one memory
    ],
)
def test_views_of_any_kind_get_their_gradient(rows: Callable[[Tensor], Tensor]) -> None:
    found = []
    for run in (logits_cross_entropy, plain):
        scores, _ = made()
        logits = rows(scores * 2)
        target = torch.arange(len(logits)) % logits.shape[1]
        loss = run(logits, target, RowLoss())
        del logits  # so that the gradient may take its place
        loss.backward()
        found.append(scores.grad)
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-9)


def test_a_target_that_is_no_class_is_an_error() -> None:
    scores, target = made()
    with pytest.raises(IndexError):
        logits_cross_entropy(scores.flatten(0, 1), target, RowLoss(ignore_index=5))


def test_rows_without_a_class_give_what_pytorch_gives() -> None:
    scores, _ = made()
    target = torch.full((ROWS,), -100)
    found = logits_cross_entropy(scores.flatten(0, 1), target, RowLoss())
    found.backward()
    assert math.isnan(float(found.detach()))
    assert scores.grad is not None
    assert not scores.grad.any()


def gradient_of(held: str) -> tuple[int, int]:
    """Train with logits that somebody holds; return where they and their gradient lay."""
    scores, target = made()
    logits = scores * 2
    there, found = logits.data_ptr(), []
    logits.register_hook(lambda gradient: found.append(gradient.data_ptr()))
    rows = logits.flatten(0, 1)
    kept = {"logits": logits, "view": rows, "alias": logits.detach()[1:], "": None}[
        held.removesuffix(" and graph")
    ]
    before = None if kept is None else kept.detach().clone()
    loss = logits_cross_entropy(rows, target, RowLoss())
    del logits, rows
    loss.backward(retain_graph=held.endswith(" and graph"))
    assert kept is None or torch.equal(kept, before)
    return there, found[0]


def test_the_gradient_takes_the_place_of_logits_that_nobody_holds() -> None:
    there, gradient = gradient_of("")
    assert gradient == there


@pytest.mark.parametrize("held", ["logits", "view", "alias", " and graph"])
def test_held_logits_stay_as_they_are(held: str) -> None:
    there, gradient = gradient_of(held)
    assert gradient != there


def test_gradients_of_the_view_itself_can_be_asked_for_and_hooked() -> None:
    scores, target = made()
    rows, seen = (scores * 2).flatten(0, 1), []
    rows.register_hook(seen.append)
    loss = logits_cross_entropy(rows, target, RowLoss())
    (gradient,) = torch.autograd.grad(loss, rows, retain_graph=True)
    loss.backward()
    assert scores.grad is not None
    assert torch.equal(seen[-1], gradient)
    assert torch.equal(2 * gradient, scores.grad.flatten(0, 1))


def test_a_kept_graph_runs_again() -> None:
    scores, target = made()
    loss = logits_cross_entropy((scores * 2).flatten(0, 1), target, RowLoss())
    first = torch.autograd.grad(loss, scores, retain_graph=True)[0]
    again = torch.autograd.grad(loss, scores)[0]
    assert torch.equal(first, again)


def test_gradients_are_differentiated_themselves() -> None:
    found = []
    for run in (logits_cross_entropy, plain):
        scores, target = made()
        loss = run((scores * scores).flatten(0, 1), target, RowLoss())
        (gradient,) = torch.autograd.grad(loss, scores, create_graph=True)
        gradient.square().sum().backward()
        found.append(scores.grad)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-7)
