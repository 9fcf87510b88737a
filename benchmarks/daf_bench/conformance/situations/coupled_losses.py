"""Losses that couple examples, weigh them, or are means over other things than examples."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf_bench.conformance.case import CaseList, Loss, Work
from daf_bench.conformance.situations.building import CLASSES, EXAMPLES, FEATURES, labelled, network

CASES = CaseList()
LENGTH, IGNORED = 10, -100


def on_labels(loss: Loss) -> Work:
    """Return the small network on labelled features, under this loss."""
    return Work(network(), labelled(), loss)


def _two_views() -> tuple[Tensor, Tensor]:
    first = torch.randn(EXAMPLES, FEATURES)
    return first, first + 0.1 * torch.randn_like(first)


def _embedded(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    return F.normalize(model(batch[0]), dim=1), F.normalize(model(batch[1]), dim=1)


class Tagger(nn.Module):
    """Tokens [N, length] to scores [N, length, outputs]."""

    def __init__(self, outputs: int = CLASSES) -> None:
        super().__init__()
        self.words = nn.Embedding(50, FEATURES)
        self.body = network(outputs=outputs)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return scores."""
        scores: Tensor = self.body(self.words(tokens))
        return scores


def tokens() -> tuple[Tensor, Tensor]:
    """Return tokens and labels, fewer of which count in later examples."""
    tokens = torch.randint(0, 50, (EXAMPLES, LENGTH))
    labels = torch.randint(0, CLASSES, (EXAMPLES, LENGTH))
    for example in range(EXAMPLES):
        labels[example, LENGTH - (example * LENGTH) // (EXAMPLES + 2) :] = IGNORED
    return tokens, labels


@CASES.add("info_nce")
def info_nce() -> Work:
    """In-batch negatives."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        first, second = _embedded(model, batch)
        return F.cross_entropy(first @ second.t() / 0.1, torch.arange(len(first)))

    return Work(network(), _two_views(), loss)


@CASES.add("clip_symmetric")
def clip_symmetric() -> Work:
    """Both directions, and a learned temperature."""
    model = nn.ModuleDict({"a": network(), "b": network()})
    model.register_parameter("scale", nn.Parameter(torch.tensor(1.0)))

    def loss(model: Any, batch: Any) -> Tensor:
        first, second = F.normalize(model["a"](batch[0])), F.normalize(model["b"](batch[1]))
        scores, labels = model.scale.exp() * first @ second.t(), torch.arange(len(first))
        return F.cross_entropy(scores, labels) + F.cross_entropy(scores.t(), labels)

    return Work(model, _two_views(), loss)


@CASES.add("triplet_batch_hard")
def triplet_batch_hard() -> Work:
    """The hardest positive and negative of the batch."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        apart = torch.cdist(model(batch[0]), model(batch[0])) + 1e-6
        same = batch[1][:, None] == batch[1][None]
        positive = (apart * same).max(1).values
        negative = (apart + 1e3 * same).min(1).values
        return F.relu(positive - negative + 0.3).mean()

    return on_labels(loss)


@CASES.add("supervised_contrastive")
def supervised_contrastive() -> Work:
    """SupCon."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        points = F.normalize(model(batch[0]), dim=1)
        scores = points @ points.t() / 0.2 - 1e9 * torch.eye(len(points))
        same = (batch[1][:, None] == batch[1][None]).float() - torch.eye(len(points))
        return -(scores.log_softmax(1) * same).sum() / same.sum().clamp(min=1)

    return on_labels(loss)


@CASES.add("barlow_twins")
def barlow_twins() -> Work:
    """A correlation matrix of features over the batch."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        first, second = model(batch[0]), model(batch[1])
        first = (first - first.mean(0)) / (first.std(0) + 1e-3)
        second = (second - second.mean(0)) / (second.std(0) + 1e-3)
        return (first.t() @ second / len(first) - torch.eye(CLASSES)).square().sum()

    return Work(network(), _two_views(), loss)


@CASES.add("variance_covariance")
def variance_covariance() -> Work:
    """VICReg's terms."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        first, second = model(batch[0]), model(batch[1])
        spread = F.relu(1 - first.var(0).add(1e-4).sqrt()).mean()
        return F.mse_loss(first, second) + spread + first.t().cov().square().mean()

    return Work(network(), _two_views(), loss)


@CASES.add("maximum_mean_discrepancy")
def maximum_mean_discrepancy() -> Work:
    """Two samples held against each other."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        first, second = model(batch[0]), model(batch[1])
        kernel = [torch.exp(-torch.cdist(a, b).square()).mean() for a, b in (
            (first, first), (second, second), (first, second))]  # fmt: skip
        return kernel[0] + kernel[1] - 2 * kernel[2]

    return Work(network(), _two_views(), loss)


class Experts(nn.Module):
    """A mixture of experts, and the loads that its router gave them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(FEATURES, 4)
        self.experts = nn.ModuleList(network() for _ in range(4))

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return scores and routing probabilities."""
        weights = self.router(features).softmax(-1)
        chosen = weights.argmax(-1)
        parts = [
            (chosen == place)[:, None] * weights[:, place, None] * expert(features)
            for place, expert in enumerate(self.experts)
        ]
        return torch.stack(parts).sum(0), weights


@CASES.add("experts_balance")
def experts_balance() -> Work:
    """The balance of experts is a product of means over the batch."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        scores, weights = model(batch[0])
        used = F.one_hot(weights.argmax(-1), 4).float().mean(0)
        return F.cross_entropy(scores, batch[1]) + 4 * (used * weights.mean(0)).sum()

    return Work(Experts(), labelled(), loss)


@CASES.add("experts_capacity")
def experts_capacity() -> Work:
    """Tokens beyond an expert's share of the batch are dropped."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        scores, weights = model(batch[0])
        place = F.one_hot(weights.argmax(-1), 4).cumsum(0).max(-1).values
        kept = (place <= len(weights) // 3).float()
        return (F.cross_entropy(scores, batch[1], reduction="none") * kept).mean()

    return Work(Experts(), labelled(), loss)


@CASES.add("mixup")
def mixup() -> Work:
    """Examples are mixed with each other in the loss."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        mixed = 0.7 * batch[0] + 0.3 * batch[0].roll(1, 0)
        scores = model(mixed)
        other = F.cross_entropy(scores, batch[1].roll(1, 0))
        return 0.7 * F.cross_entropy(scores, batch[1]) + 0.3 * other

    return on_labels(loss)


@CASES.add("pairwise_ranking")
def pairwise_ranking() -> Work:
    """Every pair of the batch."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        scores, rank = model(batch[0])[:, 0], batch[1].float()
        better = rank[:, None] > rank[None]
        return F.softplus(scores[None] - scores[:, None])[better].mean()

    return on_labels(loss)


@CASES.add("listwise_softmax")
def listwise_softmax() -> Work:
    """A softmax over the examples."""
    return on_labels(
        lambda model, batch: (
            -(batch[1].float().softmax(0) * model(batch[0])[:, 0].log_softmax(0)).sum()
        )
    )
