"""``daf bench gradients``: exact policies against plain PyTorch on every workload's model.

Policies are made by hand, so that no planner decides what is compared: replay of all blocks, spill
of all that is saved, pieces of the batch, and pieces with replay. Each takes one step of a session
from the same weights and random state as plain. With dropout, smaller pieces draw other noise than
the whole batch; so pieces are compared with the same pieces by hand, and with the whole batch
where dropout is off.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from daf.core.plan import Plan
from daf.core.policy import Method, Need, Policy, Treatment, plain_policy
from daf.offload.spill import SpillOptions
from daf.session.session import Session
from daf.step.microbatch import likely_cut, split_refusal
from daf_bench.harness.peer_methods import plain_step
from daf_bench.harness.result import BenchResult
from daf_bench.harness.static_baselines import accumulating_step
from daf_bench.workloads import WORKLOADS, find_workload
from daf_bench.workloads.sources import Sources, default_sources
from daf_bench.workloads.trainable import Loaded, Trainable

_PIECES = 2
Report = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class GradientsJob:
    """Which workloads, at small or full size, and from where their data come."""

    workloads: tuple[str, ...] = tuple(WORKLOADS)
    is_small: bool = False
    sources: Sources = field(default_factory=default_sources)


@dataclass(frozen=True, slots=True)
class Compared:
    """A policy and what it is compared with.

    ``pieces`` the batch is cut into, by plain too if ``plain_pieces``; without that,
    both sides train without dropout.
    """

    name: str
    policy: Policy
    pieces: int = 1
    plain_pieces: bool = False


def quick_job() -> GradientsJob:
    """Every model on small inputs: seconds each."""
    return GradientsJob(is_small=True)


def run(job: GradientsJob, on_progress: Report = lambda *_: None) -> BenchResult:
    """Compare every policy that each workload allows."""
    rows: list[dict[str, Any]] = []
    for place, name in enumerate(job.workloads):
        loaded = find_workload(name).load(job.sources, job.is_small)
        for compared in policies_for(loaded):
            on_progress(f"{name}: {compared.name}", place, len(job.workloads))
            rows.append({"workload": name, **compare(loaded, compared)})
    notes = (
        f"{'small' if job.is_small else 'full'} sizes; data: {job.sources.described()}",
        "gradient_error: |ours - plain| / |plain| over all parameters, dropout on unless said",
        "whole: pieces against the whole batch, both without dropout",
    )
    return BenchResult("gradients", rows, _figures(rows), notes)


def policies_for(loaded: Loaded) -> list[Compared]:
    """Replay and spill always; pieces where the batch can be split."""
    work = loaded.build()
    replayed = replace(plain_policy(), name="replay", replayed=frozenset(work.blocks))
    found = [Compared("replay", replayed), Compared("spill", spill_policy())]
    if split_refusal(work.model) or loaded.batch_size < _PIECES:
        return found
    return [
        *found,
        Compared("pieces", plain_policy(), _PIECES, plain_pieces=True),
        Compared("pieces and replay", replayed, _PIECES, plain_pieces=True),
        Compared("pieces, whole", plain_policy(), _PIECES),
    ]


def spill_policy() -> Policy:
    """Everything that may wait on disk does."""
    to_disk = MappingProxyType({need: Treatment(Method.SPILL) for need in Need})
    return Policy("spill", to_disk, rederive=False)


def compare(loaded: Loaded, compared: Compared) -> dict[str, Any]:
    """One step each way from the same start; how far the gradients are apart, and what was done."""
    ours, done = _ours(_start(loaded, compared), compared)
    plain = _plain(_start(loaded, compared), compared)
    difference = sum(float((a - b).double().square().sum()) for a, b in _pairs(ours, plain))
    total = sum(float(tensor.double().square().sum()) for tensor in plain.values())
    return {
        "policy": compared.name,
        "parameters": len(plain),
        "identical": all(torch.equal(a, b) for a, b in _pairs(ours, plain)),
        "gradient_error": (difference / total) ** 0.5,
        "gradient_norm": total**0.5,
        **done,
    }


def _pairs(first: dict[str, Tensor], second: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    assert first.keys() == second.keys()
    return [(first[name], second[name]) for name in first]


def _start(loaded: Loaded, compared: Compared) -> Trainable:
    work = loaded.build()
    if compared.pieces > 1 and not compared.plain_pieces:
        _without_dropout(work.model)
    return work


def _without_dropout(model: nn.Module) -> None:
    """Also where attention reads its share from a number of its own (Hugging Face)."""
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        for name in ("dropout_prob", "attention_dropout"):
            if isinstance(getattr(part, name, None), float):
                setattr(part, name, 0.0)


def _plain(work: Trainable, compared: Compared) -> dict[str, Tensor]:
    batch = work.batch(0)
    torch.manual_seed(1)
    if compared.plain_pieces:
        step = accumulating_step(work.model, work.optimizer, work.task.loss, compared.pieces)
        step(batch)
    else:
        plain_step(work.model, work.optimizer, batch, work.task.loss)
    return _gradients(work.model)


def _ours(work: Trainable, compared: Compared) -> tuple[dict[str, Tensor], dict[str, Any]]:
    batch = work.batch(0)
    with tempfile.TemporaryDirectory() as folder:
        options = SpillOptions(directory=folder, allow_memory=True)
        with Session(work.model, work.optimizer, None, spill=options) as session:
            session.plan = Plan(
                compared.policy,
                -(-likely_cut(batch).size(batch) // compared.pieces),
                predicted_peak_bytes=0,
                return_freed_blocks=False,
                reason="made by hand",
            )
            torch.manual_seed(1)
            report = session.step(batch, work.task.loss)
            done = {"micro_batch": report.micro_batch, "saved_bytes": report.saved_bytes}
            return _gradients(work.model), {**done, **_what_was_done(session)}


def _what_was_done(session: Session) -> dict[str, Any]:
    sites = session.explain()
    return {
        "saved_bytes_plain": session.saved_bytes_plain,
        "spilled_bytes": sum(site["spilled_bytes"] for site in sites),
        "replayed_inputs": sum(":input#" in site["site"] for site in sites),
    }


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: tensor.detach().clone() for name, tensor in found.items() if tensor is not None}


def _figures(rows: list[dict[str, Any]]) -> dict[str, float]:
    return {
        "compared": len(rows),
        "identical": sum(row["identical"] for row in rows),
        "gradient_error_worst": max(row["gradient_error"] for row in rows),
    }
