"""The operators that are timed alone: W1's layers, and those of BERT-small at batch 64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf.operators.chunked.cross_entropy import chunked_cross_entropy

Box = list[Tensor]  # inputs are taken out of it, so that nobody else holds them


class _End(torch.autograd.Function):
    """What follows the operator: gives its result a gradient that nobody else holds."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, gradients: list[Tensor]) -> Tensor:
        if not gradients:
            same = torch.Generator().manual_seed(1)  # for every contestant
            gradients.append(torch.empty_like(result).normal_(generator=same))
        ctx.gradients = gradients
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, _gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.gradients.pop(), None


class Ended(nn.Module):
    """An operator and what follows it, so that its result outlives no step."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, box: Box, gradients: list[Tensor]) -> Tensor:
        """A scalar; ``gradients``: that of the result, or nothing yet, and then it is added."""
        end: Tensor = _End.apply(self.inner(box), gradients)  # type: ignore[no-untyped-call]
        return end


class Chain(nn.Module):
    """Layers one after another."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, box: Box) -> Tensor:
        """Of the only tensor in the box."""
        x = box.pop()
        for layer in self.layers:
            x = layer(x)
        return x


class Residual(nn.Module):
    """Batch normalisation, addition, ReLU."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, box: Box) -> Tensor:
        """Of the input and the addend."""
        addend = box.pop()
        y = self.norm(box.pop())
        y += addend
        return F.relu(y, inplace=True)


class Attention(nn.Module):
    """Of q, k and v, with the dropout that BERT and GPT-2 have."""

    def forward(self, box: Box) -> Tensor:
        """Of the three."""
        value, key, query = box.pop(), box.pop(), box.pop()
        return F.scaled_dot_product_attention(query, key, value, dropout_p=0.1)


class Loss(nn.Module):
    """Final linear layer and cross-entropy: PyTorch's, or chunk by chunk."""

    def __init__(self, features: int, classes: int, *, chunked: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(classes, features) / features**0.5)
        self.chunked = chunked

    def forward(self, box: Box) -> Tensor:
        """Of the hidden states."""
        hidden = box.pop()
        target = torch.arange(len(hidden)) % len(self.weight)
        if self.chunked:
            return chunked_cross_entropy(hidden, self.weight, target)
        return F.cross_entropy(F.linear(hidden, self.weight), target)


@dataclass(frozen=True, slots=True)
class OperatorCase:
    """An operator at one size.

    ``make(ours)`` makes plain PyTorch's module or, where it is another one, ours; ``lever`` is what
    makes PyTorch's ours otherwise: "fused" or "chunked".
    """

    name: str
    workload: str
    shape: tuple[int, ...]
    make: Callable[[bool], nn.Module]
    lever: str = ""
    inputs: int = 1
    channels_last: bool = False


def _norm_relu(channels: int) -> Callable[[bool], nn.Module]:
    return lambda _: Chain(nn.BatchNorm2d(channels), nn.ReLU(inplace=True))


def _residual(channels: int) -> Callable[[bool], nn.Module]:
    return lambda _: Residual(nn.BatchNorm2d(channels))


def _convolution(channels: int) -> Callable[[bool], nn.Module]:
    return lambda _: Chain(nn.Conv2d(channels, channels, 3, padding=1, bias=False))


def _linear(features: int, results: int) -> Callable[[bool], nn.Module]:
    return lambda _: Chain(nn.Linear(features, results))


_SEQUENCE, _HEAD = 128, 64


def image_cases(batch: int, width: int, side: int) -> tuple[OperatorCase, ...]:
    """Layers of a ResNet-18 whose first stage has ``width`` channels of ``side`` squared."""
    shapes = [(batch, width << i, side >> i, side >> i) for i in range(4)]
    norms = [
        OperatorCase("batch_norm + relu", "w1", shape, _norm_relu(shape[1]), "fused")
        for shape in shapes
    ]
    sums = [
        OperatorCase("batch_norm + add + relu", "w1", shape, _residual(shape[1]), "fused", 2)
        for shape in shapes[:2]
    ]
    convolutions = [
        OperatorCase("conv2d", "w1", shape, _convolution(shape[1]), "chunked")
        for shape in shapes[:2]
    ]
    return tuple(
        OperatorCase(c.name, c.workload, c.shape, c.make, c.lever, c.inputs, channels_last=True)
        for c in (*norms, *sums, *convolutions)
    )


def text_cases(rows: int, width: int, classes: int) -> tuple[OperatorCase, ...]:
    """Layers of a BERT-small of ``width`` features on ``rows`` tokens."""
    inner = 4 * width
    narrow, wide = (rows, width), (rows, inner)
    heads = (rows // _SEQUENCE, width // _HEAD, _SEQUENCE, _HEAD)
    name = "bert_small"
    return (
        OperatorCase("layer_norm", name, narrow, lambda _: Chain(nn.LayerNorm(width)), "fused"),
        OperatorCase("rms_norm", name, narrow, lambda _: Chain(nn.RMSNorm(width)), "fused"),
        OperatorCase(
            "layer_norm + linear",
            name,
            narrow,
            lambda _: Chain(nn.LayerNorm(width), nn.Linear(width, width)),
            "fused",
        ),
        OperatorCase(
            "gelu + linear",
            name,
            wide,
            lambda _: Chain(nn.GELU(), nn.Linear(inner, width)),
            "fused",
        ),
        OperatorCase("linear", name, wide, _linear(inner, width), "chunked"),
        OperatorCase("attention", name, heads, lambda _: Attention(), "chunked", inputs=3),
        OperatorCase(
            "linear + cross_entropy",
            name,
            (rows // 8, width),  # about as many tokens as are masked
            lambda ours: Loss(width, classes, chunked=ours),
        ),
    )


def full_cases() -> tuple[OperatorCase, ...]:
    """W1 at batch 128; BERT-small at sequence 128, batch 64."""
    return (*image_cases(128, 64, 32), *text_cases(64 * 128, 512, 30522))
