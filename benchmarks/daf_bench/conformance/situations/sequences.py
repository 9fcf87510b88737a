"""Batches whose first dimension is no example's, and batches that are no tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import rnn

from daf_bench.conformance.case import CaseList, Work
from daf_bench.conformance.situations.building import (
    CLASSES,
    EXAMPLES,
    FEATURES,
    WIDTH,
    classified,
    network,
)

CASES = CaseList()
LENGTH = 20


class Recurrent(nn.Module):
    """An LSTM that reads a sequence to its end: to scores [N, classes]."""

    def __init__(self, *, batch_first: bool, kind: Callable[..., nn.Module] = nn.LSTM) -> None:
        super().__init__()
        self.into = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.LayerNorm(WIDTH), nn.GELU())
        self.rnn = kind(WIDTH, 32, batch_first=batch_first)
        self.out, self.last = nn.Linear(32, CLASSES), (slice(None), -1) if batch_first else -1

    def forward(self, sequences: Tensor) -> Tensor:
        """Return scores."""
        states = self.rnn(self.into(sequences))[0]
        scores: Tensor = self.out(states[self.last])
        return scores


def random_labels(examples: int = EXAMPLES) -> Tensor:
    """Return class labels [N]."""
    return torch.randint(0, CLASSES, (examples,))


@CASES.add("time_major_lstm")
def time_major_lstm() -> Work:
    """``nn.LSTM``'s own default."""
    batch = (torch.randn(LENGTH, EXAMPLES, FEATURES), random_labels())
    return Work(Recurrent(batch_first=False), batch, classified)


@CASES.add("time_major_square")
def time_major_square() -> Work:
    """As many steps as examples: nothing shows which is which but the mathematics."""
    batch = (torch.randn(EXAMPLES, EXAMPLES, FEATURES), random_labels())
    return Work(Recurrent(batch_first=False, kind=nn.GRU), batch, classified)


@CASES.add("batch_first_gru")
def batch_first_gru() -> Work:
    """Splits rightly."""
    batch = (torch.randn(EXAMPLES, LENGTH, FEATURES), random_labels())
    return Work(Recurrent(batch_first=True, kind=nn.GRU), batch, classified)


@CASES.add("time_major_transformer")
def time_major_transformer() -> Work:
    """``nn.TransformerEncoderLayer``'s own default, a mean over time and examples."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0)
    model = nn.Sequential(nn.Linear(FEATURES, 64), layer, nn.Linear(64, CLASSES))
    batch = (torch.randn(LENGTH, EXAMPLES, FEATURES), torch.randint(0, CLASSES, (LENGTH, EXAMPLES)))
    return Work(model, batch, lambda m, b: F.cross_entropy(m(b[0]).flatten(0, 1), b[1].flatten()))


@CASES.add("time_major_padding_mask")
def time_major_padding_mask() -> Work:
    """Time-major sequences beside a batch-major mask."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into = nn.Linear(FEATURES, 64)
            self.layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0)
            self.out = nn.Linear(64, CLASSES)

        def forward(self, sequences: Tensor, padding: Tensor) -> Tensor:
            states = self.layer(self.into(sequences), src_key_padding_mask=padding)
            return self.out(states[0])

    padding = torch.arange(LENGTH)[None] >= torch.randint(4, LENGTH, (EXAMPLES, 1))
    batch = (torch.randn(LENGTH, EXAMPLES, FEATURES), padding, random_labels())
    return Work(Masked(), batch, lambda m, b: F.cross_entropy(m(b[0], b[1]), b[2]))


def _ragged(least: int = 3) -> list[Tensor]:
    return [torch.randn(n, FEATURES) for n in torch.randint(least, LENGTH, (EXAMPLES,)).tolist()]


def _listed(model: nn.Module, batch: Any) -> Tensor:
    scores = torch.stack([model(each)[-1] for each in batch[0]])
    return F.cross_entropy(scores, batch[1])


@CASES.add("list_of_sequences")
def list_of_sequences() -> Work:
    """Tensors of different lengths."""
    return Work(network(), (_ragged(), random_labels()), _listed)


@CASES.add("list_of_equal_sequences")
def list_of_equal_sequences() -> Work:
    """Tensors of one length in a list: their first dimension is time."""
    sequences = [torch.randn(LENGTH, FEATURES) for _ in range(EXAMPLES)]
    return Work(network(), (sequences, random_labels()), _listed)


@CASES.add("list_as_long_as_sequences")
def list_as_long_as_sequences() -> Work:
    """As many sequences as steps in each."""
    sequences = [torch.randn(EXAMPLES, FEATURES) for _ in range(EXAMPLES)]
    return Work(network(), (sequences, random_labels()), _listed)


@CASES.add("packed_sequence")
def packed_sequence() -> Work:
    """A packed sequence, a named tuple of flat steps and batch sizes."""

    class Packed(Recurrent):
        def forward(self, sequences: Any) -> Tensor:
            steps = self.into(sequences.data)
            packed = rnn.PackedSequence(steps, *sequences[1:])
            return self.out(self.rnn(packed)[1][0][0])

    packed = rnn.pack_sequence(_ragged(), enforce_sorted=False)
    return Work(Packed(batch_first=False), (packed, random_labels()), classified)


@CASES.add("padded_with_lengths")
def padded_with_lengths() -> Work:
    """Padded sequences and their lengths, packed by the model."""

    class Lengths(Recurrent):
        def forward(self, sequences: Any) -> Tensor:
            steps, lengths = self.into(sequences[0]), sequences[1]
            packed = rnn.pack_padded_sequence(steps, lengths, True, enforce_sorted=False)
            return self.out(self.rnn(packed)[1][0][0])

    sequences = _ragged()
    padded = rnn.pad_sequence(sequences, batch_first=True)
    lengths = torch.tensor([len(each) for each in sequences])
    return Work(Lengths(batch_first=True), ((padded, lengths), random_labels()), classified)


@CASES.add("nested_jagged")
def nested_jagged() -> Work:
    """A jagged nested tensor."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return model(batch.values()).square().mean()

    return Work(network(), torch.nested.nested_tensor(_ragged(), layout=torch.jagged), loss)


class GraphNetwork(nn.Module):
    """Nodes and edges to scores of nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        """Return scores [nodes, classes]."""
        for layer in self.layers:
            sent = layer(nodes)
            nodes = F.gelu(torch.zeros_like(sent).index_add(0, edges[1], sent[edges[0]]) + sent)
        scores: Tensor = self.out(self.norm(nodes))
        return scores


@CASES.add("graph")
def graph() -> Work:
    """One graph: nodes, edges, labels of nodes."""
    edges = torch.randint(0, 40, (2, 90))
    batch = (torch.randn(40, FEATURES), edges, random_labels(40))
    return Work(GraphNetwork(), batch, lambda m, b: F.cross_entropy(m(b[0], b[1]), b[2]))


@CASES.add("graph_edges_first")
def graph_edges_first() -> Work:
    """As many edges as nodes, edges as rows."""
    batch = {
        "edges": torch.randint(0, 40, (40, 2)),
        "x": torch.randn(40, FEATURES),
        "y": random_labels(40),
    }
    return Work(
        GraphNetwork(), batch, lambda m, b: F.cross_entropy(m(b["x"], b["edges"].t()), b["y"])
    )


@CASES.add("graphs_pooled")
def graphs_pooled() -> Work:
    """Several graphs as one, and whose each node is."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        nodes, edges, owner, labels = batch
        scores = model(nodes, edges)
        pooled = torch.zeros(len(labels), CLASSES).index_add(0, owner, scores)
        return F.cross_entropy(pooled, labels)

    owner = torch.arange(48) // 6
    edges = torch.arange(48).repeat(2, 1)
    edges[1] = owner * 6 + (edges[1] + 1) % 6
    return Work(GraphNetwork(), (torch.randn(48, FEATURES), edges, owner, random_labels(8)), loss)


@CASES.add("detection_targets")
def detection_targets() -> Work:
    """Images of several sizes, and a list of dictionaries of boxes."""

    class Boxes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(
                nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.GELU(), nn.Conv2d(16, 4, 3)
            )

        def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]]) -> Tensor:
            found = [self.body(image[None]).mean((2, 3)) for image in images]
            return torch.cat(
                [F.l1_loss(f.expand_as(t["boxes"]), t["boxes"], reduction="none").mean(1)
                 for f, t in zip(found, targets, strict=True)]
            ).mean()  # fmt: skip

    images = [torch.randn(3, 12 + place, 16) for place in range(6)]
    targets = [
        {"boxes": torch.rand(1 + place % 3, 4), "labels": random_labels(1 + place % 3)}
        for place in range(6)
    ]
    return Work(Boxes(), (images, targets), lambda m, b: m(*b))
