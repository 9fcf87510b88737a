"""Holds a way's trace against plain's: bit for bit, or within float reordering.

A sum taken in another order changes a parameter's gradient by a few roundings of what was summed.
So a difference is allowed up to a share of that parameter's gradient and a hundredth of that share
of the whole gradient, ``TOLERANCE`` of the type that the model computes in. Beyond it, the model's
own noise decides: plain's gradient after every parameter moved by about one unit in the last place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from daf_bench.conformance.case import Work

# Of the gradient's length: a thousand roundings of float32, four of what is coarser.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}
GLOBAL_SHARE = 0.01
NOISE_FACTOR = 16.0
# However ill-conditioned: a larger difference counts.
MOST_NOISE = 0.02
# Sums of a few values cancel to less than their rounding: absolute, of the largest value.
SMALLEST = 1e-7

Tensors = Mapping[str, Tensor | None]


@dataclass(frozen=True, slots=True)
class Step:
    """What is compared of one step; ``random`` are digests of the generators' states."""

    loss: float
    gradients: Tensors
    buffers: Tensors
    random: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """What a way did, step by step; ``carried`` and ``parameters`` are those at the end."""

    steps: tuple[Step, ...]
    parameters: Tensors
    carried: Any = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """``difference``: the worst of any step, as a share of the whole; ``where``: in what."""

    is_right: bool
    is_bitwise: bool
    difference: float
    where: str = ""


def gradients_of(work: Work, *, copied: bool = True) -> dict[str, Tensor | None]:
    """Return copies of all gradients, or these themselves, by parameter name, dense."""
    found: dict[str, Tensor | None] = {}
    for name, parameter in work.model.named_parameters():
        gradient = parameter.grad
        gradient = None if gradient is None else dense(gradient.detach())
        found[name] = gradient.clone() if copied and gradient is not None else gradient
    return found


def compared(
    plain: Trace, other: Trace, tolerance: float, *, with_random: bool, noise: float = 0.0
) -> Verdict:
    """Return the verdict over all steps; ``noise``: allowed beyond ``tolerance``, a share."""
    worst = Verdict(True, True, 0.0)
    for index, (first, second) in enumerate(zip(plain.steps, other.steps, strict=True)):
        for what, a, b in (
            ("gradient", first.gradients, second.gradients),
            ("buffer", first.buffers, second.buffers),
            ("loss", {"": torch.tensor(first.loss)}, {"": torch.tensor(second.loss)}),
        ):
            worst = _worse(worst, _held(a, b, tolerance, noise), f"{what} of step {index}")
        if with_random and first.random != second.random:
            worst = _worse(worst, Verdict(False, False, 0.0), f"random state of step {index}")
    ends = _held(plain.parameters, other.parameters, tolerance, noise)
    worst = _worse(worst, ends, "parameter at the end")
    kept = _held(_flat(plain.carried), _flat(other.carried), tolerance, noise)
    return _worse(worst, kept, "carried state")


def _worse(known: Verdict, found: Verdict, what: str) -> Verdict:
    is_first = known.is_right and not found.is_right
    where = f"{what} {found.where}".strip() if is_first else known.where
    return Verdict(
        known.is_right and found.is_right,
        known.is_bitwise and found.is_bitwise,
        max(known.difference, found.difference),
        where,
    )


def _flat(nest: Any) -> dict[str, Tensor | None]:
    leaves = _pytree.tree_leaves(nest)
    return {str(i): each for i, each in enumerate(leaves) if isinstance(each, Tensor)}


def _held(plain: Tensors, other: Tensors, tolerance: float, noise: float) -> Verdict:
    """Hold one set of tensors against another."""
    if plain.keys() != other.keys():
        return Verdict(False, False, math.inf, f"names {sorted(plain.keys() ^ other.keys())[:3]}")
    lengths = {name: length(tensor) for name, tensor in plain.items()}
    whole = math.sqrt(sum(value * value for value in lengths.values()))
    worst, is_bitwise, right, where = 0.0, True, True, ""
    for name, tensor in plain.items():
        twin = other[name]
        if (tensor is None) != (twin is None):
            return Verdict(False, False, math.inf, f"{name!r} of {'none' if twin is None else ''}")
        if tensor is None or twin is None or same_bits(tensor, twin):
            continue
        is_bitwise = False
        apart = distance(tensor, twin)
        allowed = tolerance * (lengths[name] + GLOBAL_SHARE * whole) + noise * whole + SMALLEST
        worst = max(worst, apart / whole if whole else apart)
        if not apart <= allowed and right:
            right, where = False, f"{name!r}: {apart:.3g} apart, {lengths[name]:.3g} long"
    return Verdict(right, is_bitwise, worst, where)


def same_bits(first: Tensor, second: Tensor) -> bool:
    """True if values are equal, NaN equal to NaN, and shape and type too."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    return bool(torch.equal(first, second)) or bool(
        first.dtype.is_floating_point
        and torch.allclose(first, second, rtol=0.0, atol=0.0, equal_nan=True)
    )


def length(tensor: Tensor | None) -> float:
    """Return the Euclidean length of what is finite in a tensor."""
    if tensor is None:
        return 0.0
    return float(torch.linalg.vector_norm(_wide(tensor).nan_to_num(0.0, 0.0, 0.0)))


def distance(first: Tensor, second: Tensor) -> float:
    """Return the Euclidean distance; infinite for other shapes, types or places of NaN and inf."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return math.inf
    a, b = _wide(first), _wide(second)
    if not torch.equal(a.isfinite(), b.isfinite()):
        return math.inf
    return float(torch.linalg.vector_norm((a - b).nan_to_num(0.0, 0.0, 0.0)))


def _wide(tensor: Tensor) -> Tensor:
    values = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return values.detach().to(torch.float64)


def dense(tensor: Tensor) -> Tensor:
    """Return the values of a tensor, which may be sparse, or stand for others as quantized ones."""
    if hasattr(tensor, "full_tensor"):  # a distributed one
        return tensor.full_tensor()
    if type(tensor) not in (Tensor, nn.Parameter) and hasattr(tensor, "qdata"):
        return tensor.dequantize()
    return tensor if tensor.layout is torch.strided else tensor.to_dense()
