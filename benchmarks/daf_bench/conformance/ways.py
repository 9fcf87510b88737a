"""Trains a case one way: plain, in a session whose plan forces a lever, or under ``compress``.

Every way takes ``QUIET_STEPS`` at a learning rate of 0, then ``LOUD_STEPS`` at a small one. A
session is given room to spare and ``tolerance=0``. The first one of a case profiles and proves;
only what its profile offers is forced, by a plan made by hand, since no budget is small enough to
force a tiny model. Sizable ones also train within a tight budget (``tight``).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree

import daf
from daf.core.plan import Plan
from daf.core.policy import (
    Policy,
    coded_policy,
    exact_policy,
    plain_policy,
    policy_for,
    with_fused_operators,
)
from daf.core.profile import CallProfile, Profile
from daf.memory import process_memory
from daf.session.session import Session
from daf.step.microbatch import likely_cut
from daf_bench.conformance.case import Work, seed_all
from daf_bench.conformance.compare import Step, Trace, dense, gradients_of

QUIET_STEPS = 3
LOUD_STEPS = 2
ROOM_BYTES = 2 * 10**9
_CODES = frozenset({"rotated", "minmax", "derivative"})


@dataclass(eq=False)
class Outcome:
    """A way's trace (None: not offered), the levers that acted, and what a session told."""

    trace: Trace | None
    acted: set[str] = field(default_factory=set)
    told: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Offers:
    """What a session's profile allows for a batch of ``examples``."""

    examples: int
    split_refusal: str
    replayable: tuple[str, ...]
    outermost: tuple[str, ...]
    fusion_refusal: str

    @staticmethod
    def of(session: Session, batch: Any, fusion_refusal: str) -> Offers:
        """Read them after ``prepare``."""
        profile = session.profile
        assert profile is not None
        modules = replayable_modules(profile)
        return Offers(
            examples_in(batch),
            split_refusal(session),
            tuple(sorted(modules)),
            tuple(sorted(_outermost(modules))),
            fusion_refusal,
        )


# Returns the plan of a step, or None where the profile does not offer it.
Force = Callable[[Offers, int], Plan | None]


def examples_in(batch: Any) -> int:
    """Return the first dimension of the batch's first tensor; 1 where there is none."""
    try:
        return likely_cut(batch).size(batch)
    except daf.DafError:
        return 1


def split_refusal(session: Session) -> str:
    """Return why a session cuts no batch, or ""."""
    return "" if session.profile is None else session.profile.split_refusal


def replayable_modules(profile: Profile) -> set[str]:
    """Return the modules that a plan may replay: as ``planning.replays`` finds them."""
    calls: dict[str, list[int]] = {}
    for index, call in enumerate(profile.calls):
        calls.setdefault(call.module, []).append(index)
    saving = {saving.call for saving in profile.savings}
    return {
        module
        for module, own in calls.items()
        if all(profile.calls[call].replayable for call in own)
        and any(profile.calls[call].parent >= 0 for call in own)
        and not any(_callers(profile.calls, call) & set(own) for call in own)
        and any(_callers(profile.calls, each) & set(own) or each in own for each in saving)
    }


def _callers(calls: tuple[CallProfile, ...], call: int) -> set[int]:
    found: set[int] = set()
    while call >= 0 and (call := calls[call].parent) >= 0:
        found.add(call)
    return found


def _outermost(modules: Collection[str]) -> Iterable[str]:
    for name in modules:
        parts = name.split(".")
        if not any(".".join(parts[:end]) in modules for end in range(1, len(parts))):
            yield name


def _plan(policy: Policy, micro_batch: int) -> Plan:
    return Plan(policy, micro_batch, 0, return_freed_blocks=False, reason="made by hand")


def force_exact(offers: Offers, _step: int) -> Plan:
    """Exact treatments and recomputation at every site, the batch whole."""
    return _plan(policy_for("exact"), offers.examples)


def force_split(offers: Offers, step: int) -> Plan | None:
    """Single examples while the learning rate is 0, then parts of which the last is shorter."""
    if offers.split_refusal or offers.examples < 2:
        return None
    uneven = max(1, 3 * offers.examples // 4)
    return _plan(plain_policy(), 1 if step < QUIET_STEPS else uneven)


def force_replay(offers: Offers, step: int) -> Plan | None:
    """Every module that is offered, nested ones too, then the outermost ones alone."""
    modules = offers.replayable if step < QUIET_STEPS else offers.outermost
    if not modules:
        return None
    return _plan(
        replace(plain_policy(), name="replay", replayed=frozenset(modules)), offers.examples
    )


def force_fused(offers: Offers, _step: int) -> Plan | None:
    """Fused and chunked operators wherever the session finds that they may be."""
    if offers.fusion_refusal:
        return None
    return _plan(with_fused_operators(exact_policy()), offers.examples)


def force_every(offers: Offers, step: int) -> Plan | None:
    """Exact treatments, parts and replay in one plan."""
    split, replay = force_split(offers, step), force_replay(offers, step)
    if split is None or replay is None:
        return None
    return _plan(replace(exact_policy(), replayed=replay.policy.replayed), split.micro_batch)


def force_codes(offers: Offers, _step: int) -> Plan:
    """Four bits wherever a code is sound, the batch whole."""
    return _plan(coded_policy(4), offers.examples)


@dataclass(eq=False)
class Recorder:
    """Takes down a way's steps."""

    work: Work
    steps: list[Step] = field(default_factory=list)

    def note(self, loss: float) -> None:
        buffers = _copies(self.work.model.named_buffers())
        self.steps.append(Step(loss, gradients_of(self.work), buffers, random_state()))

    def trace(self) -> Trace:
        parameters = _copies(self.work.model.named_parameters())
        carried = _pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), self.work.carried())
        return Trace(tuple(self.steps), parameters, carried)


def _copies(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: dense(each.detach()).clone() for name, each in named}


def random_state() -> tuple[int, ...]:
    """Return digests of the states of torch's, Python's and NumPy's generators."""
    numbers = np.random.get_state(legacy=True)
    return (
        hash(torch.get_rng_state().numpy().tobytes()),
        hash(random.getstate()),
        hash((numbers[1].tobytes(), numbers[2])),  # type: ignore[union-attr]
    )


def begin_step(work: Work, optimizer: torch.optim.Optimizer, step: int, rate: float) -> Any:
    """Set the step's learning rate, and return its batch."""
    for group in optimizer.param_groups:
        group["lr"] = 0.0 if step < QUIET_STEPS else rate
    work.before(step)
    return work.batch_of(step)


def train_plain(work: Work, rate: float, steps: int = QUIET_STEPS + LOUD_STEPS) -> Trace:
    """Train as a loop of one's own does."""
    return _train_by_hand(work, rate, steps, None).trace()


def train_compressed(work: Work, rate: float, **options: Any) -> Outcome:
    """Train a loop of one's own under ``daf.compress(model, **options)``."""
    compress = daf.compress(work.model, **options)
    recorder = _train_by_hand(work, rate, QUIET_STEPS + LOUD_STEPS, compress)
    rows = [site.as_dict() for site in compress.sites()]
    acted = _acted_at(rows)
    if any(fusion.pattern for fusion in compress.fusions()):
        acted.add("fused")
    return Outcome(recorder.trace(), acted)


def _train_by_hand(work: Work, rate: float, steps: int, compress: Any) -> Recorder:
    optimizer, recorder = work.make_optimizer(rate), Recorder(work)
    for step in range(steps):
        optimizer.zero_grad(set_to_none=True)
        batch = begin_step(work, optimizer, step, rate)
        if isinstance(optimizer, torch.optim.LBFGS):
            recorder.note(_step_by_closure(work, optimizer, batch, compress))
            continue
        recorder.note(gradient_by_hand(work, batch, compress))
        optimizer.step()
    return recorder


def _step_by_closure(
    work: Work, optimizer: torch.optim.Optimizer, batch: Any, compress: Any
) -> float:
    """Let the optimizer ask for the loss as often as it wants; return the first one."""
    losses = []

    def closure() -> float:
        optimizer.zero_grad(set_to_none=True)
        losses.append(gradient_by_hand(work, batch, compress))
        return losses[-1]

    optimizer.step(closure)
    return losses[0]


def gradient_by_hand(work: Work, batch: Any, compress: Any = None) -> float:
    """Leave the gradient of the mean loss in the parameters; return that loss."""
    if compress is None:
        loss = _mean(work.loss(work.model, batch))
    else:
        with compress:
            loss = _mean(work.loss(work.model, batch))
    loss.backward()
    return float(loss.detach())


def _mean(result: Any) -> Tensor:
    return result[0] / result[1] if isinstance(result, tuple) else result


def train_in_session(
    work: Work,
    rate: float,
    force: Force,
    seed: int,
    known: dict[str, Any],
    steps: int = QUIET_STEPS + LOUD_STEPS,
) -> Outcome:
    """Train in a session under the plans that ``force`` makes of what the profile offers.

    ``known``: receives what the first session of a case measured and proved; others go on with it.
    """
    optimizer, recorder = work.make_optimizer(rate), Recorder(work)
    budget = process_memory.resident_bytes() + ROOM_BYTES
    with daf.Session(work.model, optimizer, budget, tolerance=0) as session:
        if known:
            told = _gone_on(session, known)
        else:
            told = _prepared(session, work)
            known |= {"state": session.state_dict(), "fusion": told["fusion"]}
        seed_all(seed)  # the seed of every way's first step
        work.reset()
        acted: set[str] = set()
        offers = Offers.of(session, work.batch, known["fusion"])
        told |= {"split_refusal": offers.split_refusal, "replayable": len(offers.replayable)}
        if force(offers, 0) is None:
            return Outcome(None, acted, told)
        for step in range(steps):
            batch = begin_step(work, optimizer, step, rate)
            plan = force(Offers.of(session, batch, known["fusion"]), step)
            if plan is None:
                return Outcome(None, set(), told)
            session.plan = plan
            report = session.step(batch, work.loss)
            recorder.note(report.loss)
            acted |= acted_in(session, report, batch)
            told["overrun_bytes"] = max(told.get("overrun_bytes", 0), report.overrun_bytes)
        told["above_bytes"] = max(0, session.peak_bytes - budget)
    return Outcome(recorder.trace(), acted, told)


def _prepared(session: Session, work: Work) -> dict[str, Any]:
    """Profile; tell what ``prepare`` changed although it must change nothing."""
    before, random_before = _state(work), random_state()
    session.prepare(work.batch, work.loss)
    after = _state(work)
    changed = [name for name, tensor in before.items() if not torch.equal(tensor, after[name])]
    if random_state() != random_before:
        changed.append("random state")
    proof_ms = getattr(session, "proof_ms", None)
    fusion = session.fusion_refusal
    return {"prepare_changed": changed, "proof_ms": proof_ms, "fusion": fusion}


def _gone_on(session: Session, known: dict[str, Any]) -> dict[str, Any]:
    """Go on with what another session measured of the same case."""
    session.load_state_dict(known["state"])
    return {"fusion": known["fusion"]}


def _state(work: Work) -> dict[str, Tensor]:
    named = [*work.model.named_parameters(), *work.model.named_buffers()]
    there = (each for each in named if not nn.parameter.is_lazy(each[1]))
    return {name: each for name, each in _copies(there).items() if not each.isnan().any()}


def acted_in(session: Session, report: daf.StepReport, batch: Any) -> set[str]:
    """Return the levers that acted in a session's last step."""
    acted = _acted_at(site.as_dict() for site in session._capture.sites())
    if report.micro_batch < examples_in(batch) and not split_refusal(session):
        acted.add("split")
    if any(fusion.pattern for fusion in session._capture.fusions()):
        acted.add("fused")
    if session._capture.replays:
        acted.add("replay")
    return acted


def _acted_at(found: Iterable[dict[str, Any]]) -> set[str]:
    rows = list(found)
    methods = {row["method"] for row in rows if row["plain_bytes"]}
    acted = {"coded"} if methods & _CODES else set()
    again = any(row["method"] == "recompute" for row in rows)
    return (
        acted
        | ({"recomputed"} if again else set())
        | ({"exact"} if methods & {"mask", "pack", "drop"} else set())
    )
