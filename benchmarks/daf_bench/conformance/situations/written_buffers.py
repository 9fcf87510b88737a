"""Layers that mix examples with each other, or write buffers in forward."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf_bench.conformance.case import CaseList, Work
from daf_bench.conformance.situations.building import WIDTH, Called, classified, labelled, network
from daf_bench.conformance.situations.statistics import OwnNorm, around, on_images

CASES = CaseList()
CHANNELS, SIDE = 16, 8


class Codebook(nn.Module):
    """Replaces each row by its nearest code; ``decay``: codes follow their rows."""

    def __init__(self, decay: float | None) -> None:
        super().__init__()
        self.decay = decay
        codes = torch.randn(16, WIDTH)
        if decay is None:
            self.codes = nn.Parameter(codes)
        else:
            self.register_buffer("codes", codes)
            self.register_buffer("counts", torch.ones(16))

    def forward(self, values: Tensor) -> Tensor:
        """Return codes, with the gradient straight through."""
        nearest = torch.cdist(values, self.codes).argmin(1)
        if self.decay is not None and self.training:
            chosen = F.one_hot(nearest, 16).float()
            with torch.no_grad():
                self.counts.mul_(self.decay).add_(chosen.sum(0), alpha=1 - self.decay)
                mean = chosen.t() @ values / chosen.sum(0).clamp(min=1)[:, None]
                self.codes.copy_(self.codes * self.decay + mean * (1 - self.decay))
        codes = self.codes[nearest]
        pull = (codes - values.detach()).mean() if self.decay is None else 0.0
        return values + (codes - values).detach() + pull


@CASES.add("codebook_moving")
def codebook_moving() -> Work:
    """A VQ codebook by moving averages."""
    return around(Codebook(0.9))


@CASES.add("codebook_learned")
def codebook_learned() -> Work:
    """A VQ codebook with a gradient: splits rightly."""
    return around(Codebook(None))


class ActNorm(nn.Module):
    """Takes its first scale from its first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("is_ready", torch.tensor(False))

    def forward(self, values: Tensor) -> Tensor:
        """Return scaled values."""
        if not self.is_ready:
            with torch.no_grad():
                self.scale.copy_(1 / (values.std(0) + 1e-3))
                self.is_ready.fill_(True)
        return values * self.scale


@CASES.add("data_dependent_start")
def data_dependent_start() -> Work:
    """ActNorm: parameters that the first forward pass writes."""
    return around(ActNorm())


@CASES.add("centred_by_batch")
def centred_by_batch() -> Work:
    """The batch's mean is taken off."""
    return around(Called(lambda values: values - values.mean(0, keepdim=True)))


@CASES.add("whitened")
def whitened() -> Work:
    """Scaled by the batch's root mean square."""
    return around(Called(lambda values: values / (values.square().mean().sqrt() + 1e-3)))


@CASES.add("attention_over_examples")
def attention_over_examples() -> Work:
    """Examples look at each other."""
    return around(Called(lambda v: v + (v @ v.t() / 11).softmax(-1) @ v))


@CASES.add("minibatch_deviation")
def minibatch_deviation() -> Work:
    """StyleGAN's deviation within groups of four examples."""

    def groups(values: Tensor) -> Tensor:
        size = 4 if len(values) % 4 == 0 else len(values)
        spread = values.view(size, -1, WIDTH).std(0, unbiased=False).mean(-1)
        return values + spread.repeat(size)[:, None]

    return around(Called(groups))


@CASES.add("sinkhorn")
def sinkhorn() -> Work:
    """Rows and columns of the batch's scores are normalised in turn."""

    def balanced(values: Tensor) -> Tensor:
        scores = values.clamp(-5, 5).exp()
        for _ in range(3):
            scores = scores / scores.sum(0, keepdim=True)
            scores = scores / scores.sum(1, keepdim=True)
        return values * scores

    return around(Called(balanced))


class Queue(nn.Module):
    """Keeps the last rows that it saw, and compares new ones with them (MoCo)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.randn(24, WIDTH))

    def forward(self, values: Tensor) -> Tensor:
        """Return values moved towards the queue."""
        moved = values + (values @ self.rows.t() / 11).softmax(-1) @ self.rows
        self.rows = torch.cat([self.rows[len(values) :], values.detach()])[:24]
        return moved


@CASES.add("memory_queue")
def memory_queue() -> Work:
    """A queue of earlier batches, a buffer that is replaced."""
    return around(Queue())


class Counter(nn.Module):
    """Counts its forward passes in a buffer that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, values: Tensor) -> Tensor:
        """Return the values."""
        self.passes += 1
        return values


@CASES.add("counting_buffer")
def counting_buffer() -> Work:
    """A count of forward passes."""
    return around(Counter())


class Observer(nn.Module):
    """Fake quantization to the largest value seen so far."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("most", torch.tensor(0.1))

    def forward(self, values: Tensor) -> Tensor:
        """Return values on a grid, the gradient straight through."""
        self.most.copy_(torch.maximum(self.most, values.detach().abs().max()))
        step = self.most / 127
        return values + ((values / step).round() * step - values).detach()


@CASES.add("quantization_observer")
def quantization_observer() -> Work:
    """A range that grows with what is seen."""
    return around(Observer())


class TeacherCopy(nn.Module):
    """A copy that follows a network's parameters in every forward pass (BYOL)."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = network(), network().requires_grad_(False)

    def forward(self, features: Tensor) -> Tensor:
        """Return the student's scores, drawn to the teacher's."""
        with torch.no_grad():
            for own, other in zip(
                self.teacher.parameters(), self.student.parameters(), strict=True
            ):
                own.lerp_(other, 0.05)
        scores: Tensor = self.student(features)
        return scores - 0.1 * self.teacher(features)


@CASES.add("teacher_moves_in_forward")
def teacher_moves_in_forward() -> Work:
    """Frozen parameters that forward writes."""
    return Work(TeacherCopy(), labelled(), classified)


@CASES.add("weight_standardised")
def weight_standardised() -> Work:
    """Statistics of weights, not of the batch: splits rightly."""

    class Standard(nn.Conv2d):
        def forward(self, images: Tensor) -> Tensor:
            weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
            return self._conv_forward(images, weight, self.bias)

    return on_images(Standard(CHANNELS, CHANNELS, 3, padding=1), nn.GroupNorm(4, CHANNELS))


@CASES.add("spectral_norm")
def spectral_norm() -> Work:
    """A power iteration's vectors are buffers that every forward pass moves."""
    return around(nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)))


@CASES.add("batch_renormalisation")
def batch_renormalisation() -> Work:
    """Batch statistics corrected by running ones."""

    class Renorm(OwnNorm):
        def forward(self, values: Tensor) -> Tensor:
            mean, spread = values.mean(0), values.std(0, unbiased=False) + 1e-3
            ratio = (spread / self.spread).detach().clamp(0.3, 3)
            shift = ((mean - self.mean) / self.spread).detach().clamp(-3, 3)
            with torch.no_grad():
                self.mean.lerp_(mean, 0.1)
                self.spread.lerp_(spread, 0.1)
            return ((values - mean) / spread * ratio + shift) * self.scale

    return around(Renorm(WIDTH))


@CASES.add("hidden_counter_decides")
def hidden_counter_decides() -> Work:
    """A buffer counts passes and scales by them (a warm-up inside the model)."""

    class WarmUp(Counter):
        def forward(self, values: Tensor) -> Tensor:
            self.passes += 1
            return values * torch.clamp(self.passes / 10, max=1.0)

    return around(WarmUp())
