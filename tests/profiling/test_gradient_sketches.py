"""Sketches of gradients are the gradients' products with their signs, and nothing else changes."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from daf.profiling import gradient_sketches
from daf.profiling.gradient_sketches import GradientSketches
from daf.profiling.split_proof import SplitProof
from daf.step.batch_cut import possible_cuts

Batch = tuple[Tensor, Tensor]


class Tied(nn.Module):
    """A table of words that the last layer reads again."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.inner = nn.Linear(8, 8)

    def forward(self, words: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.inner(self.words(words))), self.words.weight)


class Checkpointed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def layers() -> list[nn.Module]:
    return [nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 9, bias=False), nn.ReLU(inplace=True)]


def mean(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())


def penalised(model: nn.Module, batch: Batch) -> Tensor:
    x = batch[0].detach().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return slope.square().mean()


def images() -> Batch:
    return torch.randn(6, 6), torch.randint(0, 9, (6,))


def words() -> Batch:
    return torch.randint(0, 11, (6, 5)), torch.randint(0, 11, (6, 5))


@pytest.fixture(autouse=True)
def _sketch_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_sketches, "LEAST_ELEMENTS", 1)


@pytest.mark.parametrize("kind", [nn.Sequential, Checkpointed])
def test_a_sketch_is_the_gradient_times_its_signs(kind: Callable[..., nn.Module]) -> None:
    model, batch = kind(*layers()), images()
    twin = copy.deepcopy(model)
    loss = mean(twin, batch)
    loss.backward()
    state, sketches = torch.get_rng_state(), GradientSketches(model)
    assert torch.equal(torch.get_rng_state(), state)
    with sketches.taken():
        found = mean(model, batch)
        found.backward()
    assert torch.equal(found, loss)
    weights = [each for each in twin.parameters() if each.dim() == 2]
    assert len(weights) == len(sketches.sketches) == 2
    for weight, sketch, (_, signs) in zip(
        weights, sketches.sketches, sketches._of.values(), strict=True
    ):
        torch.testing.assert_close(sketch.grad, weight.grad @ signs)
    for name, weight in model.named_parameters():
        if weight.dim() == 1:
            torch.testing.assert_close(weight.grad, twin.get_parameter(name).grad)
        else:
            assert weight.grad is None


@pytest.mark.parametrize(
    ("make", "batch", "loss"),
    [(Tied, words, mean), (lambda: nn.Sequential(*layers()[:3]), images, penalised)],
)
def test_what_else_uses_a_weight_gives_it_its_gradient(
    make: Callable[[], nn.Module], batch: Callable[[], Batch], loss: Callable[..., Tensor]
) -> None:
    model, data = make(), batch()
    twin = copy.deepcopy(model)
    loss(twin, data).backward()
    sketches, has_both = GradientSketches(model), False
    with sketches.taken():
        loss(model, data).backward()
    for name, weight in model.named_parameters():
        if (whole := twin.get_parameter(name).grad) is not None and id(weight) in sketches._of:
            sketch, signs = sketches._of[id(weight)]
            direct = 0.0 if weight.grad is None else weight.grad @ signs
            has_both = has_both or weight.grad is not None
            torch.testing.assert_close(sketch.grad + direct, whole @ signs)
    assert has_both


def test_weights_with_hooks_get_gradients() -> None:
    model, seen = nn.Sequential(*layers()), list[Tensor]()
    model[0].weight.register_hook(seen.append)
    with GradientSketches(model).taken():
        mean(model, images()).backward()
    assert len(seen) == 1
    assert model[0].weight.grad is not None
    assert model[2].weight.grad is None


@pytest.mark.parametrize("loss", [mean, penalised])
def test_what_needs_weights_gradients_is_proven_by_them(
    loss: Callable[[nn.Module, Batch], Tensor],
) -> None:
    model, batch = nn.Sequential(*layers()[:3]), images()

    def of_weights(model: nn.Module, batch: Batch) -> Tensor:
        value = loss(model, batch)
        torch.autograd.grad(value, [*model.parameters()], retain_graph=True)
        return value

    cut = next(possible_cuts(batch))
    for each in (loss, of_weights):
        _, refusal = SplitProof(model, each, statistics=True).run(batch, cut, 4)
        assert refusal == ""
    assert all(each.grad is None for each in model.parameters())
