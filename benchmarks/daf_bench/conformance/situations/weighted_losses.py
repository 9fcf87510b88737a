"""Losses that weigh examples, or are means over other things than examples."""

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
    labelled,
    network,
)
from daf_bench.conformance.situations.coupled_losses import Tagger, on_labels, tokens

CASES = CaseList()
LENGTH, IGNORED = 10, -100


@CASES.add("conditional_random_field")
def conditional_random_field() -> Work:
    """A chain's log-likelihood, each example its own."""
    model = Tagger()
    model.moves = nn.Parameter(torch.randn(CLASSES, CLASSES) * 0.1)

    def loss(model: Any, batch: Any) -> Tensor:
        scores, labels = model(batch[0]), batch[1].clamp(min=0)
        gold = scores.gather(2, labels[..., None]).sum((1, 2))
        gold = gold + model.moves[labels[:, :-1], labels[:, 1:]].sum(1)
        alpha = scores[:, 0]
        for place in range(1, scores.shape[1]):
            alpha = scores[:, place] + (alpha[:, :, None] + model.moves).logsumexp(1)
        return (alpha.logsumexp(1) - gold).mean()

    return Work(model, tokens(), loss)


@CASES.add("focal")
def focal() -> Work:
    """A mean over examples of a function of each one's own loss."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        each = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return ((1 - torch.exp(-each)) ** 2 * each).mean()

    return on_labels(loss)


@CASES.add("ignored_labels")
def ignored_labels() -> Work:
    """A mean over labelled tokens."""
    return Work(
        Tagger(),
        tokens(),
        lambda m, b: F.cross_entropy(m(b[0]).flatten(0, 1), b[1].flatten(), ignore_index=IGNORED),
    )


@CASES.add("ignored_labels_nll")
def ignored_labels_nll() -> Work:
    """The same by two operators, classes second."""
    return Work(Tagger(), tokens(), lambda m, b: F.nll_loss(m(b[0]).log_softmax(-1).mT, b[1]))


@CASES.add("class_weights")
def class_weights() -> Work:
    """A weighted mean whose weights do not add up to the examples."""
    weights = torch.linspace(0.1, 3.0, CLASSES)
    return on_labels(lambda m, b: F.cross_entropy(m(b[0]), b[1], weight=weights))


@CASES.add("class_weights_as_long_as_batch")
def class_weights_as_long_as_batch() -> Work:
    """A tensor of the batch that is no part of its examples, and as long."""
    batch = {
        **dict(zip("xy", labelled(CLASSES), strict=True)),
        "w": torch.linspace(0.5, 2, CLASSES),
    }
    return Work(network(), batch, lambda m, b: F.cross_entropy(m(b["x"]), b["y"], weight=b["w"]))


@CASES.add("label_smoothing_ignored")
def label_smoothing_ignored() -> Work:
    """Smoothed labels, some ignored."""
    return Work(
        Tagger(),
        tokens(),
        lambda m, b: F.cross_entropy(m(b[0]).mT, b[1], label_smoothing=0.1, ignore_index=IGNORED),
    )


@CASES.add("ctc")
def ctc() -> Work:
    """CTC's mean divides each example by its own length."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        scores = model(batch[0]).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(scores, batch[1], batch[2], batch[3])

    labels = torch.randint(1, CLASSES, (EXAMPLES, 4))
    lengths = torch.full((EXAMPLES,), LENGTH), torch.randint(1, 5, (EXAMPLES,))
    return Work(Tagger(), (tokens()[0], labels, *lengths), loss)


@CASES.add("answer_spans")
def answer_spans() -> Work:
    """Two cross-entropies over positions, some outside the window and ignored."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        first, last = model(batch[0]).unbind(-1)
        limit = first.shape[1]
        starts, ends = batch[1].clamp(0, limit), batch[2].clamp(0, limit)
        one = F.cross_entropy(first, starts, ignore_index=limit)
        return (one + F.cross_entropy(last, ends, ignore_index=limit)) / 2

    starts, ends = (torch.randint(0, LENGTH + 5, (EXAMPLES,)) for _ in range(2))
    return Work(Tagger(2), (tokens()[0], starts, ends), loss)


@CASES.add("masked_mean_of_batch")
def masked_mean_of_batch() -> Work:
    """A sum over the batch's masked places over their number."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        counted = (batch[1] >= 0).float()
        return (model(batch[0]).square().mean(-1) * counted).sum() / counted.sum()

    return Work(Tagger(), tokens(), loss)


@CASES.add("masked_mean_of_examples")
def masked_mean_of_examples() -> Work:
    """Each example's own masked mean: splits rightly."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        counted = (batch[1] >= 0).float()
        each = (model(batch[0]).square().mean(-1) * counted).sum(1) / counted.sum(1)
        return each.mean()

    return Work(Tagger(), tokens(), loss)


@CASES.add("selected_mean")
def selected_mean() -> Work:
    """A mean over what a boolean mask selects."""
    return Work(Tagger(), tokens(), lambda m, b: m(b[0])[b[1] >= 0].square().mean())


@CASES.add("dice_of_batch")
def dice_of_batch() -> Work:
    """A ratio of sums over the batch."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        share = model(batch[0]).softmax(-1)
        wanted = F.one_hot(batch[1], CLASSES).float()
        return 1 - 2 * (share * wanted).sum() / (share.square() + wanted).sum()

    return on_labels(loss)


@CASES.add("dice_of_examples")
def dice_of_examples() -> Work:
    """Each example's own ratio: splits rightly."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        share = model(batch[0]).softmax(-1)
        wanted = F.one_hot(batch[1], CLASSES).float()
        return (1 - 2 * (share * wanted).sum(1) / (share.square() + wanted).sum(1)).mean()

    return on_labels(loss)


@CASES.add("positive_weights")
def positive_weights() -> Work:
    """Binary cross-entropy whose positives weigh more."""
    weights = torch.linspace(0.5, 4.0, CLASSES)
    return on_labels(
        lambda m, b: F.binary_cross_entropy_with_logits(
            m(b[0]), F.one_hot(b[1], CLASSES).float(), pos_weight=weights
        )
    )


@CASES.add("sum_of_losses")
def sum_of_losses() -> Work:
    """A sum where a mean is usual."""
    return on_labels(lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="sum"))


@CASES.add("sum_and_weight")
def sum_and_weight() -> Work:
    """The sum and the weight that it is divided by."""

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        total = F.cross_entropy(model(batch[0]).mT, batch[1], reduction="sum")
        return total, (batch[1] >= 0).sum()

    return Work(Tagger(), tokens(), loss)


@CASES.add("zero_weight_pieces")
def zero_weight_pieces() -> Work:
    """Examples without a label."""

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        total = F.cross_entropy(model(batch[0]).mT, batch[1], reduction="sum")
        return total, (batch[1] >= 0).sum()

    words, labels = tokens()
    labels[1 : EXAMPLES - 3] = IGNORED
    return Work(Tagger(), (words, labels), loss)


@CASES.add("unlabelled_examples_mean")
def unlabelled_examples_mean() -> Work:
    """The same as a mean: a part without labels alone has no mean."""
    words, labels = tokens()
    labels[1 : EXAMPLES - 3] = IGNORED
    return Work(Tagger(), (words, labels), lambda m, b: F.cross_entropy(m(b[0]).mT, b[1]))


@CASES.add("scaled_loss")
def scaled_loss() -> Work:
    """A loss scaled up, as a GradScaler does."""
    return on_labels(lambda m, b: 1024.0 * F.cross_entropy(m(b[0]), b[1]))


@CASES.add("weight_penalty")
def weight_penalty() -> Work:
    """A penalty on the weights beside the mean: splits rightly."""
    return on_labels(
        lambda m, b: (
            F.cross_entropy(m(b[0]), b[1]) + 1e-3 * sum(p.square().sum() for p in m.parameters())
        )
    )


@CASES.add("worst_example")
def worst_example() -> Work:
    """The largest loss of the batch."""
    return on_labels(lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="none").max())


@CASES.add("trimmed_mean")
def trimmed_mean() -> Work:
    """The smaller half of the batch's losses."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        each = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return each.sort().values[: len(each) // 2 + 1].mean()

    return on_labels(loss)


@CASES.add("root_of_mean")
def root_of_mean() -> Work:
    """A root of the mean."""
    return on_labels(lambda m, b: F.mse_loss(m(b[0])[:, 0], b[1].float()).sqrt())


@CASES.add("distillation_batchmean")
def distillation_batchmean() -> Work:
    """KL divergence divided by the first dimension."""
    teacher = network().requires_grad_(False)
    return on_labels(
        lambda m, b: F.kl_div(
            m(b[0]).log_softmax(-1), teacher(b[0]).softmax(-1), reduction="batchmean"
        )
    )


@CASES.add("normalised_advantages")
def normalised_advantages() -> Work:
    """Weights normalised over the batch, as PPO does."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        gain = batch[1].float()
        gain = (gain - gain.mean()) / (gain.std() + 1e-6)
        return -(model(batch[0]).log_softmax(-1)[:, 0] * gain).mean()

    return on_labels(loss)


@CASES.add("correlation")
def correlation() -> Work:
    """Pearson's correlation over the batch."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return -torch.corrcoef(torch.stack([model(batch[0])[:, 0], batch[1].float()]))[0, 1]

    return on_labels(loss)


@CASES.add("neighbours_of_batch")
def neighbours_of_batch() -> Work:
    """Neighbours in the batch are to be alike."""
    return on_labels(lambda m, b: m(b[0]).diff(dim=0).square().mean())


@CASES.add("huber_and_cosine")
def huber_and_cosine() -> Work:
    """Two means over examples: splits rightly."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        found = model(batch[0])
        wanted = F.one_hot(batch[1], CLASSES).float()
        return F.huber_loss(found, wanted) + (1 - F.cosine_similarity(found, wanted)).mean()

    return on_labels(loss)


@CASES.add("segmentation_ignored")
def segmentation_ignored() -> Work:
    """A mean over labelled pixels."""
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.GELU(), nn.Conv2d(16, CLASSES, 1)
    )
    labels = torch.randint(0, CLASSES, (EXAMPLES, 8, 8))
    labels[: EXAMPLES // 2, :6] = 255
    batch = (torch.randn(EXAMPLES, 3, 8, 8), labels)
    return Work(model, batch, lambda m, b: F.cross_entropy(m(b[0]), b[1], ignore_index=255))


@CASES.add("soft_labels")
def soft_labels() -> Work:
    """Labels as probabilities: splits rightly."""
    batch = (torch.randn(EXAMPLES, FEATURES), torch.rand(EXAMPLES, CLASSES).softmax(-1))
    return Work(network(width=WIDTH), batch, lambda m, b: F.cross_entropy(m(b[0]), b[1]))


@CASES.add("large_vocabulary")
def large_vocabulary() -> Work:
    """Logits that only the loss reads, some labels ignored."""
    model = nn.Sequential(nn.Embedding(600, 32), nn.LayerNorm(32), nn.Linear(32, 600, bias=False))
    tokens = torch.randint(0, 600, (EXAMPLES, LENGTH))
    labels = torch.where(torch.rand(tokens.shape) < 0.3, IGNORED, tokens)
    return Work(
        model, (tokens, labels), lambda m, b: F.cross_entropy(m(b[0]).flatten(0, 1), b[1].flatten())
    )
