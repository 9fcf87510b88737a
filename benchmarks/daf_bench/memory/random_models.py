"""Small models drawn at random: three families, every size and choice following from one seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

_CLASSES = 10
_PIXELS = 32
_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-4),
}
_ACTIVATIONS = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU}


@dataclass(frozen=True, slots=True)
class Drawn:
    """A model, its batch and its optimizer, in a few words and numbers.

    ``width`` is features or channels; ``length`` the words of a sentence, where there are any.
    ``batch_statistics`` forbids that the batch be split.
    """

    family: str
    depth: int
    width: int
    length: int
    batch_size: int
    dropout: float
    activation: str
    batch_statistics: bool
    optimizer: str
    seed: int


def draw(seed: int) -> Drawn:
    """What this seed names; activations of some 20 to 200 MB."""
    random = np.random.default_rng([seed, 0x5EED])
    family = str(random.choice(["mlp", "conv", "transformer"]))
    widths, batches, depths = {
        "mlp": ((256, 1024), (1024, 3072), (3, 8)),
        "conv": ((16, 48), (24, 64), (3, 7)),
        "transformer": ((64, 192), (12, 32), (2, 4)),
    }[family]
    return Drawn(
        family=family,
        depth=int(random.integers(*depths, endpoint=True)),
        # Heads of attention divide it.
        width=16 * int(random.integers(widths[0] // 16, widths[1] // 16, endpoint=True)),
        length=int(random.integers(48, 96, endpoint=True)),
        batch_size=int(random.integers(*batches, endpoint=True)),
        dropout=float(random.choice([0.0, 0.1, 0.3])),
        activation=str(random.choice(list(_ACTIVATIONS))),
        batch_statistics=bool(family != "transformer" and random.random() < 0.4),
        optimizer=str(random.choice(list(_OPTIMIZERS))),
        seed=seed,
    )


@dataclass(frozen=True, slots=True)
class Built:
    """What a step takes."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: tuple[Tensor, Tensor]

    @staticmethod
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Mean cross-entropy (nats)."""
        inputs, labels = batch
        return F.cross_entropy(model(inputs), labels)


def build(drawn: Drawn) -> Built:
    """The model with random weights, and one batch of noise."""
    torch.manual_seed(drawn.seed)
    model = _FAMILIES[drawn.family](drawn)
    labels = torch.randint(0, _CLASSES, (drawn.batch_size,))
    batch = torch.randn(drawn.batch_size, *_shape(drawn)), labels
    return Built(model, _OPTIMIZERS[drawn.optimizer](model.parameters()), batch)


def described(drawn: Drawn) -> dict[str, Any]:
    """The same as plain values, for rows."""
    return asdict(drawn)


def _shape(drawn: Drawn) -> tuple[int, ...]:
    shapes = {
        "mlp": (drawn.width,),
        "conv": (3, _PIXELS, _PIXELS),
        "transformer": (drawn.length, drawn.width),
    }
    return shapes[drawn.family]


def _mlp(drawn: Drawn) -> nn.Module:
    norm = nn.BatchNorm1d if drawn.batch_statistics else nn.LayerNorm
    parts = [
        part
        for _ in range(drawn.depth)
        for part in (
            nn.Linear(drawn.width, drawn.width),
            norm(drawn.width),
            _ACTIVATIONS[drawn.activation](),
            nn.Dropout(drawn.dropout),
        )
    ]
    return nn.Sequential(*parts, nn.Linear(drawn.width, _CLASSES))


def _conv(drawn: Drawn) -> nn.Module:
    parts: list[nn.Module] = []
    for place in range(drawn.depth):
        channels = drawn.width if place else 3
        parts += [
            nn.Conv2d(channels, drawn.width, 3, padding=1),
            nn.BatchNorm2d(drawn.width) if drawn.batch_statistics else nn.GroupNorm(4, drawn.width),
            _ACTIVATIONS[drawn.activation](),
        ]
        if place == drawn.depth // 2:
            parts.append(nn.MaxPool2d(2))
    pooled = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(drawn.dropout))
    return nn.Sequential(*parts, *pooled, nn.Linear(drawn.width, _CLASSES))


class _Encoder(nn.Module):
    """Sentences [N, length, width] to class scores [N, classes]."""

    def __init__(self, drawn: Drawn) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                drawn.width,
                nhead=4,
                dim_feedforward=4 * drawn.width,
                dropout=drawn.dropout,
                activation=_ACTIVATIONS[drawn.activation](),
                batch_first=True,
                norm_first=True,
            )
            for _ in range(drawn.depth)
        )
        self.head = nn.Linear(drawn.width, _CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        scores: Tensor = self.head(x.mean(1))
        return scores


_FAMILIES: dict[str, Callable[[Drawn], nn.Module]] = {
    "mlp": _mlp,
    "conv": _conv,
    "transformer": _Encoder,
}
