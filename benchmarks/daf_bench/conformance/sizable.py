"""Models whose steps take a while: what proofs cost, and training within a tight budget."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf_bench.conformance.case import Case, Work

BATCH, LENGTH, WORDS, CLASSES, WIDTH, WIDE = 16, 64, 1000, 10, 256, 2048


def sizable_cases() -> list[Case]:
    """Return a case for each model, at a batch of 16."""
    return [
        Case(f"sizable/{name}/{size}", partial(build, size), is_sizable=True)
        for name, build in _BUILDERS.items()
        for size in (BATCH,)
    ]


def _of_words(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def _of_examples(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def _words(size: int) -> tuple[Tensor, Tensor]:
    words = torch.randint(0, WORDS, (2, size, LENGTH))
    return words[0], words[1]


def _images(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 3, 32, 32), torch.randint(0, CLASSES, (size,))


def _encoder(size: int, dropout: float = 0.1, layers: int = 4, width: int = WIDTH) -> Work:
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout, batch_first=True)
    encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    model = nn.Sequential(nn.Embedding(WORDS, width), encoder, nn.Linear(width, WORDS))
    return Work(model, _words(size), _of_words)


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.cells = nn.LSTM(WIDTH, 2 * WIDTH, num_layers=2, batch_first=True)
        self.last = nn.Linear(2 * WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = self.last(self.cells(self.words(words))[0])
        return scores


def _recurrent(size: int) -> Work:
    return Work(_Recurrent(), _words(size), _of_words)


def _convolutions(norm: Callable[[int], nn.Module], size: int) -> Work:
    layers: list[nn.Module] = []
    for channels in (3, 64, 64, 64):
        layers += [nn.Conv2d(channels, 64, 3, padding=1), norm(64), nn.ReLU()]
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES))
    return Work(nn.Sequential(*layers, *head), _images(size), _of_examples)


def _perceptron(size: int) -> Work:
    layers = [each for _ in range(4) for each in (nn.Linear(768, 768), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(768, CLASSES))
    batch = (torch.randn(size, LENGTH, 768), torch.randint(0, CLASSES, (size, LENGTH)))
    return Work(model, batch, _of_words)


def _wide_perceptron(size: int) -> Work:
    """Return a model whose steps take as long as its weights do to read."""
    layers = [each for _ in range(6) for each in (nn.Linear(WIDE, WIDE), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(WIDE, CLASSES))
    return Work(model, (torch.randn(size, WIDE), torch.randint(0, CLASSES, (size,))), _of_examples)


def _patches(size: int) -> Work:
    layer = nn.TransformerEncoderLayer(192, 3, 768, 0.0, "gelu", batch_first=True, norm_first=True)
    model = nn.Sequential(
        *(nn.Conv2d(3, 192, 4, 4), nn.Flatten(2), _Transposed()),
        *(nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), nn.LayerNorm(192)),
        *(nn.Flatten(1), nn.Linear(64 * 192, CLASSES)),
    )
    return Work(model, _images(size), _of_examples)


class _Transposed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


_BUILDERS: dict[str, Callable[[int], Work]] = {
    "encoder": _encoder,
    "encoder_without_dropout": partial(_encoder, dropout=0.0),
    "deep_encoder": partial(_encoder, layers=12, width=128),
    "lstm": _recurrent,
    "group_norm": partial(_convolutions, partial(nn.GroupNorm, 8)),
    "batch_norm": partial(_convolutions, nn.BatchNorm2d),
    "perceptron": _perceptron,
    "wide_perceptron": _wide_perceptron,
    "vision_transformer": _patches,
}
