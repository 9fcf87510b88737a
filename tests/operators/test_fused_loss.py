"""A last linear layer and its cross-entropy as one: the same training without the logits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from largest import Largest
from torch import Tensor, nn

from daf.capture.capture import Capture
from daf.capture.compress import compress
from daf.core.errors import FusionError
from daf.core.policy import plain_policy, with_fused_operators
from daf.operators import linear_cross_entropy
from daf.operators.linear_cross_entropy import LEAST_CLASSES, LEAST_GROWTH, PATTERN

pytestmark = pytest.mark.smoke

BATCH, LENGTH, WIDTH, CLASSES = 3, 150, 16, 2048
CHUNK_ROWS = 128
Loss = Callable[["Model", Tensor, Tensor], Tensor]


class Model(nn.Module):
    """Words to logits, the last layer's weight tied to the first's if asked."""

    def __init__(self, *, bias: bool = False, tied: bool = False, classes: int = CLASSES) -> None:
        super().__init__()
        self.embed = nn.Embedding(classes, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, classes, bias=bias)
        if tied:
            self.head.weight = self.embed.weight
        self.aside: list[Tensor] = []

    def forward(self, words: Tensor) -> Tensor:
        return self.head(F.gelu(self.body(self.embed(words))))


def flattened(model: Model, words: Tensor, following: Tensor) -> Tensor:
    return F.cross_entropy(model(words).flatten(0, 1), following.flatten())


def shifted(model: Model, words: Tensor, following: Tensor) -> Tensor:
    """As Transformers' models do it, when they are given labels."""
    logits = model(words).float()[..., :-1, :].contiguous()
    labels = following[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1), ignore_index=3)


def by_module(model: Model, words: Tensor, following: Tensor) -> Tensor:
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1, reduction="sum")
    return criterion(model(words).reshape(-1, CLASSES), following.reshape(-1)) / words.numel()


def of_the_last_word(model: Model, words: Tensor, following: Tensor) -> Tensor:
    return F.cross_entropy(model(words)[:, -1], following[:, 0])


def in_two_parts(model: Model, words: Tensor, following: Tensor) -> Tensor:
    """One stand-in read twice."""
    logits = model(words)
    first = F.cross_entropy(logits[0], following[0])
    return first + F.cross_entropy(logits[1:].flatten(0, 1), following[1:].flatten())


FUSED: dict[str, Loss] = {
    each.__name__: each for each in (flattened, shifted, by_module, of_the_last_word, in_two_parts)
}


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (BATCH, LENGTH)
    words, following = (torch.randint(CLASSES, shape, generator=generator) for _ in "wf")
    following[0, 2] = 3
    return words, following


def make_model(**options: Any) -> Model:
    torch.manual_seed(0)
    return Model(**options)


def trained(
    loss_fn: Loss, steps: int = 3, *, fused: bool, **options: Any
) -> tuple[list[dict[str, Tensor]], Capture | Any, list[int]]:
    """Losses and gradients of every step, the capture, and each step's largest tensor."""
    model, found, largest = make_model(**options), [], []
    capture = compress(model, "exact", fused=fused)
    words, following = data()
    for _ in range(steps):
        model.zero_grad()
        with Largest() as seen:
            with capture:
                loss = loss_fn(model, words, following)
            loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        found.append({"loss": loss.detach(), **gradients})
        largest.append(seen.elements)
    return found, capture, largest


def verdicts(capture: Any) -> dict[str, tuple[str, str]]:
    reports = (each for each in capture.fusions() if each.operator == "linear")
    return {each.module: (each.pattern, each.reason) for each in reports}


@pytest.mark.parametrize("options", [{}, {"bias": True}, {"tied": True}], ids=str)
@pytest.mark.parametrize("name", FUSED)
def test_losses_and_gradients_are_plain_pytorch_s_and_no_logits_exist(
    name: str, options: dict[str, bool]
) -> None:
    found, capture, largest = trained(FUSED[name], fused=True, **options)
    expected, plain, _ = trained(FUSED[name], fused=False, **options)
    assert verdicts(capture) == {"head": (PATTERN, "")}
    assert verdicts(plain) == {}
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for each, value in theirs.items():
            scale = float(value.abs().max()) + 1e-9
            assert (ours[each] - value).abs().max() <= 2e-5 * scale, each
    rows = {"of_the_last_word": BATCH, "in_two_parts": (BATCH - 1) * LENGTH}.get(
        name, BATCH * LENGTH
    )
    assert largest[0] >= rows * CLASSES  # the first step watches
    assert max(largest[1:]) <= CHUNK_ROWS * CLASSES
    assert capture.stats.held_bytes == 0


def test_a_frozen_layer_passes_the_gradient_on() -> None:
    gradients = {}
    for fused in (False, True):
        model = make_model()
        model.head.requires_grad_(False)
        model.embed.requires_grad_(False)
        capture = compress(model, "exact", fused=fused)
        for _ in range(2):
            model.zero_grad()
            with capture:
                loss = flattened(model, *data())
            loss.backward()
        gradients[fused] = model.body.weight.grad
        assert model.head.weight.grad is None
    torch.testing.assert_close(gradients[True], gradients[False], rtol=1e-5, atol=1e-8)


def read_by_argmax(model: Model, words: Tensor, following: Tensor) -> Tensor:
    logits = model(words).flatten(0, 1)
    model.aside = [(logits.argmax(-1) == following.flatten()).float().mean()]
    return F.cross_entropy(logits, following.flatten())


def softened(model: Model, words: Tensor, following: Tensor) -> Tensor:
    return F.cross_entropy(model(words).flatten(0, 1) / 2.0, following.flatten())


def weighted(model: Model, words: Tensor, following: Tensor) -> Tensor:
    weight = torch.linspace(0.5, 1.5, CLASSES)
    return F.cross_entropy(model(words).flatten(0, 1), following.flatten(), weight)


def put_aside(model: Model, words: Tensor, following: Tensor) -> Tensor:
    model.aside = [model(words)]
    return F.cross_entropy(model.aside[0].flatten(0, 1), following.flatten())


def transposed(model: Model, words: Tensor, following: Tensor) -> Tensor:
    return F.cross_entropy(model(words).transpose(1, 2), following)


def cut(model: Model, words: Tensor, following: Tensor) -> Tensor:
    return F.cross_entropy(model(words)[..., :1024].flatten(0, 1), following.flatten() % 1024)


def chosen_by_a_mask(model: Model, words: Tensor, following: Tensor) -> Tensor:
    there = following > 100
    return F.cross_entropy(model(words)[there], following[there])


def run_twice(model: Model, words: Tensor, following: Tensor) -> Tensor:
    model.head(torch.zeros(2, WIDTH)).sum()
    return flattened(model, words, following)


KEPT: dict[str, tuple[Loss, str]] = {
    "argmax": (read_by_argmax, "its result is read by argmax"),
    "divided": (softened, "its result is read by "),
    "class weights": (weighted, "its result is read by cross_entropy"),
    "put aside": (put_aside, "its result outlives the step"),
    "transposed": (transposed, "its result is read by transpose"),
    "cut": (cut, "its result is read by __getitem__"),
    "run twice": (run_twice, "it runs several times in a step"),
    "mask": (chosen_by_a_mask, "its result is read by __getitem__"),
}


@pytest.mark.parametrize("name", KEPT)
def test_whoever_else_reads_logits_gets_them(name: str) -> None:
    loss_fn, reason = KEPT[name]
    found, capture, _ = trained(loss_fn, fused=True)
    expected, _, _ = trained(loss_fn, fused=False)
    ((pattern, said),) = verdicts(capture).values()
    assert pattern == ""
    assert said.startswith(reason)
    for ours, theirs in zip(found, expected, strict=True):
        for each, value in theirs.items():
            torch.testing.assert_close(ours[each], value, rtol=1e-4, atol=1e-6, msg=each)


def test_a_later_reader_gets_real_logits_and_the_place_is_given_up() -> None:
    model = make_model()
    capture = compress(model, "exact", fused=True)
    words, following = data()
    for _ in range(2):
        with capture:
            flattened(model, words, following)
    assert verdicts(capture) == {"head": (PATTERN, "")}
    with capture:
        read_by_argmax(model, words, following)
    expected = (model(words).flatten(0, 1).argmax(-1) == following.flatten()).float().mean()
    assert torch.equal(model.aside[0], expected)
    assert verdicts(capture) == {"head": ("", "its result was also read by argmax")}
    with capture:
        assert model(words).isfinite().all()


def test_logits_that_outlive_a_later_step_become_real() -> None:
    model = make_model()
    capture = compress(model, "exact", fused=True)
    words, following = data()
    for _ in range(2):
        with capture:
            flattened(model, words, following)
    for _ in range(2):
        with capture:
            put_aside(model, words, following)
        torch.testing.assert_close(model.aside[0], model(words))
        assert model.aside[0].requires_grad


def test_a_gradient_penalty_through_the_loss_trains_as_unfused() -> None:
    words, following = data()
    found = {}
    for fused in (False, True):
        model = make_model()
        capture = compress(model, "exact", fused=fused)
        for _ in range(2):
            with capture:
                flattened(model, words, following)
        with capture:
            loss = flattened(model, words, following)
            (slope,) = torch.autograd.grad(loss, model.embed.weight, create_graph=True)
            loss = loss + 10 * slope.square().sum()
        loss.backward()
        found[fused] = [each.grad for each in model.parameters()]
    assert verdicts(capture)["head"] == (PATTERN, "")
    for one, other in zip(found[True], found[False], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_a_weight_that_is_changed_before_the_loss_is_an_error() -> None:
    model = make_model()
    capture = compress(model, "exact", fused=True)
    words, following = data()

    def changed() -> Tensor:
        logits = model(words)
        with torch.no_grad():
            model.head.weight.mul_(2.0)
        return F.cross_entropy(logits.flatten(0, 1), following.flatten())

    for _ in range(2):
        with capture:
            flattened(model, words, following)
    with pytest.raises(FusionError, match="changed in place before cross-entropy"), capture:
        changed()


@pytest.mark.parametrize("what", ["few classes", "little growth", "no gradient", "half range"])
def test_where_little_is_saved_nothing_is_watched(what: str) -> None:
    classes = {"few classes": LEAST_CLASSES - 1, "little growth": LEAST_GROWTH * WIDTH - 1}
    model = make_model(classes=classes.get(what, CLASSES))
    capture = compress(model, "exact", fused=True)
    words = data()[0] % classes.get(what, CLASSES)
    for _ in range(2):
        with (
            capture,
            torch.autocast("cpu", torch.float16, enabled=what == "half range"),
            torch.set_grad_enabled(what != "no gradient"),
        ):
            F.cross_entropy(model(words).flatten(0, 1).float(), words.flatten())
    assert verdicts(capture) == {}


def within_autocast(model: Model, words: Tensor, following: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return flattened(model, words, following)


def behind_autocast(model: Model, words: Tensor, following: Tensor) -> Tensor:
    """The loss in float32, outside, as many training loops have it."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(words)
    return F.cross_entropy(logits.float().flatten(0, 1), following.flatten())


def narrow(model: Model, words: Tensor, following: Tensor) -> Tensor:
    """A model of bf16 whose loss is of bf16 too."""
    return flattened(model.bfloat16(), words, following)


def narrow_between(model: Model, words: Tensor, following: Tensor) -> Tensor:
    """The same, but the loss computed in float32: PyTorch's own rounds all of it to bf16."""
    logits = model.bfloat16()(words).float()
    return F.cross_entropy(logits.flatten(0, 1), following.flatten()).bfloat16()


@pytest.mark.parametrize("loss_fn", [within_autocast, behind_autocast, narrow])
def test_mixed_precision_is_plain_pytorch_s_and_no_logits_exist(loss_fn: Loss) -> None:
    """Products round as PyTorch's do; the weight's gradient is summed in float32 besides."""
    found, capture, largest = trained(loss_fn, fused=True, bias=True)
    theirs = narrow_between if loss_fn is narrow else loss_fn
    expected, _, _ = trained(theirs, fused=False, bias=True)
    assert verdicts(capture) == {"head": (PATTERN, "")}
    whole = BATCH * LENGTH * CLASSES // (2 if loss_fn is narrow else 1)  # in words of four bytes
    assert max(largest[1:]) <= CHUNK_ROWS * CLASSES < whole <= largest[0]
    for ours, values in zip(found[1:], expected[1:], strict=True):  # the first step only watches
        for each, value in values.items():
            assert ours[each].dtype is value.dtype
            error = (ours[each] - value).float().square().sum()
            assert error <= 1e-4 * value.float().square().sum(), each


def test_who_else_reads_logits_of_half_width_gets_them_as_they_are() -> None:
    model, (words, following) = make_model(), data()
    capture = compress(model, "exact", fused=True)

    def loss_of(*, twice: bool) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(words)
            loss = F.cross_entropy(logits.flatten(0, 1), following.flatten())
            return loss + logits.float().mean() if twice else loss

    for step in range(3):
        with capture:
            loss = loss_of(twice=step == 2)
    expected = loss_of(twice=True)
    assert loss.dtype is expected.dtype is torch.float32
    torch.testing.assert_close(loss, expected)
    assert verdicts(capture) == {"head": ("", "its result was also read by mean")}


def test_layers_that_no_kernel_knows_pass_by() -> None:
    """Of shapes alone, say: autocast knows no such device."""
    model = nn.Linear(4, 4096, device="meta")
    with Capture(model).step(with_fused_operators(plain_policy()), 0, 0):
        assert model(torch.empty(2, 4, device="meta")).shape == (2, 4096)


def test_an_evaluation_before_training_does_not_end_the_watch() -> None:
    """Without gradients there is nothing to see; the first step of training is still watched."""
    model = make_model()
    capture = compress(model, "exact", fused=True)
    words, following = data()
    with capture, torch.no_grad():
        before = flattened(model, words, following)
    assert verdicts(capture) == {}
    largest = []
    for _ in range(2):
        with capture, Largest() as seen:
            loss = flattened(model, words, following)
        largest.append(seen.elements)
    assert verdicts(capture) == {"head": (PATTERN, "")}
    assert largest[0] >= BATCH * LENGTH * CLASSES > CHUNK_ROWS * CLASSES >= largest[1]
    torch.testing.assert_close(loss.detach(), before)


def test_without_the_policy_s_word_logits_exist() -> None:
    model = make_model()
    capture = Capture(model)
    for _ in range(2):
        with capture.step(plain_policy(), 0, 0), Largest() as seen:
            flattened(model, *data())
        assert seen.elements >= BATCH * LENGTH * CLASSES
    assert "linear_cross_entropy" in with_fused_operators(plain_policy()).operators


def test_a_model_of_transformers_given_labels() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=CLASSES, n_positions=LENGTH, n_layer=1, n_embd=32, n_head=2, use_cache=False
    )
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).eval()
    words, _ = data()
    gradients = {}
    for fused in (False, True):
        own = copy.deepcopy(model)
        capture = compress(own, "exact", fused=fused)
        for _ in range(2):
            own.zero_grad()
            with Largest() as seen:
                with capture:
                    loss = own(input_ids=words, labels=words).loss
                loss.backward()
        gradients[fused] = own.transformer.wte.weight.grad
        if fused:
            assert verdicts(capture)["lm_head"] == (PATTERN, "")
            assert seen.elements <= CHUNK_ROWS * CLASSES
    torch.testing.assert_close(gradients[True], gradients[False], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(("classes", "watches"), [(CLASSES, True), (LEAST_CLASSES - 1, False)])
def test_a_model_without_large_logits_is_watched_in_its_first_step_only(
    classes: int, watches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    is_worth_it = linear_cross_entropy._is_worth_it

    def counting(*given: Any) -> bool:
        seen.append(given)
        return is_worth_it(*given)

    monkeypatch.setattr(linear_cross_entropy, "_is_worth_it", counting)
    model = make_model(classes=classes)
    capture = compress(model, "exact", fused=True)
    words = data()[0] % classes
    counts = []
    for _ in range(3):
        seen.clear()
        with capture:
            flattened(model, words, words)
        counts.append(bool(seen))
    assert counts == [True, watches, watches]
