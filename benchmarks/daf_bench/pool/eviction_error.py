"""A cap halved between forward and backward: the gradient's error against the planes lost.

A stack of linear layers and ReLUs: masks are exact, so the gradient with respect to
an input is too, and a weight's gradient errs only by its own layer's coded input.
Its squared error therefore grows from full codes to shortened ones as the code's
expected error does (``rotated_error``), run by run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from daf.capture.compress import compress
from daf.core.code_format import plane_bytes
from daf.core.code_tables import rotated_error
from daf.core.policy import Need

BITS = 4
_WIDTH, _LAYERS, _EXAMPLES = 256, 4, 512


def gradient_row(seeds: int) -> dict[str, Any]:
    """Measured and predicted growth of the squared error when the cap is halved in mid-step.

    Both are sums over layers, means over ``seeds``; ``measured_over_predicted`` is 1
    where the error is as the planes lost foretell.
    """
    torch.manual_seed(0)
    model = _network()
    batch = torch.randn(_EXAMPLES, _WIDTH)
    exact = _step(model, batch, compress(model, "plain"), halve=False)
    measured = predicted = before = 0.0
    for seed in range(seeds):
        whole = compress(model, BITS, seed=seed)
        full_errors = _errors(_step(model, batch, whole, halve=False), exact)
        shortened = compress(model, BITS, seed=seeds + seed)
        errors = _errors(_step(model, batch, shortened, halve=True), exact)
        growth = _growth(shortened)
        before += sum(full_errors)
        measured += sum(errors)
        predicted += sum(one * factor for one, factor in zip(full_errors, growth, strict=True))
    return {
        "part": "halved gradient",
        "squared_error_growth": measured / before,
        "predicted_growth": predicted / before,
        "measured_over_predicted": measured / predicted,
    }


def _network() -> nn.Module:
    layers = [(nn.Linear(_WIDTH, _WIDTH), nn.ReLU()) for _ in range(_LAYERS)]
    # The first layer's input belongs to the caller and is never coded; a layer before it is.
    return nn.Sequential(nn.Linear(_WIDTH, _WIDTH), *(part for pair in layers for part in pair))


def _step(model: nn.Module, batch: Tensor, capture: compress, *, halve: bool) -> list[Tensor]:
    with capture:
        # Linear in the output: what comes back from the loss is exact.
        loss = (model(batch) * batch).sum()
    if halve:
        capture.pool_bytes = capture.stats.held_bytes // 2
    loss.backward()
    gradients = [
        layer.weight.grad.clone()
        for layer in list(model.children())[1:]
        if isinstance(layer, nn.Linear) and layer.weight.grad is not None
    ]
    model.zero_grad()
    return gradients


def _errors(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [float((one - other).square().sum()) for one, other in zip(found, exact, strict=True)]


def _growth(capture: compress) -> list[float]:
    """For each layer: mean error of its runs as they are now, by that of whole codes."""
    plane = plane_bytes(_EXAMPLES * _WIDTH, 1)
    reports = [report for report in capture.sites() if report.need is Need.LINEAR]
    lost_planes = [
        report.evicted_bytes / plane for report in reports if report.treatment.bits == BITS
    ]
    return [_mean_error(lost) / rotated_error(BITS, BITS) for lost in lost_planes]


def _mean_error(lost_planes: float) -> float:
    whole = int(lost_planes)
    part = lost_planes - whole
    after = rotated_error(BITS, BITS - whole - 1) if part else 0.0
    return (1 - part) * rotated_error(BITS, BITS - whole) + part * after
