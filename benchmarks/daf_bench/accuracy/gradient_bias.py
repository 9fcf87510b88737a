"""Is the gradient under codes right on average? On small networks, end to end.

Where a coded tensor enters the gradient once and linearly no bias is claimed: its square, measured
without bias of its own, scatters around 0 with its standard error. Elsewhere it is
measured, and told beside the noise that codes add.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from daf_bench.accuracy.policies import Example, make_policy
from daf_bench.accuracy.tasks import Effort
from daf_bench.bias.estimate import measure_bias

POLICIES = (
    *("rotated-1", "rotated-2", "rotated-4", "minmax-2", "minmax-4"),
    *("tensor-4", "channel-4", "alam-1"),
)
FULL_DRAWS, QUICK_DRAWS = 256, 32
# Several pairs of network and policy are tested, so a bias is claimed from this on.
DEVIATIONS = 4.0
Row = dict[str, Any]


def _convolutions(*between: Callable[[int], nn.Module]) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1)]
    for _ in range(2):
        layers += [make(16) for make in between]
        layers.append(nn.Conv2d(16, 16, 3, padding=1))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 256, 10))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "convolutions": lambda: _convolutions(lambda _: nn.ReLU()),
    "batch-norm": lambda: _convolutions(nn.BatchNorm2d, lambda _: nn.ReLU()),
    "gelu": lambda: _convolutions(lambda _: nn.GELU()),
}
UNBIASED = ("convolutions",)  # with ReLU, whose mask is exact


@dataclass(frozen=True, slots=True)
class BiasTask:
    """One small network under every codec."""

    network: str
    policies: tuple[str, ...] = POLICIES

    @property
    def name(self) -> str:
        """As rows and figures have it."""
        return f"bias-{self.network}"

    def measure(self, policy: str, seed: int, effort: Effort) -> Row:
        """Squared bias and variance, relative to the gradient's squared length."""
        torch.manual_seed(seed)
        model = NETWORKS[self.network]()
        batch = torch.randn(16, 3, 16, 16), torch.randint(0, 10, (16,))
        example = Example(model, _loss, batch)
        draws = FULL_DRAWS if effort.most_steps is None else QUICK_DRAWS
        found = measure_bias(model, _loss, batch, make_policy(policy, example), draws=draws)
        energy = found.gradient_energy
        return {
            "draws": draws,
            "squared_bias": found.squared_bias / energy,
            "standard_error": found.standard_error / energy,
            "variance": found.variance / energy,
            "deviations": found.deviations,
            "claimed_unbiased": self.network in UNBIASED and not policy.startswith("alam"),
        }

    def figures(self, rows: Iterable[Row]) -> dict[str, float]:
        """Of each policy over seeds: the mean squared bias and how far it is from none."""
        found = {}
        listed = list(rows)
        for policy in dict.fromkeys(row["policy"] for row in listed):
            group = [row for row in listed if row["policy"] == policy]
            count = len(group)
            bias = sum(row["squared_bias"] for row in group) / count
            error = sum(row["standard_error"] ** 2 for row in group) ** 0.5 / count
            name = f"{self.name}/{policy}"
            found[f"{name}/squared_bias"] = bias
            found[f"{name}/deviations"] = bias / error if error else 0.0
            found[f"{name}/variance"] = sum(row["variance"] for row in group) / count
            if group[0]["claimed_unbiased"]:
                found[f"{name}/claim_holds"] = float(bias <= DEVIATIONS * error)
        return found


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])
