"""Who takes part in the side-by-side: what each is called, what kind it is, how it trains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from daf_bench.peers.verdicts import OURS

PLAIN = "plain"
# A way that a user has without DAF; a published policy, run by DAF's session; DAF itself.
PEER, PUBLISHED = "peer", "published"
DAF_AT = "DAF, {} %"
DAF_BITS = "DAF, {} bits"
BASELINE_BITS = 2
LEAST, LEAST_TRIES = 0, 4  # a percentage; how often what a refusal names is asked for in turn
COMPARED_PERCENT = 50  # the budget at which figures compare
BASELINE = f"GACT codes and widths, {BASELINE_BITS} bits"


@dataclass(frozen=True, slots=True)
class Asked:
    """A row of the table. ``changes`` are those of a ``Way``.

    ``percent`` is a budget: that share of plain's peak above the floor; ``LEAST``: the least that
    its refusal names. One that ``compiles`` may take minutes before its first step.
    """

    label: str
    kind: str = PEER
    changes: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    percent: int | None = None
    compiles: bool = False


def by_peer(label: str, peer: str, amount: float = 0.0, *, compiles: bool = False) -> Asked:
    """A way without DAF."""
    return Asked(label, PEER, {"peer": peer, "amount": amount}, compiles=compiles)


def by_policy(label: str, policy: str, percent: int) -> Asked:
    """A published policy under a budget."""
    return Asked(f"{label}, {percent} %", PUBLISHED, {"policy": policy}, percent)


def ours_at(percent: int) -> Asked:
    """DAF under a budget."""
    return Asked(DAF_AT.format(percent), OURS, {}, percent)


def ours_exactly(percent: int) -> Asked:
    """DAF under a budget, with only what leaves the gradient as it is."""
    return Asked(f"DAF exactly, {percent} %", OURS, {"tolerance": 0.0}, percent)


def ours_with(bits: int) -> Asked:
    """DAF at one width with fused operators, without a budget."""
    return Asked(DAF_BITS.format(bits), OURS, {"bits": bits, "fused": True})


def ours_unfused(bits: int) -> Asked:
    """DAF's codes alone, as the peers' are: PyTorch's own operators."""
    return Asked(f"DAF, {bits} bits, not fused", OURS, {"bits": bits})


_SAME_ALLOCATOR = Asked("plain, same allocator", PEER, {"return_freed_blocks": True})
_SAGE = by_policy("SAGE's DGA, then DGC", "sage", 50)
_COMPILED = by_peer("torch.compile", "compile", compiles=True)
_BASELINE = by_peer(BASELINE, "gact", BASELINE_BITS)


def _activation_budget(share: float) -> Asked:
    return by_peer(f"activation budget {share}", "activation-budget", share, compiles=True)


FULL = (
    by_peer("plain again", "plain"),
    _SAME_ALLOCATOR,
    by_peer("plain, no compiler loaded", "no-compiler"),
    by_peer("checkpointing (SGC)", "checkpoint", 1.0),
    by_peer("checkpointing half", "checkpoint", 0.5),
    by_peer("accumulation, 2 pieces (SGA)", "accumulate", 2),
    by_peer("accumulation, 4 pieces (SGA)", "accumulate", 4),
    by_peer("disk", "disk"),
    by_peer("min-max codes, 2 bits", "minmax", 2),
    by_peer("min-max codes, 4 bits", "minmax", 4),
    _BASELINE,
    _SAGE,
    by_policy("DGC", "checkpoint", 50),
    by_policy("DGA", "accumulate", 50),
    by_policy("quantizing alone", "quantize", 50),
    by_policy("DAF as published", "daf", 50),
    by_policy("DAF as published, by channels", "daf-channels", 50),
    *(ours_with(bits) for bits in (1, 2, 4)),
    ours_unfused(BASELINE_BITS),
    *(ours_at(percent) for percent in (75, 50, 35, 25)),
    ours_exactly(50),
    _COMPILED,
    _activation_budget(0.5),
    _activation_budget(0.2),
)
QUICK = (
    _SAME_ALLOCATOR,
    by_peer("checkpointing (SGC)", "checkpoint", 1.0),
    by_peer("accumulation, 4 pieces (SGA)", "accumulate", 4),
    by_peer("disk", "disk"),
    _BASELINE,
    _SAGE,
    ours_with(2),
    ours_at(50),
    ours_at(25),
    _COMPILED,
    _activation_budget(0.5),
)
