"""Batches in containers of any kind, states carried between batches, and changing lengths."""

from __future__ import annotations

import dataclasses
from collections import UserDict
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf_bench.conformance.case import CaseList, Loss, Work
from daf_bench.conformance.situations.building import (
    CLASSES,
    EXAMPLES,
    FEATURES,
    WIDTH,
    classified,
    labelled,
    network,
)
from daf_bench.conformance.situations.sequences import random_labels

CASES = CaseList()
LENGTH = 20


class OwnBatch:
    """A batch of a class that no library knows."""

    def __init__(self, features: Tensor, labels: Tensor) -> None:
        self.features, self.labels = features, labels


@dataclasses.dataclass(frozen=True)
class Sample:
    """A batch as a dataclass."""

    features: Tensor
    labels: Tensor
    name: str = "training"


class Pair(NamedTuple):
    """A batch as a named tuple."""

    features: Tensor
    labels: Tensor


class Encoding(UserDict[str, Tensor]):
    """A mapping with attributes, as tokenizers return."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError as error:
            raise AttributeError(name) from error


def _by_attribute(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch.features), batch.labels)


@CASES.add("own_class")
def own_class() -> Work:
    """An object with tensors inside."""
    return Work(network(), OwnBatch(*labelled()), _by_attribute)


@CASES.add("dataclass")
def dataclass_batch() -> Work:
    """A frozen dataclass: splits rightly."""
    return Work(network(), Sample(*labelled()), _by_attribute)


@CASES.add("named_tuple")
def named_tuple() -> Work:
    """A named tuple: splits rightly."""
    return Work(network(), Pair(*labelled()), _by_attribute)


@CASES.add("encoding")
def encoding() -> Work:
    """A mapping of one's own: splits rightly."""
    batch = Encoding(zip(("features", "labels"), labelled(), strict=True))
    return Work(network(), batch, _by_attribute)


def _dictionary(**more: Any) -> dict[str, Any]:
    features, labels = labelled()
    return {**more, "x": features, "y": labels}


def _by_name(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


@CASES.add("strings_beside")
def strings_beside() -> Work:
    """Names and None beside tensors."""
    batch = _dictionary(name=["a"] * EXAMPLES, extra=None, epoch=3)
    return Work(network(), batch, _by_name)


@CASES.add("scalar_first")
def scalar_first() -> Work:
    """A number as a tensor comes first."""
    batch = _dictionary(scale=torch.tensor(2.0))
    return Work(network(), batch, lambda m, b: b["scale"] * _by_name(m, b))


@CASES.add("indices_first")
def indices_first() -> Work:
    """A tensor of another length comes first."""
    batch = _dictionary(shared=torch.randn(5))
    return Work(network(), batch, lambda m, b: b["shared"].square().mean() * _by_name(m, b))


@CASES.add("no_tensor")
def no_tensor() -> Work:
    """The batch is a number, data are made in the loss."""
    features, labels = labelled()
    return Work(network(), 7, lambda m, b: F.cross_entropy(m(features * b), labels))


@CASES.add("single_example")
def single_example() -> Work:
    """A batch of one."""
    return Work(network(), labelled(1), classified)


@CASES.add("wide_examples")
def wide_examples() -> Work:
    """A long first dimension that is features, labels of another length."""
    batch = (torch.randn(FEATURES, EXAMPLES), random_labels())
    return Work(network(), batch, lambda m, b: F.cross_entropy(m(b[0].t()), b[1]))


class Attention(nn.Module):
    """Attention with a mask of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(FEATURES, 3 * 64), nn.Linear(64, CLASSES)

    def forward(self, sequences: Tensor, mask: Tensor) -> Tensor:
        """Return scores of each position."""
        query, key, value = self.into(sequences).chunk(3, -1)
        scores: Tensor = self.out(F.scaled_dot_product_attention(query, key, value, mask))
        return scores


@CASES.add("position_mask_as_long_as_batch")
def position_mask_as_long_as_batch() -> Work:
    """A mask over positions, as many as examples."""
    batch = {
        "x": torch.randn(EXAMPLES, EXAMPLES, FEATURES),
        "mask": torch.tril(torch.ones(EXAMPLES, EXAMPLES, dtype=torch.bool)),
        "y": torch.randint(0, CLASSES, (EXAMPLES, EXAMPLES)),
    }
    return Work(Attention(), batch, lambda m, b: F.cross_entropy(m(b["x"], b["mask"]).mT, b["y"]))


@CASES.add("shared_positions")
def shared_positions() -> Work:
    """Positions [1, length] beside examples: splits rightly."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch["x"] + batch["positions"]).mT, batch["y"])

    batch = {
        "x": torch.randn(EXAMPLES, LENGTH, FEATURES),
        "positions": torch.randn(1, LENGTH, FEATURES),
        "y": torch.randint(0, CLASSES, (EXAMPLES, LENGTH)),
    }
    return Work(network(), batch, loss)


class Stateful(nn.Module):
    """An LSTM that goes on from the states of the batch before."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(FEATURES, 64, batch_first=True), nn.Linear(64, CLASSES)
        self.states: tuple[Tensor, ...] | None = None

    def forward(self, sequences: Tensor) -> Tensor:
        """Return scores of the last step."""
        found, states = self.rnn(sequences, self.states)
        self.states = tuple(each.detach() for each in states)
        scores: Tensor = self.out(found[:, -1])
        return scores


@CASES.add("stateful_lstm")
def stateful_lstm() -> Work:
    """States are carried from step to step in attributes."""
    model = Stateful()
    batch = (torch.randn(EXAMPLES, LENGTH, FEATURES), random_labels())
    return Work(model, batch, classified, carried=lambda: model.states)


class Remembering(nn.Module):
    """Attention over the batch before too (Transformer-XL)."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.norm = nn.Linear(FEATURES, 64), nn.LayerNorm(64)
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)
        self.out = nn.Linear(64, CLASSES)
        self.memory: Tensor | None = None

    def forward(self, sequences: Tensor) -> Tensor:
        """Return scores of the last step."""
        states = self.norm(self.into(sequences))
        seen = states if self.memory is None else torch.cat([self.memory, states], 1)
        self.memory = states.detach()
        scores: Tensor = self.out(self.attention(states, seen, seen)[0][:, -1])
        return scores


@CASES.add("transformer_memory")
def transformer_memory() -> Work:
    """A memory of the batch before."""
    model = Remembering()
    batch = (torch.randn(EXAMPLES, LENGTH, FEATURES), random_labels())
    return Work(model, batch, classified, carried=lambda: model.memory)


@CASES.add("key_value_cache")
def key_value_cache() -> Work:
    """A cache that grows within one forward pass, step by step."""

    class Cached(Remembering):
        def forward(self, sequences: Tensor) -> Tensor:
            keys: list[Tensor] = []
            for step in range(4):
                state = self.norm(self.into(sequences[:, step : step + 1]))
                keys.append(state)
                seen = torch.cat(keys, 1)
                state = self.attention(state, seen, seen)[0]
            return self.out(state[:, -1])

    return Work(Cached(), (torch.randn(EXAMPLES, 4, FEATURES), random_labels()), classified)


@CASES.add("states_in_the_loss")
def states_in_the_loss() -> Work:
    """The loop carries states, and the loss function closes over them."""
    cell, kept = nn.GRUCell(FEATURES, WIDTH), [torch.zeros(EXAMPLES, WIDTH)]
    model = nn.ModuleDict({"cell": cell, "out": network(WIDTH)})

    def loss(model: Any, batch: Any) -> Tensor:
        state = model["cell"](batch[0], kept[0])
        kept[0] = state.detach()
        return F.cross_entropy(model["out"](state), batch[1])

    return Work(model, labelled(), loss, carried=lambda: kept[0])


def _lengths(lengths: list[int]) -> Work:
    batches = [
        (torch.randn(EXAMPLES, n, FEATURES), torch.randint(0, CLASSES, (EXAMPLES, n)))
        for n in lengths
    ]
    loss: Loss = lambda m, b: F.cross_entropy(m(b[0]).mT, b[1])  # noqa: E731
    return Work(network(), batches[0], loss, more=batches[1:])


@CASES.add("growing_lengths")
def growing_lengths() -> Work:
    """Each batch longer than the one before."""
    return _lengths([8, 10, 13, 17, 22])


@CASES.add("shuffled_lengths")
def shuffled_lengths() -> Work:
    """The longest batch is neither first nor last."""
    return _lengths([13, 8, 22, 10, 17])


@CASES.add("shorter_last_batch")
def shorter_last_batch() -> Work:
    """Fewer examples now and then."""
    return Work(network(), labelled(), classified, more=[labelled(), labelled(5), labelled(7)])


@CASES.add("bytes_and_flags")
def bytes_and_flags() -> Work:
    """Images as bytes and a boolean mask: splits rightly."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0].float() / 255 * batch[1]), batch[2])

    pixels = torch.randint(0, 256, (EXAMPLES, FEATURES), dtype=torch.uint8)
    return Work(network(), (pixels, torch.rand(EXAMPLES, FEATURES) < 0.8, random_labels()), loss)


@CASES.add("ragged_by_offsets")
def ragged_by_offsets() -> Work:
    """An embedding bag's flat indices and offsets."""

    def loss(model: Any, batch: Any) -> Tensor:
        return F.cross_entropy(model["out"](model["bag"](batch[0], batch[1])), batch[2])

    model = nn.ModuleDict({"bag": nn.EmbeddingBag(60, 64), "out": network(64)})
    offsets = torch.arange(0, 3 * EXAMPLES, 3)
    return Work(model, (torch.randint(0, 60, (3 * EXAMPLES,)), offsets, random_labels()), loss)
