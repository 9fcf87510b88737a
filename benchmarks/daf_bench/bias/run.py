"""The squared bias of the whole gradient under codes, and their noise, of every network and width.

A code's noise averages out over steps, its bias adds up. Both are shares of the squared length of
the gradient that plain PyTorch computes, on one batch, over seeds of ``compress``.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import daf
from daf.core.policy import LOSSY
from daf_bench.bias.networks import NETWORKS, outlier_networks
from daf_bench.harness.result import BenchResult
from daf_bench.harness.row_log import Row, RowLog

WIDTHS = (1, 2, 3, 4)
Report = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class BiasJob:
    """``seeds`` passes of each network at each width."""

    networks: tuple[str, ...] = tuple(NETWORKS)
    widths: tuple[int, ...] = WIDTHS
    seeds: int = 100


def quick_job() -> BiasJob:
    """Few seeds: a bias below about 0.001 cannot be told from none."""
    return BiasJob(widths=(2,), seeds=8)


@dataclass(frozen=True, slots=True)
class Errors:
    """Shares of the plain gradient's squared length; ``bias`` squared, unbiased, perhaps below 0.

    ``noise`` is the mean square error of one pass, the bias included.
    """

    bias: float
    noise: float


def errors_of(gradients: Iterator[Tensor], plain: Tensor) -> Errors:
    """Estimate the squared bias of gradients (n,), of which there are at least two.

    Of S independent errors with squared bias B and variance V, the mean's squared length is
    B + V/S on average, and the mean of the squared lengths is B + V. So B is estimated without a
    bias of its own by (the first - the second / S) / (1 - 1/S); where B is 0 it falls below 0 half
    of the time.
    """
    total, squares, count = torch.zeros_like(plain, dtype=torch.float64), 0.0, 0
    for gradient in gradients:
        error = gradient.double() - plain.double()
        total += error
        squares += float(error.square().sum())
        count += 1
    noise, energy = squares / count, float(plain.double().square().sum())
    bias = (float((total / count).square().sum()) - noise / count) / (1 - 1 / count)
    return Errors(bias / energy, noise / energy)


def run(
    job: BiasJob, rows_file: Path | None = None, on_progress: Report = lambda *_: None
) -> BenchResult:
    """Run it, going on where ``rows_file`` ends."""
    log = RowLog(rows_file, asdict(job))
    for place, name in enumerate(job.networks):
        on_progress(name, place, len(job.networks))
        log.row(name, lambda: _row(job, name))  # noqa: B023
    notes = (
        f"over {job.seeds} seeds; bias: squared, over the gradient's square; noise: of one pass",
        "coded: how many saved tensors hold a code with an error",
    )
    return BenchResult("bias", log.rows, figures_of(log.rows), notes)


def _row(job: BiasJob, name: str) -> Row:
    torch.manual_seed(0)
    model, x = NETWORKS[name]()
    plain = _gradient(model, x)
    row: Row = {"network": name, "has_outliers": name in outlier_networks()}
    for bits in job.widths:
        passes = (_coded_gradient(model, x, bits, seed) for seed in range(job.seeds))
        row[str(bits)] = asdict(errors_of(passes, plain)) | {"coded": _coded(model, x, bits)}
    return row


def _coded_gradient(model: nn.Module, x: Tensor, bits: int, seed: int) -> Tensor:
    return _gradient(model, x, daf.compress(model, bits=bits, seed=seed))


def _coded(model: nn.Module, x: Tensor, bits: int) -> int:
    context = daf.compress(model, bits=bits, seed=0)
    _gradient(model, x, context)
    return sum(each.treatment.bits > 0 and each.need in LOSSY for each in context.sites())


def _gradient(model: nn.Module, x: Tensor, context: daf.compress | None = None) -> Tensor:
    """Return the whole gradient (n,), from the same random state each time."""
    model.zero_grad()
    torch.manual_seed(1)
    if context is None:
        loss = _scalar(model(x))
    else:
        with context:
            loss = _scalar(model(x))
    loss.backward()  # type: ignore[no-untyped-call]
    return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])


def _scalar(result: Tensor) -> Tensor:
    return (result * torch.randn_like(result)).mean() if result.dim() else result


def figures_of(rows: list[Row]) -> dict[str, float]:
    """The worst squared bias and the median noise at each width; outliers apart."""
    figures: dict[str, float] = {"networks": len(rows)}
    widths = [key for key in rows[0] if key.isdigit()] if rows else []
    usual = [row for row in rows if not row["has_outliers"]]
    outliers = [row for row in rows if row["has_outliers"]]
    for bits in widths:
        figures[f"bias_{bits}bit_worst"] = max((row[bits]["bias"] for row in usual), default=0.0)
        noises = [row[bits]["noise"] for row in usual]
        figures[f"noise_{bits}bit_median"] = statistics.median(noises) if noises else 0.0
    least = max("2", *widths[:1])
    found = [row[bits]["bias"] for row in outliers for bits in widths if bits >= least]
    figures["bias_outliers_worst"] = max(found, default=0.0)
    return figures
