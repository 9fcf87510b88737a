"""Modules that do not repeat themselves, paths that open late, and what changes between steps."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf_bench.conformance.case import CaseList, Work
from daf_bench.conformance.situations.building import CLASSES, FEATURES, WIDTH, classified, labelled

CASES = CaseList()
CAUGHT = ("SavedTensorError", "ReplayError", "UnrepeatableError")


class Block(nn.Module):
    """A residual block whose input ``scale`` is drawn anew in every call."""

    def __init__(self, scale: Any = lambda: 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, values: Tensor) -> Tensor:
        """Return the values with the block's addition."""
        moved: Tensor = self.down(F.gelu(self.up(self.norm(values) * self.scale())))
        return values + moved


class Stack(nn.Module):
    """Features [N, ``FEATURES``] to scores through blocks."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, features: Tensor) -> Tensor:
        """Return scores."""
        values = self.into(features)
        for block in self.blocks:
            values = block(values)
        scores: Tensor = self.out(values)
        return scores


def stacked(*blocks: nn.Module, **options: Any) -> Work:
    """Return a stack of these blocks on labelled features."""
    return Work(Stack(*blocks), labelled(), classified, **options)


@CASES.add("python_random")
def python_random() -> Work:
    """Python's generator."""
    return stacked(*(Block(lambda: 0.5 + random.random()) for _ in range(3)))


@CASES.add("numpy_random")
def numpy_random() -> Work:
    """NumPy's global generator."""
    return stacked(*(Block(lambda: 0.5 + np.random.rand()) for _ in range(3)))


@CASES.add("torch_random_number")
def torch_random_number() -> Work:
    """A number drawn by torch."""
    return stacked(*(Block(lambda: 0.5 + torch.rand(()).item()) for _ in range(3)))


@CASES.add("own_torch_generator")
def own_torch_generator() -> Work:
    """A generator that a closure holds."""
    source = torch.Generator().manual_seed(3)
    blocks = [Block(lambda: 0.5 + torch.rand((), generator=source).item()) for _ in range(3)]
    return stacked(*blocks, reset=lambda: source.manual_seed(3) and None)


@CASES.add("own_numpy_generator")
def own_numpy_generator() -> Work:
    """A NumPy generator that a closure holds."""
    source = [np.random.default_rng(3)]

    def again() -> None:
        source[0] = np.random.default_rng(3)

    return stacked(*(Block(lambda: 0.5 + source[0].random()) for _ in range(3)), reset=again)


class Drawn(Block):
    """A block with a generator of its own as an attribute."""

    def __init__(self) -> None:
        super().__init__(lambda: 0.5 + torch.rand((), generator=self.source).item())
        self.source = torch.Generator().manual_seed(5)


@CASES.add("generator_attribute")
def generator_attribute() -> Work:
    """A generator as a module's attribute."""
    blocks = [Drawn() for _ in range(2)]

    def again() -> None:
        for block in blocks:
            block.source.manual_seed(5)

    return stacked(*blocks, reset=again)


class LayerDrop(Stack):
    """Leaves out whole blocks."""

    def forward(self, features: Tensor) -> Tensor:
        """Return scores."""
        values = self.into(features)
        for block in self.blocks:
            if not self.training or random.random() > 0.4:
                values = block(values)
        scores: Tensor = self.out(values)
        return scores


@CASES.add("layer_drop")
def layer_drop() -> Work:
    """Blocks left out by Python's generator."""
    return Work(LayerDrop(*(Block() for _ in range(4))), labelled(), classified)


class DropInside(nn.Module):
    """Holds blocks and leaves some out, inside one call."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, values: Tensor) -> Tensor:
        """Return what is left of the blocks."""
        for block in self.blocks:
            if torch.rand(()) > 0.4:
                values = block(values)
        return values


@CASES.add("layer_drop_by_torch")
def layer_drop_by_torch() -> Work:
    """Blocks left out inside a module, by torch's generator."""
    return stacked(DropInside(), DropInside())


@CASES.add("dropout")
def dropout() -> Work:
    """Torch's own dropout."""
    return stacked(Block(), nn.Dropout(0.3), Block(), nn.Dropout(0.1))


@CASES.add("stochastic_depth")
def stochastic_depth() -> Work:
    """Each example's residual is dropped by itself."""

    class DropPath(Block):
        def forward(self, values: Tensor) -> Tensor:
            kept = torch.rand(len(values), 1) > 0.3
            return values + (super().forward(values) - values) * kept / 0.7

    return stacked(DropPath(), DropPath())


@CASES.add("noise_injected")
def noise_injected() -> Work:
    """Gaussian noise on activations."""

    class Noisy(Block):
        def forward(self, values: Tensor) -> Tensor:
            return super().forward(values + 0.1 * torch.randn_like(values))

    return stacked(Noisy(), Noisy())


@CASES.add("gumbel_softmax")
def gumbel_softmax() -> Work:
    """A hard choice with noise."""

    class Chooser(Block):
        def forward(self, values: Tensor) -> Tensor:
            return super().forward(values) * F.gumbel_softmax(values, hard=True)

    return stacked(Chooser())


@CASES.add("randomised_relu")
def randomised_relu() -> Work:
    """RReLU fills a tensor that it has already saved."""
    return stacked(Block(), nn.RReLU(), Block())
