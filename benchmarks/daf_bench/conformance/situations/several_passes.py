"""Unusual graphs: several passes, derivatives of derivatives, in-place operators, views, types."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf_bench.conformance.case import CaseList, Work
from daf_bench.conformance.situations.building import (
    CLASSES,
    EXAMPLES,
    FEATURES,
    WIDTH,
    classified,
    labelled,
    network,
)

CASES = CaseList()
REFUSED = ("DoubleBackwardError", "DataError", "ReleaseRefusedError", "GradientError")


def images(channels: int = 3) -> tuple[Tensor, Tensor]:
    """Return images [N, channels, 8, 8] and class labels [N]."""
    return torch.randn(EXAMPLES, channels, 8, 8), torch.randint(0, CLASSES, (EXAMPLES,))


def convolutions() -> nn.Sequential:
    """Return a small network of convolutions and batch normalisations."""
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, CLASSES)),
    )


class Layer(nn.Module):
    """A function between two linear layers: features [N, ``FEATURES``] to scores."""

    def __init__(self, function: Any, width: int = WIDTH) -> None:
        super().__init__()
        self.into, self.function = network(outputs=WIDTH), function
        self.out = nn.Linear(width, CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        """Return scores."""
        scores: Tensor = self.out(self.function(self.into(features)))
        return scores


def between(function: Any, width: int = WIDTH) -> Work:
    """Return a network with a function of activations in its middle."""
    return Work(Layer(function, width), labelled(), classified)


@CASES.add("several_forwards")
def several_forwards() -> Work:
    """Three forward passes, then one backward pass."""
    return Work(
        network(), labelled(), lambda m, b: sum(classified(m, (b[0] * k, b[1])) for k in (1, 2, 3))
    )


@CASES.add("several_forwards_of_batch_norm")
def several_forwards_of_batch_norm() -> Work:
    """The same through what fuses and keeps statistics."""
    return Work(
        convolutions(), images(), lambda m, b: sum(classified(m, (b[0] * k, b[1])) for k in (1, 2))
    )


@CASES.add("siamese")
def siamese() -> Work:
    """Two passes of one network, compared: splits rightly."""
    batch = (torch.randn(EXAMPLES, FEATURES), torch.randn(EXAMPLES, FEATURES))
    return Work(network(), batch, lambda m, b: F.mse_loss(m(b[0]), m(b[1]).tanh()))


def _penalised(model: nn.Module, batch: Any) -> Tensor:
    features = batch[0].clone().requires_grad_()
    loss = F.cross_entropy(model(features), batch[1])
    (gradient,) = torch.autograd.grad(loss, features, create_graph=True)
    return loss + gradient.square().sum(1).mean()


@CASES.add("gradient_penalty", right_errors=REFUSED)
def gradient_penalty() -> Work:
    """The input gradient's square, of a mean."""
    return Work(network(), labelled(), _penalised)


@CASES.add("gradient_penalty_of_sum", right_errors=REFUSED)
def gradient_penalty_of_sum() -> Work:
    """Each example's own input gradient: splits rightly."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        features = batch[0].clone().requires_grad_()
        scores = model(features)
        (gradient,) = torch.autograd.grad(scores[:, 0].sum(), features, create_graph=True)
        return F.cross_entropy(scores, batch[1]) + gradient.norm(dim=1).sub(1).square().mean()

    return Work(network(), labelled(), loss)


@CASES.add("lazy_penalty", right_errors=REFUSED)
def lazy_penalty() -> Work:
    """Double backward in every fourth step (StyleGAN's lazy regularisation)."""
    step = [0]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return _penalised(model, batch) if step[0] % 4 == 3 else classified(model, batch)

    def before(index: int) -> None:
        step[0] = index

    return Work(network(), labelled(), loss, before=before)


@CASES.add("lazy_penalty_of_convolutions", right_errors=REFUSED)
def lazy_penalty_of_convolutions() -> Work:
    """The same through fused batch normalisation."""
    step = [0]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return _penalised(model, batch) if step[0] % 4 == 3 else classified(model, batch)

    def before(index: int) -> None:
        step[0] = index

    return Work(convolutions(), images(), loss, before=before)


@CASES.add("inner_step", right_errors=REFUSED)
def inner_step() -> Work:
    """MAML: a gradient step inside the loss, differentiated through."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        names, parameters = zip(*model.named_parameters(), strict=True)
        half = len(batch[1]) // 2 or 1
        inner = classified(model, (batch[0][:half], batch[1][:half]))
        moves = torch.autograd.grad(inner, parameters, create_graph=True)
        moved = {n: p - 0.1 * g for n, p, g in zip(names, parameters, moves, strict=True)}
        scores = torch.func.functional_call(model, moved, (batch[0],))
        return F.cross_entropy(scores, batch[1])

    return Work(network(), labelled(), loss)


@CASES.add("backward_inside_loss")
def backward_inside_loss() -> Work:
    """A part's gradient is taken inside the loss (gradient matching, detached)."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        first = classified(model, batch)
        (gradient,) = torch.autograd.grad(first, [model[0].bias], retain_graph=True)
        return first * (1 + gradient.norm().detach())

    return Work(network(), labelled(), loss)


@CASES.add("own_accumulated_gradient", right_errors=REFUSED)
def own_accumulated_gradient() -> Work:
    """The loop has already put gradients in place, to be added to."""
    model = network()

    def before(_step: int) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.01)

    return Work(model, labelled(), classified, before=before)
