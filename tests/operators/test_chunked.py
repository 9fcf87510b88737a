"""Chunked cross-entropy: PyTorch's loss and gradients, without the logits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import daf
from daf import chunked_cross_entropy
from daf.core.errors import DataError, DoubleBackwardError, SavedTensorError
from daf.memory import track

Case = tuple[Tensor, Tensor, Tensor, Tensor | None]


def case(
    rows: int = 10,
    features: int = 5,
    classes: int = 7,
    *,
    bias: bool = True,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        made = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return made.to(dtype).requires_grad_()

    target = torch.randint(classes, (rows,), generator=generator)
    found = normal(rows, features), normal(classes, features), normal(classes) if bias else None
    return found[0], found[1], target, found[2]


def plain(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, **options: Any):
    logits = F.linear(hidden, weight, bias)
    return F.cross_entropy(logits.flatten(0, -2), target.flatten(), **options)


def gradients(loss: Tensor, inputs: Case, incoming: float = 1.0) -> list[Tensor]:
    leaves = [each for each in (inputs[0], inputs[1], inputs[3]) if each is not None]
    return list(torch.autograd.grad(loss * incoming, leaves))


def assert_as_plain(
    inputs: Case, *, chunk_rows: int | None, incoming: float = 1.0, **options: Any
) -> None:
    hidden, weight, target, bias = inputs
    found = chunked_cross_entropy(hidden, weight, target, bias, chunk_rows=chunk_rows, **options)
    expected = plain(*inputs, **options)
    torch.testing.assert_close(found, expected, equal_nan=True)
    ours, theirs = gradients(found, inputs, incoming), gradients(expected, inputs, incoming)
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other)


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(1, 20),
    features=st.integers(1, 8),
    classes=st.integers(1, 9),
    chunk_rows=st.one_of(st.none(), st.integers(1, 25)),
    bias=st.booleans(),
    reduction=st.sampled_from(["mean", "sum"]),
    label_smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    ignored=st.sampled_from(["none", "some", "all"]),
    ignore_index=st.sampled_from([-100, 0]),
    incoming=st.sampled_from([1.0, -2.5, 0.0]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 99),
)
def test_loss_and_gradients_are_pytorchs(
    rows: int,
    features: int,
    classes: int,
    chunk_rows: int | None,
    bias: bool,
    reduction: str,
    label_smoothing: float,
    ignored: str,
    ignore_index: int,
    incoming: float,
    dtype: torch.dtype,
    seed: int,
) -> None:
    inputs = case(rows, features, classes, bias=bias, dtype=dtype, seed=seed)
    if ignored != "none":
        inputs[2][:: 1 if ignored == "all" else 2] = ignore_index
    assert_as_plain(
        inputs,
        chunk_rows=chunk_rows,
        incoming=incoming,
        reduction=reduction,
        label_smoothing=label_smoothing,
        ignore_index=ignore_index,
    )


@pytest.mark.parametrize("chunk_rows", [1, 3, 10])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_gradcheck(chunk_rows: int, label_smoothing: float) -> None:
    hidden, weight, target, bias = case()
    target[4] = -100

    def loss(*leaves: Tensor) -> Tensor:
        return chunked_cross_entropy(
            leaves[0],
            leaves[1],
            target,
            leaves[2],
            chunk_rows=chunk_rows,
            label_smoothing=label_smoothing,
        )

    assert torch.autograd.gradcheck(loss, (hidden, weight, bias))


def test_rows_may_have_several_dimensions() -> None:
    hidden, weight, target, bias = case(rows=12)
    folded = (hidden.view(3, 4, 5), weight, target.view(3, 4), bias)
    assert_as_plain(folded, chunk_rows=5)


def test_all_rows_ignored_gives_nan_and_no_gradient() -> None:
    inputs = case()
    inputs[2].fill_(-100)
    loss = chunked_cross_entropy(*inputs, chunk_rows=4)
    assert math.isnan(loss.item())
    assert all(not gradient.any() for gradient in gradients(loss, inputs))
    assert chunked_cross_entropy(*inputs, reduction="sum").item() == 0.0


def test_only_what_is_asked_for_is_formed() -> None:
    hidden, weight, target, _ = case(bias=False)
    loss = chunked_cross_entropy(hidden, weight.detach(), target)
    assert [each.shape for each in loss.grad_fn.saved_tensors] == [hidden.shape]
    with torch.no_grad():
        assert chunked_cross_entropy(hidden, weight, target).grad_fn is None


def test_large_logits_do_not_overflow() -> None:
    hidden, weight, target, bias = case(dtype=torch.float32)
    large = (hidden.detach() * 1e4, weight.detach(), target, bias.detach())
    for each in (large[0], large[1], large[3]):
        each.requires_grad_()
    assert_as_plain(large, chunk_rows=3)


def test_backward_runs_again_where_the_graph_is_kept() -> None:
    inputs = case()
    loss = chunked_cross_entropy(*inputs, chunk_rows=3)
    leaves = [inputs[0], inputs[1], inputs[3]]
    first = torch.autograd.grad(loss, leaves, torch.tensor(2.0).double(), retain_graph=True)
    second = torch.autograd.grad(loss, leaves, torch.tensor(3.0).double())
    expected = gradients(plain(*inputs), inputs)
    for one, other, unit in zip(first, second, expected, strict=True):
        torch.testing.assert_close(one, 2 * unit)
        torch.testing.assert_close(other, 3 * unit)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, leaves)


def test_gradients_accumulate_like_any_other() -> None:
    inputs = case()
    for _ in range(3):
        chunked_cross_entropy(*inputs, chunk_rows=3).backward()
    expected = gradients(plain(*inputs), inputs)
    torch.testing.assert_close(inputs[1].grad, 3 * expected[1])


def test_a_second_derivative_is_refused() -> None:
    inputs = case()
    loss = chunked_cross_entropy(*inputs)
    with pytest.raises(DoubleBackwardError, match="no second derivative"):
        torch.autograd.grad(loss, inputs[0], create_graph=True)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_second_derivative_where_inputs_are_held(reduction: Any, bias: bool) -> None:
    hidden, weight, target, offset = case(bias=bias)
    target[2] = -100

    def loss(*leaves: Tensor) -> Tensor:
        found = (*leaves[:2], target, *leaves[2:])
        options = {"label_smoothing": 0.1, "reduction": reduction, "twice": True}
        return chunked_cross_entropy(*found, chunk_rows=3, **options)

    leaves = [each for each in (hidden, weight, offset) if each is not None]
    assert torch.autograd.gradgradcheck(loss, leaves)
    with torch.no_grad():
        loss_before = loss(*leaves)
    found = loss(*leaves)
    torch.testing.assert_close(found, loss_before)
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(SavedTensorError, match="changed in place"):
        torch.autograd.grad(found, hidden, create_graph=True)


# --- dtypes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_nearer_the_truth_than_pytorchs(dtype: torch.dtype) -> None:
    inputs = case(64, 32, 50, dtype=dtype)
    truth_inputs: Case = tuple(  # type: ignore[assignment]
        each.detach().double().requires_grad_() if each.is_floating_point() else each
        for each in inputs
        if each is not None
    )
    truth = gradients(plain(*truth_inputs), truth_inputs)
    loss = chunked_cross_entropy(*inputs, chunk_rows=7)
    assert loss.dtype is torch.float32
    found, ours = gradients(loss, inputs), gradients(plain(*inputs), inputs)
    for one, other, exact in zip(found, ours, truth, strict=True):
        assert one.dtype is dtype
        error = (one.double() - exact).norm() / exact.norm()
        assert error < 0.01
        assert error < 1.2 * (other.double() - exact).norm() / exact.norm()


def test_autocast_is_followed() -> None:
    inputs = case(64, 32, 50, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = chunked_cross_entropy(*inputs, chunk_rows=9), plain(*inputs)
    assert found.dtype is expected.dtype is torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
    for one, other in zip(gradients(found, inputs), gradients(expected, inputs), strict=True):
        assert one.dtype is other.dtype is torch.float32
        assert (one - other).norm() < 0.02 * other.norm()


# --- bytes --------------------------------------------------------------------------------------

ROWS, FEATURES, CLASSES, CHUNK = 1024, 64, 4096, 64
LOGITS = 4 * ROWS * CLASSES


def peak_of(step: Any) -> int:
    with track() as tracking:
        before = tracking.peak_bytes
        step()
    return tracking.statistics["live_bytes.peak"] - before


def test_the_logits_never_exist() -> None:
    inputs = case(ROWS, FEATURES, CLASSES, bias=False, dtype=torch.float32)
    held = inputs[0].nbytes + inputs[1].nbytes
    chunk = 4 * CHUNK * CLASSES
    ours = peak_of(lambda: chunked_cross_entropy(*inputs, chunk_rows=CHUNK).backward())
    for each in inputs[:2]:
        each.grad = None
    theirs = peak_of(lambda: plain(*inputs).backward())
    assert theirs >= 2 * LOGITS
    # The two gradients, one chunk, and what is small: per row a few numbers.
    assert held + chunk <= ours <= held + chunk + 64 * ROWS + 4096


@pytest.mark.parametrize(("features", "chunk"), [(1024, 4 * ROWS * 1024), (64, 4 * 128 * CLASSES)])
def test_by_default_a_chunk_takes_no_more_than_hidden_or_128_rows(
    features: int, chunk: int
) -> None:
    hidden, weight, target, _ = case(ROWS, features, CLASSES, bias=False, dtype=torch.float32)
    with torch.no_grad():
        taken = peak_of(lambda: chunked_cross_entropy(hidden, weight, target))
    assert chunk == max(hidden.nbytes, 4 * 128 * CLASSES)
    assert chunk <= taken <= chunk + 64 * ROWS + 4096


# --- within a session ---------------------------------------------------------------------------


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, 16)
        self.body = nn.Sequential(nn.Linear(16, 16), nn.GELU())
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.body(self.embed(words))


def train_language(loss: Any, **options: Any) -> tuple[dict[str, Tensor], daf.StepReport]:
    model = Language()
    session = daf.Session(model, torch.optim.AdamW(model.parameters(), 0.01), None, **options)
    words = torch.randint(50, (8, 12), generator=torch.Generator().manual_seed(1))
    batch = words[:, :-1].contiguous(), words[:, 1:].contiguous()
    for _ in range(3):
        report = session.step(
            batch, lambda model, batch: loss(model(batch[0]), model.head.weight, batch[1], None)
        )
    return dict(model.state_dict()), report


def test_a_session_trains_with_it_and_releases_tied_weights() -> None:
    expected, _ = train_language(plain)
    kept, _ = train_language(chunked_cross_entropy)
    released, report = train_language(chunked_cross_entropy, release_gradients=True)
    assert report.released_gradients == 3
    for name, value in expected.items():
        torch.testing.assert_close(kept[name], value, rtol=1e-4, atol=1e-5)
        assert torch.equal(released[name], kept[name])


# --- errors -------------------------------------------------------------------------------------


def test_what_does_not_go_together_is_an_error() -> None:
    hidden, weight, target, bias = (each.detach() for each in case())
    wrong: dict[str, Any] = {
        "target 7 is out of bounds": lambda: chunked_cross_entropy(
            hidden, weight, torch.full_like(target, 7)
        ),
        "target -1 is out of bounds": lambda: chunked_cross_entropy(
            hidden, weight, torch.full_like(target, -1)
        ),
        r"found \[10, 5\], \[7, 5\], \[9\]": lambda: chunked_cross_entropy(
            hidden, weight, target[:9]
        ),
        r"and \[6\]": lambda: chunked_cross_entropy(hidden, weight, target, bias[:6]),
        "must have one dtype": lambda: chunked_cross_entropy(hidden.float(), weight, target),
        "class indices": lambda: chunked_cross_entropy(hidden, weight, target.double()),
        "'none'": lambda: chunked_cross_entropy(
            hidden,
            weight,
            target,
            reduction="none",  # type: ignore[arg-type]
        ),
        "label_smoothing": lambda: chunked_cross_entropy(
            hidden, weight, target, label_smoothing=1.1
        ),
        "chunk_rows": lambda: chunked_cross_entropy(hidden, weight, target, chunk_rows=0),
    }
    for message, call in wrong.items():
        with pytest.raises(DataError, match=message):
            call()
