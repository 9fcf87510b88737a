"""The words that planning and execution share: immutable values, no torch, no device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType


class Need(StrEnum):
    """What an operator's backward needs of a tensor it saves: the *kind of site*."""

    LINEAR = "linear"  # enters the gradient once and linearly: inputs of conv, linear, mul
    NORM = "norm"  # input of a normalisation; enters twice
    PRODUCT = "product"  # activation times activation: attention's q, k, v, out
    PROBABILITY = "probability"  # softmax output: zero must stay zero
    SMOOTH = "smooth"  # only h'(x) of a smooth activation
    SIGN = "sign"  # only on which side of a threshold each element lies
    TWO_VALUED = "two_valued"  # floats that take two values: dropout's noise
    INTEGER = "integer"  # bool, indices, small integers
    SHAPE = "shape"  # content is never read
    EXACT = "exact"  # anything not known to tolerate less


class Method(StrEnum):
    """How a saved tensor is stored."""

    KEEP = "keep"
    ROTATED = "rotated"
    MINMAX = "minmax"
    MASK = "mask"
    DERIVATIVE = "derivative"
    PACK = "pack"
    DROP = "drop"
    REDERIVE = "rederive"


@dataclass(frozen=True, slots=True)
class Treatment:
    """What the plan does at a site: a method, its width, and rotation rounds."""

    method: Method
    bits: int = 0
    rounds: int = 1


KEEP = Treatment(Method.KEEP)


@dataclass(frozen=True, slots=True)
class Site:
    """One place where autograd saves a tensor; stable from step to step.

    ``module`` is the path in ``model.named_modules()``, ``operator`` the torch
    function's name, ``call`` counts that operator within one call of the
    module, ``save`` counts the tensors that this operator call saves.
    """

    module: str
    operator: str
    call: int
    save: int

    def __str__(self) -> str:
        return f"{self.module or '<model>'}:{self.operator}#{self.call}[{self.save}]"


@dataclass(frozen=True, slots=True)
class Policy:
    """A treatment for every kind of site, and exceptions for single sites.

    ``rederive`` allows one code to serve a normalisation, its activation and
    the operator behind it (design, section 4: BatchNorm, ReLU, convolution).
    """

    name: str
    by_need: Mapping[Need, Treatment]
    by_site: Mapping[Site, Treatment] = field(default_factory=lambda: MappingProxyType({}))
    rederive: bool = True

    def treatment(self, need: Need, site: Site) -> Treatment:
        """The treatment of one site."""
        return self.by_site.get(site) or self.by_need.get(need, KEEP)


_EXACT = {
    Need.SIGN: Treatment(Method.MASK, 1),
    Need.TWO_VALUED: Treatment(Method.MASK, 1),
    Need.INTEGER: Treatment(Method.PACK),
    Need.SHAPE: Treatment(Method.DROP),
}


def plain_policy() -> Policy:
    """Keep every saved tensor as PyTorch does."""
    return Policy("plain", MappingProxyType({}), rederive=False)


def exact_policy() -> Policy:
    """Only treatments that leave every gradient bit as it is."""
    return Policy("exact", MappingProxyType(dict(_EXACT)), rederive=False)


def coded_policy(bits: int) -> Policy:
    """``bits`` per element wherever a lossy code is sound, more where it must be (design, section 4).

    Raises:
        ValueError: ``bits`` is not in 1 … 8.
    """
    if bits not in range(1, 9):
        raise ValueError(f"asked for {bits!r} bits; codes have 1 to 8 bits, or 'exact'")
    lossy = {
        Need.LINEAR: _value(bits),
        Need.NORM: _value(bits),
        Need.PRODUCT: _value(max(bits, 4)),
        Need.PROBABILITY: Treatment(Method.MINMAX, 8),
        Need.SMOOTH: Treatment(Method.DERIVATIVE, min(max(bits, 2), 4)),
    }
    return Policy(f"{bits}-bit", MappingProxyType(_EXACT | lossy))


def _value(bits: int) -> Treatment:
    return Treatment(Method.ROTATED if bits <= 4 else Method.MINMAX, bits)


@dataclass(frozen=True, slots=True)
class CaptureStats:
    """What the saved tensors of one step cost (bytes).

    ``plain_bytes``: what autograd would have held, deduplicated by storage,
    without parameters, buffers and the caller's batch. ``held_bytes``: what is
    held instead, headers and padding included. Peaks are over the step.
    """

    plain_peak_bytes: int
    held_peak_bytes: int
    sites: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What one training step does; made by the planner, carried out by execution."""

    policy: Policy
    micro_batch: int
    predicted_peak_bytes: int
    mmap_threshold_bytes: int | None = None
    reason: str = ""
