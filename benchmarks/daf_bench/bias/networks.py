"""Small networks that hold whatever is coded: activations, norms, sparse rows, recurrences, losses.

Each is named, and built with its batch from the random state as it is; ``build`` returns a module
and a tensor. A network that returns no scalar has a fixed random one taken of its result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, WIDE, ROWS = 256, 1024, 64
OUTLIERS = (1e3, 1e5)  # times the other channels
Build = Callable[[], tuple[nn.Module, Tensor]]


class Then(nn.Module):
    """A module, then a function of its result."""

    def __init__(self, inner: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.function = inner, function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.inner(x))


class First(nn.Module):
    """The first of what a recurrent module returns."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x)[0]
        return found


class Attention(nn.Module):
    """Self-attention of four heads by ``scaled_dot_product_attention``."""

    def __init__(self, width: int, *, masked: bool) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.masked = masked

    def forward(self, x: Tensor) -> Tensor:
        heads = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.into(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(*heads, is_causal=self.masked)
        found: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return found


class Gated(nn.Module):
    """The gate of a Llama's feed-forward layer: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, width: int, wide: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, wide), nn.Linear(width, wide)
        self.down = nn.Linear(wide, width)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return found


def one_hot(h: Tensor) -> Tensor:
    """One of all: a gate, a bag of words; the zero keeps the layer before it in the graph."""
    return F.one_hot(h.argmax(1), h.shape[1]).float() + 0 * h


def top(h: Tensor, *, count: int) -> Tensor:
    """The ``count`` largest of a row, zero elsewhere."""
    found = h.topk(count)
    return torch.zeros_like(h).scatter(1, found.indices, found.values)


def by_hand_softmax(h: Tensor) -> Tensor:
    """A softmax of a user's own."""
    powers = (h - h.amax(-1, keepdim=True)).exp()
    return powers / powers.sum(-1, keepdim=True)


class GatedByNeighbours(nn.Module):
    """Pixels times a depthwise convolution of themselves, as in Visual Attention Networks."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gate = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x * self.gate(x)
        return found


def _rows(*layers: nn.Module, width: int = WIDTH) -> tuple[nn.Module, Tensor]:
    return nn.Sequential(*layers), torch.randn(ROWS, width)


def _activation(make: Callable[[], nn.Module]) -> tuple[nn.Module, Tensor]:
    norm, first, last = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDE), nn.Linear(WIDE, WIDTH)
    return _rows(norm, first, make(), last)


def _function(function: Callable[[Tensor], Tensor], width: int = 512) -> tuple[nn.Module, Tensor]:
    before = Then(nn.Linear(width, width), function)
    return _rows(before, nn.Linear(width, width), width=width)


def _sparse_relu() -> tuple[nn.Module, Tensor]:
    """A layer behind a ReLU that lets 2 % through."""
    before = nn.Linear(WIDTH, WIDE)
    nn.init.constant_(before.bias, -2.05 * WIDTH**0.5 * (1 / (3 * WIDTH)) ** 0.5)
    return _rows(before, nn.ReLU(), nn.Linear(WIDE, WIDTH))


def _norm(make: Callable[[], nn.Module], outlier: float = 1.0) -> tuple[nn.Module, Tensor]:
    """A normalisation of rows between layers; two channels are ``outlier`` times larger."""
    before = nn.Linear(WIDTH, WIDE)
    with torch.no_grad():
        before.weight[[3, 600]] *= outlier
    return _rows(before, make(), nn.Linear(WIDE, WIDTH))


def _images(*layers: nn.Module, channels: int = 16) -> tuple[nn.Module, Tensor]:
    head = nn.Sequential(nn.Flatten(), nn.LazyLinear(32))
    model = nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), *layers, head)
    x = torch.randn(16, 3, 16, 16)
    model(x)
    return model, x


def _convolved(*between: nn.Module, groups: int = 1) -> tuple[nn.Module, Tensor]:
    return _images(*between, nn.Conv2d(16, 16, 3, padding=1, groups=groups))


def _image_norm(make: Callable[[], nn.Module], outlier: float) -> tuple[nn.Module, Tensor]:
    model, x = _convolved(make())
    with torch.no_grad():
        model[0].weight[[3, 9]] *= outlier
    return model, x


def _sequence(make: Callable[[], nn.Module]) -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(64, 64), make(), nn.Linear(64, 64)), torch.randn(16, 32, 64)


def _words(make: Callable[[], nn.Module]) -> tuple[nn.Module, Tensor]:
    return make(), torch.randint(0, 500, (ROWS, 16))


def _loss(function: Callable[[Tensor], Tensor], outputs: int = 512) -> tuple[nn.Module, Tensor]:
    first, last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, outputs)
    return Then(nn.Sequential(first, nn.ReLU(), last), function), torch.randn(ROWS, WIDTH)


def _classes(y: Tensor) -> Tensor:
    return torch.arange(len(y)) % y.shape[1]


ACTIVATIONS: Mapping[str, Callable[[], nn.Module]] = MappingProxyType(
    {
        "gelu": nn.GELU,
        "gelu_tanh": partial(nn.GELU, approximate="tanh"),
        "silu": nn.SiLU,
        "mish": nn.Mish,
        "hardswish": nn.Hardswish,
        "sigmoid": nn.Sigmoid,
        "tanh": nn.Tanh,
        "softplus": nn.Softplus,
        "elu": nn.ELU,
        "selu": nn.SELU,
        "celu": nn.CELU,
    }
)
_ROW_NORMS: Mapping[str, Callable[[], nn.Module]] = MappingProxyType(
    {
        "layer_norm": partial(nn.LayerNorm, WIDE),
        "rms_norm": partial(nn.RMSNorm, WIDE),
        "batch_norm_rows": partial(nn.BatchNorm1d, WIDE),
    }
)
_IMAGE_NORMS: Mapping[str, Callable[[], nn.Module]] = MappingProxyType(
    {
        "batch_norm": partial(nn.BatchNorm2d, 16),
        "group_norm": partial(nn.GroupNorm, 4, 16),
        "instance_norm": partial(nn.InstanceNorm2d, 16, affine=True),
    }
)


def _plain_networks() -> dict[str, Build]:
    return {
        **{name: partial(_activation, make) for name, make in ACTIVATIONS.items()},
        **{name: partial(_norm, make) for name, make in _ROW_NORMS.items()},
        **{name: partial(_image_norm, make, 1.0) for name, make in _IMAGE_NORMS.items()},
        "relu": lambda: _activation(nn.ReLU),
        "sparse_relu": _sparse_relu,
        "one_hot": lambda: _function(one_hot),
        "top_8": lambda: _function(partial(top, count=8)),
        "top_32": lambda: _function(partial(top, count=32)),
        "softmax": lambda: _function(partial(torch.softmax, dim=-1)),
        "cube": lambda: _function(lambda h: h * h * h),
        "fourth_power": lambda: _function(lambda h: h * h * h * h),
        "polynomial": lambda: _function(lambda h: 1 + h + h * h / 2 + h * h * h / 6),
        "softmax_by_hand": lambda: _function(by_hand_softmax),
        "unit_rows": lambda: _function(F.normalize),
        "gated": lambda: _rows(nn.RMSNorm(WIDTH), Gated(WIDTH, WIDE)),
        "attention": lambda: _sequence(lambda: Attention(64, masked=False)),
        "causal_attention": lambda: _sequence(lambda: Attention(64, masked=True)),
        "convolution": lambda: _convolved(nn.ReLU()),
        "convolution_gelu": lambda: _convolved(nn.GELU()),
        "depthwise": lambda: _convolved(nn.ReLU(), groups=16),
        "gated_by_neighbours": lambda: _convolved(GatedByNeighbours(16)),
        "max_pool": lambda: _convolved(nn.ReLU(), nn.MaxPool2d(2)),
        "average_pool": lambda: _convolved(nn.ReLU(), nn.AvgPool2d(2)),
        "lstm": lambda: _sequence(lambda: First(nn.LSTM(64, 64, batch_first=True))),
        "gru": lambda: _sequence(lambda: First(nn.GRU(64, 64, batch_first=True))),
        "embedding": lambda: _words(
            lambda: nn.Sequential(nn.Embedding(500, 64), nn.Linear(64, 64), nn.GELU(), nn.Flatten())
        ),
        "embedding_bag": lambda: _words(
            lambda: nn.Sequential(nn.EmbeddingBag(500, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        ),
        "cross_entropy": lambda: _loss(lambda y: F.cross_entropy(y, _classes(y))),
        "squared_error": lambda: _loss(lambda y: F.mse_loss(y, torch.ones_like(y))),
        "binary_cross_entropy": lambda: _loss(
            lambda y: F.binary_cross_entropy_with_logits(y, (y.detach() > 0.3).float())
        ),
    }


def outlier_networks() -> dict[str, Build]:
    """Return networks with channels that are outliers throughout, before a normalisation."""
    return {
        f"{name}_{outlier:.0e}".replace("+0", ""): partial(make, kind, outlier)
        for make, kinds in ((_norm, _ROW_NORMS), (_image_norm, _IMAGE_NORMS))
        for name, kind in kinds.items()
        for outlier in OUTLIERS
    }


NETWORKS: Mapping[str, Build] = MappingProxyType(_plain_networks() | outlier_networks())
