"""Modules that their first pass builds, torch.func's transforms, and optimizers with a closure."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf_bench.conformance.case import CaseList, Work
from daf_bench.conformance.situations.building import (
    CLASSES,
    FEATURES,
    WIDTH,
    classified,
    labelled,
    network,
)
from daf_bench.conformance.situations.several_passes import between, images

CASES = CaseList()


@CASES.add("lazy_linear")
def lazy_linear() -> Work:
    """Linear layers that learn their input's width in the first pass."""
    layers = (nn.LazyLinear(WIDTH), nn.GELU(), nn.LazyLinear(WIDTH), nn.ReLU(), nn.LazyLinear(8))
    return Work(nn.Sequential(*layers), labelled(), classified)


@CASES.add("lazy_convolution")
def lazy_convolution() -> Work:
    """Convolutions and normalisations that learn their channels in the first pass."""
    model = nn.Sequential(
        *(nn.LazyConv2d(16, 3, padding=1), nn.LazyBatchNorm2d(), nn.ReLU()),
        *(nn.LazyConvTranspose2d(8, 2), nn.AdaptiveAvgPool2d(1)),
        *(nn.Flatten(), nn.LazyLinear(CLASSES)),
    )
    return Work(model, images(), classified)


@CASES.add("vmap_inside")
def vmap_inside() -> Work:
    """A part that ``torch.vmap`` runs over groups of features: splits rightly."""

    class Grouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Sequential(nn.Linear(WIDTH // 8, 16), nn.GELU(), nn.Linear(16, 16))

        def forward(self, values: Tensor) -> Tensor:
            groups = values.view(-1, 8, WIDTH // 8)
            return torch.vmap(self.part)(groups).flatten(1)

    return between(Grouped())


@CASES.add("ensemble_by_vmap")
def ensemble_by_vmap() -> Work:
    """Three networks whose stacked parameters ``torch.vmap`` maps over: splits rightly."""

    class Ensemble(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            members = [network() for _ in range(3)]
            stacked, _ = torch.func.stack_module_state(members)  # type: ignore[arg-type]
            self.names = list(stacked)
            self.stacked = nn.ParameterList(each.detach() for each in stacked.values())
            self.__dict__["base"] = copy.deepcopy(members[0]).to("meta")

        def forward(self, features: Tensor) -> Tensor:
            def one(parameters: dict[str, Tensor]) -> Any:
                return torch.func.functional_call(self.base, parameters, (features,))

            stacked = dict(zip(self.names, self.stacked, strict=True))
            outputs: Tensor = torch.vmap(one)(stacked)
            return outputs.mean(0)

    return Work(Ensemble(), labelled(), classified)


@CASES.add("jacobian_inside")
def jacobian_inside() -> Work:
    """A penalty on the Jacobian of each example's output, by ``torch.func.jacrev``."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        jacobians = torch.vmap(torch.func.jacrev(model))(batch[0])
        return classified(model, batch) + 0.1 * jacobians.square().sum((1, 2)).mean()

    layers = (nn.Linear(FEATURES, 64), nn.Tanh(), nn.Linear(64, CLASSES))
    return Work(nn.Sequential(*layers), labelled(), loss)


@CASES.add("lbfgs")
def lbfgs() -> Work:
    """An optimizer that asks for the loss anew, several times a step."""

    def optimizer(model: nn.Module, rate: float) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(model.parameters(), lr=rate, max_iter=3)

    model = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))
    return Work(model, labelled(), lambda m, b: F.cross_entropy(m(b[0]), b[1]), optimizer=optimizer)
