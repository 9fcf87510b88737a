"""Record one source tree: ``python record.py OUT SECTION...``, a JSON file by section.

``DAF_GOLDEN_TREE`` names the tree, whose ``src`` and ``benchmarks`` are on ``PYTHONPATH``. Nothing
that is recorded depends on how long anything took, on addresses, or on the process's memory.
``python record.py --profile FOLDER WORKLOAD...`` measures profiles and stores them instead.
"""

from __future__ import annotations

import gc
import json
import lzma
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import kernel_bytes
import torch
from adapter import TREE, digest, operators_of, plan_of, planned, profile_of, reworded, steady
from torch import Tensor, nn

WORKLOADS = ("w1", "w2a", "w2b", "w2c", "w3", "w4", "w5", "w6")
PROFILES = Path(__file__).parents[2] / "tests" / "planning" / "profiles"
BUDGETS = 6
MANY_SAVINGS = 250  # of a profile whose plans take long, so that every second budget must do
POLICIES = ("sage", "checkpoint", "accumulate", "reduce", "quantize")  # beside "optimal"
LEVELS = ("plain", "exact", "8-bit", "4-bit", "3-bit", "2-bit", "1-bit")
STEPS = 2  # operators are fused from the second on
SEED = 1
Record = dict[str, Any]


# --- workloads --------------------------------------------------------------------------------


def workload(name: str) -> Record:
    """One workload at its small size, on data that are made up or ship with a dependency."""
    sources = TREE.get("sources", "Sources")(None)
    loaded = TREE.get("workloads", "find_workload")(name).load(sources, True)
    found: Record = {"plain": _plain(loaded)}
    for label, options in _ways().items():
        found[label] = _compressed(loaded, options)
    held_bytes = found["4 bits, small chunks"]["ledger"]["held_peak_bytes"]
    in_pool = {"bits": 4, "pool_bytes": held_bytes * 4 // 5}
    found["4 bits, small pool"] = _refusable(partial(_compressed, loaded, in_pool))
    for label, options in {"exact": {"bits": "exact"}, "2 bits": {"bits": 2}}.items():
        found[f"session, {label}"] = _session(loaded, fused=True, **options)
    made = _plans_made(name, loaded)
    found["plans made"] = {label: _made_record(plan) for label, plan in made.items()}
    for label, plan in (_plans_by_hand(loaded) | _plans_to_train_by(name, made)).items():
        found[f"plan, {label}"] = _session(loaded, plan)
    return found


def _ways() -> Mapping[str, Record]:
    """Arguments of ``daf.compress``."""
    planned, coded = (
        TREE.get("policy", each) for each in ("with_planned_operators", "coded_policy")
    )
    both = {"fused": True, "chunked": True}
    return {
        "exact": {"bits": "exact"},
        "exact, fused and chunked": {"bits": "exact", **both},
        "2 bits": {"bits": 2},
        "2 bits, fused and chunked": {"bits": 2, **both},
        "8 bits": {"bits": 8},
        "4 bits, small chunks": {"policy": planned(coded(4), 1 << 14)},
    }


def _plain(loaded: Any) -> Record:
    work, found = loaded.build(), {}
    for step in range(STEPS):
        batch = work.batch(step)
        torch.manual_seed(SEED + step)
        loss = _mean(work.task.loss(work.model, batch))
        loss.backward()
        found[f"step {step}"] = _outcome(work.model, loss)
        work.optimizer.step()
        work.optimizer.zero_grad()
    return {**found, "weights": digest(*work.model.state_dict().values())}


def _compressed(loaded: Any, options: Record) -> Record:
    """Steps in the user's own loop, and what the last one says of itself."""
    import daf

    work, found = loaded.build(), {}
    capture = daf.compress(work.model, **options)
    for step in range(STEPS):
        batch = work.batch(step)
        torch.manual_seed(SEED + step)
        with capture:
            loss = _mean(work.task.loss(work.model, batch))
        loss.backward()
        found[f"step {step}"] = _outcome(work.model, loss)
        work.optimizer.step()
        work.optimizer.zero_grad()
    found["ledger"] = steady(capture.stats)
    found["sites"] = [_site(each) for each in capture.sites()]
    found["fusions"] = [steady(each) for each in capture.fusions()]
    return found


def _session(loaded: Any, plan: Any = None, **options: Any) -> Record:
    """Steps of a session without a budget, under a plan if one is given."""
    import daf

    work, found = loaded.build(), {}
    spill = TREE.get("spill", "SpillOptions")
    with tempfile.TemporaryDirectory() as folder:
        options["spill"] = spill(directory=folder, allow_memory=True)
        with daf.Session(work.model, work.optimizer, None, **options) as session:
            if plan is not None:
                session.plan = replace(plan, return_freed_blocks=False)
            for step in range(STEPS):
                torch.manual_seed(SEED + step)
                report = session.step(work.batch(step), work.task.loss)
                found[f"step {step}"] = {**_gradients(work.model), "report": steady(report)}
            names = ("saved_bytes_plain", "saved_bytes_peak", "evicted_bytes")
            found["bytes"] = {each: getattr(session, each) for each in names}
            found["sites"] = [steady(each) for each in session.explain()]
    found = {**found, "weights": digest(*work.model.state_dict().values())}
    if plan is not None and plan.micro_batch < loaded.batch_size:
        _forget_first_pages(found)
    return _without_waiting(found) if any(map(_is_spilled, found["sites"])) else found


def _forget_first_pages(found: Record) -> None:
    """Drop what the first step of a cut batch held, of which a page's size is a part.

    The pool fits pages to what lived last. That is the few examples that proved the cut, where
    trees before such proofs guessed; in the second step it is the first one's tensors in both.
    """
    del found["step 0"]["report"]["saved_bytes"], found["bytes"]["saved_bytes_peak"]


def _is_spilled(site: Record) -> bool:
    return bool(site["spilled_bytes"])


def _without_waiting(found: Record) -> Record:
    """Without bytes that a thread writes to disk meanwhile: held or not, as the disk is fast."""
    for step in range(STEPS):
        found[f"step {step}"]["report"].pop("saved_bytes", None)
    found["bytes"].pop("saved_bytes_peak", None)
    return found


def _mean(result: Any) -> Tensor:
    return result[0] / result[1] if isinstance(result, tuple) else result


def _outcome(model: nn.Module, loss: Tensor) -> Record:
    return {"loss": digest(loss), **_gradients(model)}


def _gradients(model: nn.Module) -> Record:
    """A hash for every parameter's gradient, so that the first that differs has a name."""
    named = ((name, each.grad) for name, each in model.named_parameters())
    return {"gradients": {name: digest(grad) for name, grad in named if grad is not None}}


def _site(report: Any) -> Record:
    """Its row, and all of its treatment, which the row only names."""
    return {**steady(report.as_dict()), "treatment": steady(report.treatment)}


def _plans_by_hand(loaded: Any) -> dict[str, Any]:
    """Replay of all blocks, spill of all that may wait on disk, and smaller micro-batches."""
    plan, policy, need, treatment, method = (
        TREE.get("policy" if name != "Plan" else "plan", name)
        for name in ("Plan", "Policy", "Need", "Treatment", "Method")
    )
    work, plain = loaded.build(), TREE.get("policy", "plain_policy")()
    replayed = replace(plain, name="replay", replayed=frozenset(work.blocks))
    to_disk = MappingProxyType({need_: treatment(method.SPILL) for need_ in need})
    spilled = policy("spill", to_disk, rederive=False)
    found = {
        "replay": plan(replayed, loaded.batch_size, 0),
        "spill": plan(spilled, loaded.batch_size, 0),
    }
    if loaded.batch_size > 1 and not TREE.get("microbatch", "split_refusal")(work.model):
        half = -(-loaded.batch_size // 2)
        coded = TREE.get("policy", "coded_policy")(2)
        for name, each in (("plain", plain), ("replay", replayed), ("2 bits", coded)):
            found[f"micro-batches, {name}"] = plan(each, half, 0)
    return found


def _plans_made(name: str, loaded: Any) -> dict[str, Any]:
    """Plans made from the stored profile at the third budget, carried out at the small size."""
    own, fused, budgets = _stored(name)
    paths = frozenset(path for path, _ in loaded.build().model.named_modules())
    found = {}
    for policy, also in (("optimal", (fused,) if fused else ()), ("sage", ()), ("checkpoint", ())):
        for tolerance in (None, 0.0):
            plan = _refusable(partial(_made, own, budgets[2], policy, tolerance, also))
            if isinstance(plan, dict):
                continue
            there = replace(plan.policy, replayed=plan.policy.replayed & paths)
            label = f"{policy}, tolerance {tolerance}"
            found[label] = replace(plan, policy=there, micro_batch=own.batch_size)
    return found


def _made_record(plan: Any) -> Record:
    """A plan that another tree can read, and what it is compared by."""
    plain = TREE.get("plain", "to_plain")(plan)
    return {"plan": plain, "predicted_step_ms": plan.predicted_step_ms.hex()}


def _plans_to_train_by(name: str, made: dict[str, Any]) -> dict[str, Any]:
    """The plans made, or those of the commit compared with: then only code can differ."""
    if (others := os.environ.get("DAF_GOLDEN_PLANS")) is None:
        return made
    found = json.loads((Path(others) / f"{name}.json").read_text())[name]["plans made"]
    return {label: plan_of(each["plan"]) for label, each in found.items()}


# --- plans ------------------------------------------------------------------------------------


def plans() -> Record:
    """Plans of every policy from every stored profile, at up to six budgets."""
    return {f"{name}, {kind}": each for name in WORKLOADS for kind, each in _plans_of(name)}


def _stored(name: str) -> tuple[Any, Any, list[int]]:
    """A workload's profile, that of fused operators where there is one, and budgets (bytes)."""
    found = json.loads(lzma.decompress((PROFILES / f"{name}.json.xz").read_bytes()))
    own, fused = found["own"], found["fused"]
    return profile_of(own), fused and profile_of(fused), found["budgets"]


def _plans_of(name: str) -> Iterator[tuple[str, Record]]:
    own, fused, budgets = _stored(name)
    also = () if fused is None else (fused,)
    few = budgets[1::3]
    if len(own.savings) > MANY_SAVINGS:
        budgets, few = budgets[::2], budgets[1:2]
    for tolerance, some in ((None, budgets), (0.0, few)):
        best = _by_budget(own, some, "optimal", tolerance, also)
        yield f"optimal, tolerance {tolerance}", best
    for policy in POLICIES:
        yield policy, _by_budget(own, budgets, policy, None, ())
    for policy in LEVELS:
        yield policy, _by_budget(own, few, policy, None, ())
    weighed, *others = (_weighed(each) for each in (own, *also))
    yield "optimal, weighed", _by_budget(weighed, few, "optimal", None, tuple(others))
    yield "quantize, weighed", _by_budget(weighed, few, "quantize", None, ())
    yield "no tolerance for codes", _by_budget(own, few[:1], "quantize", 0.0, ())
    beside = {f"{budget}": _beside(own, budget, also) for budget in few}
    yield "beside the best", beside


def _weighed(profile: Any) -> Any:
    """The profile with made-up sensitivities, different from site to site."""
    sites = sorted(profile.lossy_sites, key=str)
    weights = {site: 0.25 + 1.5 * (place % 7) / 6 for place, site in enumerate(sites)}
    return replace(profile, weights=MappingProxyType(weights), noise_per_weight=0.002)


def _by_budget(
    own: Any, budgets: list[int], policy: str, tolerance: float | None, also: tuple[Any, ...]
) -> Record:
    """The plan at each budget, or why there is none, and the least budget of all."""
    found: Record = {}
    for budget in budgets:
        plan = _refusable(partial(_made, own, budget, policy, tolerance, also))
        found[f"{budget}"] = _plan(plan)
    terms = {"policy": policy, "tolerance": tolerance, "also": also, "allowed": _allowed()}
    found["least"] = _refusable(partial(planned, "least_feasible_budget", own, **terms))
    return found


def _made(own: Any, budget: int, policy: str, tolerance: Any, also: tuple[Any, ...]) -> Any:
    terms = {"policy": policy, "tolerance": tolerance, "allowed": _allowed()}
    return planned("make_plan", own, budget, also=also, **terms)


def _allowed() -> Any:
    """What a session can carry out that was asked neither to spill nor to release gradients."""
    methods = frozenset(TREE.get("policy", "Method")) - {TREE.get("policy", "Method").SPILL}
    return TREE.get("options", "Allowed")(methods=methods, release_gradients=False)


def _beside(own: Any, budget: int, also: tuple[Any, ...]) -> Record:
    """Where all is allowed, what sessions ask for: a quick plan, a first, a tighter, rivals."""
    quick = _refusable(partial(planned, "make_plan", own, budget, also=also, quickly=True))
    if isinstance(quick, dict):
        return quick
    profiles = {True: also[-1] if also else own, False: own}
    first = planned("first_plan", profiles[quick.policy.fused], quick, budget)
    make_plans = TREE.module("planner").make_plans
    rivals = make_plans((own, *also), budget, quickly=True, with_others=True)
    tighter = _refusable(partial(planned, "tighter_plan", own, quick, also=also))
    named = {"quick": quick, "first": first, "tighter": tighter, **dict(enumerate(rivals))}
    return {f"{name}": _plan(each) for name, each in named.items()}


def _refusable(make: Callable[[], Any]) -> Any:
    """What is made, or why that is refused."""
    try:
        return make()
    except (TREE.get("errors", "BudgetError"), TREE.get("errors", "PoolFullError")) as error:
        least_bytes = getattr(error, "least_bytes", None)
        return {"refused": reworded(str(error)), "least_bytes": least_bytes}


def _plan(plan: Any) -> Any:
    """Every field of a plan and its policy; long ones as counts and hashes."""
    if plan is None or isinstance(plan, dict):
        return plan
    found, policy = steady(replace(plan, policy=None)), plan.policy
    found["policy"] = {name: steady(getattr(policy, name)) for name in _SHORT}
    found["operators"] = operators_of(policy)
    treatments = Counter(f"{each.method.value} {each.bits}" for each in policy.by_site.values())
    hashes = {name: digest(_sorted(getattr(policy, name))) for name in _LONG}
    choices = digest(found.pop("choices"))
    return {**found, "treatments": dict(sorted(treatments.items())), **hashes, "choices": choices}


_SHORT, _LONG = ("name", "rederive", "replayed", "chunk_bytes"), ("by_need", "by_site", "weights")


def _sorted(mapping: Mapping[Any, Any]) -> list[tuple[str, Any]]:
    return sorted((str(key), steady(value)) for key, value in mapping.items())


# --- profiles ---------------------------------------------------------------------------------


def measure_profile(name: str, folder: Path) -> None:
    """Measure a workload at full size, with PyTorch's operators and fused ones, and store that."""
    import daf

    sources = TREE.get("sources", "Sources")(None)
    work = TREE.get("workloads", "find_workload")(name).load(sources, False).build()
    module, batch = TREE.module("planner"), work.batch(0)
    with daf.Session(work.model, work.optimizer, "60GB") as session:
        session.prepare(batch, work.task.loss)
        own = session.profile
        ends = module.least_feasible_budget(own), module.kept_peak_bytes(own)
    with daf.Session(work.model, work.optimizer, sum(ends) // 2, sensitivity=False) as session:
        plan = session.prepare(batch, work.task.loss)
        own, policy = session.profile, TREE.get("policy", "with_planned_operators")(plan.policy, 1)
        fused = session.profile_of(replace(plan, policy=policy))
    _store(folder / f"{name}.json.xz", own, None if fused is own else fused)


def _store(path: Path, own: Any, fused: Any) -> None:
    """Both profiles, and budgets from the least, where they are densest, to what plain takes."""
    module, plain = TREE.module("planner"), TREE.get("plain", "to_plain")
    also = () if fused is None else (fused,)
    least = module.least_feasible_budget(own, also=also, allowed=_allowed())
    range_bytes = module.kept_peak_bytes(own) - least
    shares = ((place / (BUDGETS - 1)) ** 2 for place in range(BUDGETS))
    budgets = [least + int(share * range_bytes) for share in shares]
    content = {"budgets": budgets, "own": plain(own), "fused": fused and plain(fused)}
    text = json.dumps(content, separators=(",", ":")).encode()
    path.write_bytes(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME))


# --- the process ------------------------------------------------------------------------------


@contextmanager
def _repeatable() -> Iterator[None]:
    """One thread, and objects die with their last reference, never by the collector's clock."""
    torch.set_num_threads(1)
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def section(name: str) -> Record:
    """``kernels``, ``plans`` or a workload."""
    gc.collect()
    if name in WORKLOADS:
        return workload(name)
    return {"kernels": kernel_bytes.record, "plans": plans}[name]()


def main(arguments: list[str]) -> None:
    """See the module."""
    if arguments[0] == "--profile":
        torch.set_num_threads(1)
        for name in arguments[2:]:
            measure_profile(name, Path(arguments[1]))
        return
    with _repeatable():
        found = {name: section(name) for name in arguments[1:]}
    Path(arguments[0]).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
