"""Statistics over the batch outside ``nn.BatchNorm``, and buffers that forward writes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf_bench.conformance.case import CaseList, Work
from daf_bench.conformance.situations.building import (
    CLASSES,
    EXAMPLES,
    WIDTH,
    classified,
    labelled,
    network,
)

CASES = CaseList()
CHANNELS, SIDE = 16, 8


class Before(nn.Module):
    """A network with a layer of one's own in its middle: features [N, ``FEATURES``] to scores."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.into, self.middle, self.out = network(outputs=WIDTH), middle, nn.Linear(WIDTH, CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        """Return scores."""
        scores: Tensor = self.out(self.middle(self.into(features)))
        return scores


def around(middle: nn.Module) -> Work:
    """Return a network with a module in its middle."""
    return Work(Before(middle), labelled(), classified)


def on_images(*layers: nn.Module) -> Work:
    """Return convolutions with these layers in their middle, on images."""
    model = nn.Sequential(
        nn.Conv2d(3, CHANNELS, 3, padding=1),
        *layers,
        nn.ReLU(),
        nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(CHANNELS, CLASSES),
    )
    shade = torch.arange(float(EXAMPLES))[:, None, None, None] / 4
    batch = (torch.randn(EXAMPLES, 3, SIDE, SIDE) + shade, torch.randint(0, CLASSES, (EXAMPLES,)))
    return Work(model, batch, classified)


class FunctionalNorm(nn.Module):
    """Batch normalisation by the function."""

    def forward(self, values: Tensor) -> Tensor:
        """Return normalised values."""
        return F.batch_norm(values, None, None, training=True)


class OwnNorm(nn.Module):
    """Batch normalisation written out, with running statistics."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("spread", torch.ones(width))
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, values: Tensor) -> Tensor:
        """Return normalised values."""
        mean, spread = values.mean(0), values.var(0, unbiased=False)
        with torch.no_grad():
            self.mean.lerp_(mean, 0.1)
            self.spread.lerp_(spread, 0.1)
        return (values - mean) * (spread + 1e-5).rsqrt() * self.scale


class BufferNorm(OwnNorm):
    """Normalises by running statistics that it also updates."""

    def forward(self, values: Tensor) -> Tensor:
        """Return normalised values."""
        with torch.no_grad():
            self.mean.lerp_(values.mean(0), 0.1)
            self.spread = torch.lerp(self.spread, values.var(0, unbiased=False), 0.1)
        return (values - self.mean) * (self.spread + 1e-5).rsqrt() * self.scale


@CASES.add("functional_batch_norm")
def functional_batch_norm() -> Work:
    """``F.batch_norm(training=True)``."""
    return on_images(FunctionalNorm())


@CASES.add("own_batch_norm")
def own_batch_norm() -> Work:
    """Statistics of the batch written out."""
    return around(OwnNorm(WIDTH))


@CASES.add("norm_by_running_statistics")
def norm_by_running_statistics() -> Work:
    """A buffer that is read after it was written, and one that is replaced."""
    return around(BufferNorm(WIDTH))


@CASES.add("batch_norm_1d")
def batch_norm_1d() -> Work:
    """``nn.BatchNorm1d``."""
    return around(nn.BatchNorm1d(WIDTH))


@CASES.add("batch_norm_2d_relu")
def batch_norm_2d_relu() -> Work:
    """What fuses."""
    return on_images(nn.BatchNorm2d(CHANNELS))


@CASES.add("batch_norm_cumulative")
def batch_norm_cumulative() -> Work:
    """Running statistics as a cumulative mean."""
    return on_images(nn.BatchNorm2d(CHANNELS, momentum=None))


@CASES.add("batch_norm_without_buffers")
def batch_norm_without_buffers() -> Work:
    """Statistics of the batch even in evaluation."""
    work = on_images(nn.BatchNorm2d(CHANNELS, track_running_stats=False))
    work.model.eval()
    return work


@CASES.add("batch_norm_frozen")
def batch_norm_frozen() -> Work:
    """In evaluation mode inside a model that trains: splits rightly."""
    work = on_images(nn.BatchNorm2d(CHANNELS))
    work.model[1].eval()
    return work


@CASES.add("instance_norm")
def instance_norm() -> Work:
    """Each example's own statistics: splits rightly."""
    return on_images(nn.InstanceNorm2d(CHANNELS, affine=True))


@CASES.add("instance_norm_running")
def instance_norm_running() -> Work:
    """Running statistics of instances."""
    return on_images(nn.InstanceNorm2d(CHANNELS, track_running_stats=True))


@CASES.add("instance_norm_evaluated")
def instance_norm_evaluated() -> Work:
    """Running statistics that are read: splits rightly."""
    work = on_images(nn.InstanceNorm2d(CHANNELS, track_running_stats=True))
    work.model.eval()
    return work


@CASES.add("group_norm")
def group_norm() -> Work:
    """Splits rightly."""
    return on_images(nn.GroupNorm(4, CHANNELS))
