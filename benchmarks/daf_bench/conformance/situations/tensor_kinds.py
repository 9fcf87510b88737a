"""In-place operators, views, complex numbers, types and parameters."""

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
    classified,
    labelled,
    network,
)
from daf_bench.conformance.situations.several_passes import between, convolutions, images

CASES = CaseList()
REFUSED = ("DoubleBackwardError", "DataError", "ReleaseRefusedError", "GradientError")


@CASES.add("in_place")
def in_place() -> Work:
    """Addition, scaling and ReLU in place."""

    def function(values: Tensor) -> Tensor:
        return F.relu_((values * 1.0).add_(0.5).mul_(1.5))

    return between(function)


@CASES.add("in_place_on_view")
def in_place_on_view() -> Work:
    """A part of a tensor is written through a view."""

    def function(values: Tensor) -> Tensor:
        values = values * 2
        values[:, :8].copy_(values[:, 8:16].clone().sin())
        values.view(-1, WIDTH // 2, 2)[..., 0].mul_(0.5)
        return values

    return between(function)


@CASES.add("views")
def views() -> Work:
    """Transposed, expanded, strided and unfolded views."""

    def function(values: Tensor) -> Tensor:
        grid = values.view(-1, 8, WIDTH // 8).transpose(1, 2)
        spread = grid[:, ::2].repeat_interleave(2, 1) + grid.unfold(2, 2, 1).mean()
        return (spread * grid.mean(1, keepdim=True).expand_as(grid)).flatten(1)

    return between(function)


@CASES.add("complex_numbers")
def complex_numbers() -> Work:
    """Fourier transforms and a complex weight."""

    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64))

        def forward(self, values: Tensor) -> Tensor:
            return torch.fft.irfft(torch.fft.rfft(values) * self.weight, n=WIDTH)

    return between(Spectral())


@CASES.add("einsum")
def einsum() -> Work:
    """A bilinear form and a tensor product."""

    class Bilinear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.core = nn.Parameter(torch.randn(8, 16, 16) * 0.1)

        def forward(self, values: Tensor) -> Tensor:
            grid = values.view(-1, 8, 16)
            return torch.einsum("nhi,hij,nhj->nh", grid, self.core, grid).repeat(1, 16)

    return between(Bilinear())


class Clipped(torch.autograd.Function):
    """Passes values on, and clips their gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        """Return a copy; keep a tensor by attribute and one by ``save_for_backward``."""
        ctx.save_for_backward(values)
        ctx.scale = values.detach().abs().amax(1, keepdim=True) + 1
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        """Return the gradient, scaled where values are small."""
        (values,) = ctx.saved_tensors
        return gradient * torch.sigmoid(values) / ctx.scale


@CASES.add("own_function")
def own_function() -> Work:
    """A custom autograd function: splits rightly."""
    return between(Clipped.apply)


@CASES.add("straight_through")
def straight_through() -> Work:
    """A sign with the gradient of the identity."""
    return between(lambda values: values + (values.sign() - values).detach())


@CASES.add("sorted_and_gathered")
def sorted_and_gathered() -> Work:
    """Sorting, top-k, gather and scatter within an example."""

    def function(values: Tensor) -> Tensor:
        order = values.argsort(1)
        top = values.topk(16, 1)
        spread = torch.zeros_like(values).scatter(1, top.indices, top.values)
        return values.gather(1, order).cumsum(1) / WIDTH + spread

    return between(function)


@CASES.add("unused_parameters")
def unused_parameters() -> Work:
    """A branch that no step takes."""
    model = nn.ModuleDict({"used": network(), "unused": network()})
    return Work(model, labelled(), lambda m, b: classified(m["used"], b))


@CASES.add("tied_weights")
def tied_weights() -> Work:
    """An embedding that is also the last layer."""
    words, out = nn.Embedding(80, 64), nn.Linear(64, 80, bias=False)
    out.weight = words.weight
    model = nn.Sequential(words, nn.LayerNorm(64), nn.GELU(), out)
    tokens = torch.randint(0, 80, (EXAMPLES, 10))
    return Work(model, (tokens, tokens.roll(1, 1)), lambda m, b: F.cross_entropy(m(b[0]).mT, b[1]))


@CASES.add("shared_through_transpose")
def shared_through_transpose() -> Work:
    """An autoencoder whose decoder is its encoder transposed: splits rightly."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode = nn.Linear(FEATURES, WIDTH)

        def forward(self, features: Tensor) -> Tensor:
            return F.linear(self.encode(features).tanh(), self.encode.weight.t())

    batch = (torch.randn(EXAMPLES, FEATURES),)
    return Work(Tied(), batch, lambda m, b: F.mse_loss(m(b[0]), b[0]))


@CASES.add("frozen_parts")
def frozen_parts() -> Work:
    """Only the last layers train."""
    model = network()
    for layer in list(model)[:3]:
        layer.requires_grad_(False)
    return Work(model, labelled(), classified)


@CASES.add("low_rank_adapters")
def low_rank_adapters() -> Work:
    """Frozen linear layers with small ones beside them."""

    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.down = nn.Linear(base.in_features, 4, bias=False)
            self.up = nn.Linear(4, base.out_features, bias=False)

        def forward(self, values: Tensor) -> Tensor:
            return self.base(values) + 2 * self.up(self.down(values))

    layers = [Adapted(each) if isinstance(each, nn.Linear) else each for each in network()]
    return Work(nn.Sequential(*layers), labelled(), classified)


@CASES.add("detached_branch")
def detached_branch() -> Work:
    """A branch under ``no_grad`` and a stop of the gradient."""

    def function(values: Tensor) -> Tensor:
        with torch.no_grad():
            target = values.softmax(1)
        return values * target + values.detach()

    return between(function)


@CASES.add("channels_last")
def channels_last() -> Work:
    """A model and a batch in channels-last memory."""
    pictures, labels = images()
    model = convolutions().to(memory_format=torch.channels_last)
    return Work(model, (pictures.to(memory_format=torch.channels_last), labels), classified)


@CASES.add("volumes_transposed")
def volumes_transposed() -> Work:
    """Convolutions of volumes, transposed and dilated ones: splits rightly."""
    model = nn.Sequential(
        *(nn.Conv3d(1, 8, 3, padding=2, dilation=2), nn.GroupNorm(2, 8), nn.SiLU()),
        *(nn.ConvTranspose3d(8, 8, 2, 2), nn.AvgPool3d(2), nn.Flatten(), nn.Linear(512, CLASSES)),
    )
    batch = (torch.randn(EXAMPLES, 1, 4, 4, 4), torch.randint(0, CLASSES, (EXAMPLES,)))
    return Work(model, batch, classified)


@CASES.add("double_precision")
def double_precision() -> Work:
    """float64 throughout."""
    features, labels = labelled()
    batch = (features.double(), labels)
    return Work(network().double(), batch, classified, precision=torch.float64)


@CASES.add("bfloat16")
def bfloat16() -> Work:
    """bfloat16 throughout."""
    features, labels = labelled()
    batch = (features.bfloat16(), labels)
    return Work(network().bfloat16(), batch, classified, precision=torch.bfloat16)


@CASES.add("scripted_part")
def scripted_part() -> Work:
    """A part compiled by TorchScript."""
    part = torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()))
    return between(part)


@CASES.add("unrolled_in_time")
def unrolled_in_time() -> Work:
    """A cell in a loop, and its states summed: splits rightly."""

    class Unrolled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(WIDTH, WIDTH)

        def forward(self, values: Tensor) -> Tensor:
            state, total = torch.zeros_like(values), torch.zeros_like(values)
            for _ in range(5):
                state = self.cell(values, state)
                total = total + state
            return total

    return between(Unrolled())


@CASES.add("two_optimizer_groups")
def two_optimizer_groups() -> Work:
    """AdamW with groups."""

    def optimizer(model: nn.Module, rate: float) -> torch.optim.Optimizer:
        decayed = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() <= 1]
        groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=rate, weight_decay=0.1)

    return Work(network(), labelled(), classified, optimizer=optimizer)


@CASES.add("multi_task_heads")
def multi_task_heads() -> Work:
    """Two heads whose losses are summed with learned weights: splits rightly."""
    model = nn.ModuleDict({"body": network(outputs=64), "a": nn.Linear(64, CLASSES)})
    model["b"] = nn.Linear(64, 1)
    model.register_parameter("log_weights", nn.Parameter(torch.zeros(2)))

    def loss(model: Any, batch: Any) -> Tensor:
        body = model["body"](batch[0])
        first = F.cross_entropy(model["a"](body), batch[1])
        second = F.mse_loss(model["b"](body)[:, 0], batch[1].float())
        weights = torch.exp(-model.log_weights)
        return weights[0] * first + weights[1] * second + model.log_weights.sum()

    return Work(model, labelled(), loss)
