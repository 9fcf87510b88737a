"""Judges a case: trains it every way, and holds each against plain's training."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import daf
from daf_bench.conformance import ways
from daf_bench.conformance.case import Case, NotApplicableError, Work, built, is_lazy, seed_all
from daf_bench.conformance.compare import (
    MOST_NOISE,
    NOISE_FACTOR,
    TOLERANCE,
    Trace,
    Verdict,
    compared,
    dense,
    distance,
    gradients_of,
    length,
)
from daf_bench.conformance.tight import train_tightly

Row = dict[str, Any]
TIGHT = "tight"
LEVERS = ("split", "replay", "recomputed", "fused", "coded")
CODED_SEEDS = 8
EXPECTED_SEEDS = 12
# Trials of how far a rounding moves plain: usually, and where it moves it far.
ROUNDED_TRIALS, CHAOTIC_TRIALS = 2, 6
# Trials of what a few roundings do: one of these may take the side of a ReLU that a way took.
SEVERAL_TRIALS, SEVERAL_UNITS = 12, 4
# There a way is one more trial, which lies beyond the furthest of six once in seven.
CHAOTIC_FACTOR = 2.0
# Ways that change no rounding: plain's bits, where plain repeats its own.
_BITWISE = ("exact", "replay", "compress exact")
# Beyond this share of its square the mean of eight coded gradients is told as far.
FAR = 0.25
# Steps are small beside the parameters, so that rounding does not grow into another path.
RATE_SHARE, MOST_RATE = 1e-3, 0.1


@dataclass(frozen=True, slots=True)
class Judge:
    """What plain training of a case is like; ``is_random``: another seed, another gradient."""

    case: Case
    seed: int
    rate: float
    plain: Trace
    is_repeatable: bool
    spread: float
    is_random: bool
    draws: bool
    plain_ms: float
    known: dict[str, Any] = field(default_factory=dict)  # what its first session measured
    moved: dict[bool, list[Trace]] = field(default_factory=dict)  # by roundings; with dropout off
    calm: list[Judge] = field(default_factory=list)  # of the copy whose norms damp

    def fresh(self, *, quiet: bool = False) -> Work:
        """Return a fresh copy, as plain trained it; ``quiet``: without dropout."""
        work = built(self.case, self.seed)
        if quiet:
            silence(work.model)
        seed_all(self.seed)
        return work


def try_case(case: Case, seed: int) -> Row:
    """Return the case's row: how every way ended, which levers acted, what differed."""
    row: Row = {"case": case.name, "group": case.group}
    try:
        judge = _judge(case, seed)
    except NotApplicableError as error:
        return row | {"outcome": "skipped", "reason": str(error)}
    row |= {"outcome": "tried", "random": judge.is_random, "repeats": judge.is_repeatable}
    wanted = {"exact": WAYS["exact"], TIGHT: _tightly} if case.is_sizable else WAYS
    row["ways"] = {name: _tried(judge, name, train) for name, train in wanted.items()}
    row |= {"plain_ms": judge.plain_ms, "examples": ways.examples_in(judge.fresh().batch)}
    return row


def _judge(case: Case, seed: int) -> Judge:
    """Train plainly, twice and with another seed.

    Raises:
        NotApplicableError: plain PyTorch does not train it.
    """
    try:
        rate = _rate(built(case, seed), seed)
        traces = []
        start_s = time.perf_counter()
        for each in (seed, seed, seed + 1):
            work = built(case, seed)
            seed_all(seed if is_lazy(work.model) else each)  # a seed draws a lazy model's weights
            work.reset()
            before = ways.random_state()
            traces.append(ways.train_plain(work, rate))
            draws = ways.random_state() != before
        taken_ms = 1000 * (time.perf_counter() - start_s)
    except NotApplicableError:
        raise
    except Exception as error:
        words = f"plain does not train: {type(error).__name__}: {error!s:.200}"
        raise NotApplicableError(words) from error
    first = traces[0]
    if not all(math.isfinite(step.loss) for trace in traces for step in trace.steps):
        raise NotApplicableError("plain's loss is not finite")
    again = compared(first, traces[1], 0.0, with_random=True)
    other = compared(first, traces[2], 0.0, with_random=False)
    step_ms = taken_ms / (3 * len(first.steps))
    spread = again.difference
    return Judge(
        case, seed, rate, first, again.is_bitwise, spread, not other.is_bitwise, draws, step_ms
    )


def _rate(work: Work, seed: int) -> float:
    """Return a learning rate whose first step moves parameters by a thousandth."""
    seed_all(seed)
    work.reset()
    work.before(0)
    ways.gradient_by_hand(work, work.batch_of(0))
    gradient = math.hypot(*map(length, gradients_of(work).values()))
    if not any(each is not None for each in gradients_of(work).values()):
        raise NotApplicableError("no parameter has a gradient")
    weights = math.hypot(*(length(dense(each.detach())) for each in work.model.parameters()))
    if not 0.0 < gradient < math.inf:
        return 0.01
    return min(MOST_RATE, RATE_SHARE * weights / gradient)


def _tried(judge: Judge, name: str, train: Callable[[Judge], ways.Outcome]) -> Row:
    """Return how one way ended: not offered, raised, or right or wrong."""
    try:
        outcome = train(judge)
    except Exception as error:
        words = f"{type(error).__name__}: {error!s:.300}"
        allowed = type(error).__name__ in judge.case.right_errors
        return {"outcome": "caught" if allowed else "raised", "words": words, "at": _place(error)}
    found: Row = {"acted": sorted(outcome.acted), **_notable(outcome.told)}
    if outcome.trace is None:
        return found | {"outcome": "not offered"}
    if name.startswith("coded"):
        coded = _coded_outcome(judge, outcome.trace)
        is_first = coded["outcome"] == "right" and name == "coded compress"
        return found | coded | (_mean_of_codes(judge) if is_first else {})
    verdict = _verdict(judge, name, outcome)
    if verdict is None:
        verdict = _calm_verdict(judge, train)
        found["calm"] = verdict is not None
    if verdict is None:
        return found | {"outcome": "not judged"}
    found |= {"outcome": "right" if verdict.is_right else "wrong", "apart": verdict.difference}
    if name in _BITWISE and judge.is_repeatable:
        found["bitwise"] = verdict.is_bitwise
    return found | ({} if verdict.is_right else {"words": verdict.where})


def _place(error: BaseException) -> str:
    trace, place = error.__traceback__, ""
    while trace is not None:
        code = trace.tb_frame.f_code
        place = f"{code.co_filename.rpartition('/')[2]}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


def _notable(told: Row) -> Row:
    return {name: value for name, value in told.items() if value not in (None, "", 0, [])}


def _verdict(judge: Judge, name: str, outcome: ways.Outcome) -> Verdict | None:
    """Hold a way's trace against plain's; None where chance leaves nothing to hold it against."""
    assert outcome.trace is not None
    is_split = "split" in outcome.acted
    plain, is_random = judge.plain, judge.is_random
    if is_split and is_random:
        is_judged, found = _without_dropout(judge, name)
        return found if is_judged else _expected(judge, name)
    if is_random and not judge.is_repeatable and judge.spread > MOST_NOISE:
        return None
    noise = min(MOST_NOISE, NOISE_FACTOR * judge.spread)
    # A session builds lazy modules before its first step, which then draws no weights.
    with_random = not (is_split and judge.draws) and not is_lazy(judge.fresh().model)
    return _held(judge, plain, outcome.trace, noise, with_random=with_random)


def _held(
    judge: Judge,
    plain: Trace,
    other: Trace,
    noise: float,
    *,
    with_random: bool = False,
    quiet: bool = False,
) -> Verdict | None:
    """Hold a trace against plain's; None where a rounding moves plain itself further."""
    tolerance = TOLERANCE[judge.fresh().precision]
    found = compared(plain, other, tolerance, with_random=with_random, noise=noise)
    if found.is_right or math.isinf(found.difference):
        return found
    moved = _moved_by_rounding(judge, plain, quiet=quiet)
    near = [compared(each, other, tolerance, with_random=False, noise=noise) for each in moved]
    if any(each.is_right for each in near):  # it took another side of a ReLU, as a rounding does
        return compared(plain, other, tolerance, with_random=with_random, noise=found.difference)
    rounding = max(_apart(plain, each) for each in moved)
    if _is_chaotic(rounding) and found.difference <= CHAOTIC_FACTOR * rounding:
        return None
    wider = noise + min(MOST_NOISE, NOISE_FACTOR * rounding)
    verdict = compared(plain, other, tolerance, with_random=with_random, noise=wider)
    if verdict.is_right:
        return verdict
    for seed in range(SEVERAL_TRIALS):  # a way rounds more often than once
        trial = _moved(judge, seed, SEVERAL_UNITS, quiet=quiet)
        if compared(trial, other, tolerance, with_random=False, noise=noise).is_right:
            return compared(
                plain, other, tolerance, with_random=with_random, noise=found.difference
            )
    return verdict


def _moved_by_rounding(judge: Judge, plain: Trace, *, quiet: bool) -> list[Trace]:
    """Return what plain does when every parameter moves by about its last place.

    Two trials; more where these go far, since the furthest of two says little then.
    """
    if quiet in judge.moved:
        return judge.moved[quiet]
    moved = judge.moved.setdefault(quiet, [])
    for seed in range(1, 1 + CHAOTIC_TRIALS):
        if seed > ROUNDED_TRIALS and not _is_chaotic(max(_apart(plain, each) for each in moved)):
            break
        moved.append(_moved(judge, seed, 1, quiet=quiet))
    return moved


def _moved(judge: Judge, seed: int, units: int, *, quiet: bool) -> Trace:
    """Return what plain does when every parameter moves by about ``units`` of its last place."""
    work = judge.fresh(quiet=quiet)
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for each in work.model.parameters():
            if not nn.parameter.is_lazy(each) and each.is_floating_point():
                signs = torch.randint(0, 2, each.shape, generator=noise) * 2 - 1
                each.mul_(1 + units * torch.finfo(each.dtype).eps * signs.to(each.dtype))
    seed_all(judge.seed)
    work.reset()
    return ways.train_plain(work, judge.rate)


def _is_chaotic(rounding: float) -> bool:
    return NOISE_FACTOR * rounding > MOST_NOISE


def _apart(first: Trace, second: Trace) -> float:
    return compared(first, second, 0.0, with_random=False).difference


def _calm_verdict(judge: Judge, train: Callable[[Judge], ways.Outcome]) -> Verdict | None:
    """Judge a way on a copy whose norms have an epsilon of 1, by which roundings grow less."""
    if judge.is_random:
        return None
    if not judge.calm:
        case = replace(judge.case, build=partial(_calmed, judge.case.build))
        try:
            judge.calm.append(_judge(case, judge.seed))
        except NotApplicableError:
            return None
    (calm,) = judge.calm
    trace = train(calm).trace
    return None if trace is None else _held(calm, calm.plain, trace, 0.0)


def _calmed(build: Callable[[], Work]) -> Work:
    work = build()
    norms = [each for each in work.model.modules() if isinstance(getattr(each, "eps", None), float)]
    if not norms:
        raise NotApplicableError("no norm has an epsilon")
    for norm in norms:
        norm.eps = 1.0
    return work


def _without_dropout(judge: Judge, name: str) -> tuple[bool, Verdict | None]:
    """Judge a split way of the model with dropout off: False if it is random even so."""
    traces = []
    for seed in (judge.seed, judge.seed + 1):
        work = judge.fresh(quiet=True)
        seed_all(seed)
        work.reset()
        traces.append(ways.train_plain(work, judge.rate))
    if not compared(*traces, 0.0, with_random=False).is_bitwise:
        return False, None
    outcome = _tightly(judge, quiet=True) if name == TIGHT else _forced(judge, name, quiet=True)
    if outcome.trace is None:
        return False, None
    return True, _held(judge, traces[0], outcome.trace, 0.0, quiet=True)


def _expected(judge: Judge, name: str) -> Verdict:
    """Hold the mean first gradient over seeds against plain's mean, within four deviations."""
    sums = [_mean_gradient(judge, None), _mean_gradient(judge, FORCED[name])]
    (plain, plain_noise), (other, other_noise) = sums
    apart = math.hypot(*(distance(plain[key], other[key]) for key in plain))
    whole = math.hypot(*map(length, plain.values()))
    allowed = 4 * math.hypot(plain_noise, other_noise) + MOST_NOISE * whole
    where = f"mean gradient over {EXPECTED_SEEDS} seeds: {apart:.3g} apart"
    return Verdict(apart <= allowed, False, apart / whole if whole else apart, where)


def _mean_gradient(judge: Judge, force: ways.Force | None) -> tuple[dict[str, Tensor], float]:
    """Return the mean gradient over seeds, and the deviation of that mean."""
    found: list[dict[str, Tensor]] = []
    for seed in range(EXPECTED_SEEDS):
        work = judge.fresh()
        seed_all(seed)
        if force is None:
            steps = ways.train_plain(work, 0.0, 1).steps
        else:
            trace = ways.train_in_session(work, 0.0, force, seed, judge.known, 1).trace
            steps = () if trace is None else trace.steps
        found.append({k: v for k, v in steps[0].gradients.items() if v is not None})
    zeros = {key: torch.zeros_like(value) for each in found for key, value in each.items()}
    found = [zeros | each for each in found]  # what a seed left out has no gradient
    mean = {key: torch.stack([each[key] for each in found]).mean(0) for key in found[0]}
    squares = sum(distance(each[key], mean[key]) ** 2 for each in found for key in mean)
    return mean, math.sqrt(squares / (EXPECTED_SEEDS * (EXPECTED_SEEDS - 1)))


def _coded_outcome(judge: Judge, trace: Trace) -> Row:
    """Coded steps: finite where plain's are, of its shapes, and near it on average."""
    for plain, coded in zip(judge.plain.steps, trace.steps, strict=True):
        for name, gradient in plain.gradients.items():
            other = coded.gradients.get(name)
            if (gradient is None) != (other is None):
                return {"outcome": "wrong", "words": f"{name!r} has a gradient in one way only"}
            if gradient is None or other is None:
                continue
            if gradient.shape != other.shape or gradient.dtype != other.dtype:
                return {"outcome": "wrong", "words": f"{name!r} of another shape or type"}
            if gradient.isfinite().all() and not other.isfinite().all():
                return {"outcome": "not finite", "words": f"{name!r} is not finite"}
    return {"outcome": "right"}


def _mean_of_codes(judge: Judge) -> Row:
    """Return the squared error of one coded gradient, and of the mean over seeds (2 bits)."""
    exact: dict[str, Tensor] = {
        name: each for name, each in judge.plain.steps[0].gradients.items() if each is not None
    }
    whole = sum(length(each) ** 2 for each in exact.values())
    mean = {name: torch.zeros_like(each) for name, each in exact.items()}
    single = 0.0
    for seed in range(CODED_SEEDS):
        work = judge.fresh()
        work.reset()
        work.before(0)
        ways.gradient_by_hand(work, work.batch_of(0), daf.compress(work.model, bits=2, seed=seed))
        coded = {name: each for name, each in gradients_of(work).items() if each is not None}
        single += sum(distance(exact[n], coded[n]) ** 2 for n in exact) / CODED_SEEDS
        for name in mean:
            mean[name] += coded[name] / CODED_SEEDS
    left = sum(distance(exact[n], mean[n]) ** 2 for n in exact)
    if not whole:
        return {}
    is_far = left > max(FAR * whole, single / 2)
    return {"noise": single / whole, "mean_error": left / whole, "far": is_far}


def silence(model: nn.Module) -> None:
    """Turn dropout off, also where a module reads its share from a number of its own."""
    for part in model.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = 0.0
        for name, value in list(vars(part).items()):
            if ("drop" in name or "layerdrop" in name) and isinstance(value, float):
                setattr(part, name, 0.0)


FORCED: dict[str, ways.Force] = {
    "exact": ways.force_exact,
    "split": ways.force_split,
    "replay": ways.force_replay,
    "fused": ways.force_fused,
    "every": ways.force_every,
    "coded session": ways.force_codes,
}


def _forced(judge: Judge, name: str, *, quiet: bool = False) -> ways.Outcome:
    work = judge.fresh(quiet=quiet)
    return ways.train_in_session(work, judge.rate, FORCED[name], judge.seed, judge.known)


def _tightly(judge: Judge, *, quiet: bool = False) -> ways.Outcome:
    return train_tightly(partial(judge.fresh, quiet=quiet), judge.rate, judge.seed)


def _compressed(options: dict[str, Any], judge: Judge) -> ways.Outcome:
    work = judge.fresh()
    work.reset()
    return ways.train_compressed(work, judge.rate, **options)


WAYS: dict[str, Callable[[Judge], ways.Outcome]] = {
    **{name: partial(_forced, name=name) for name in FORCED},
    "compress exact": partial(_compressed, {"bits": "exact"}),
    "compress fused": partial(_compressed, {"bits": "exact", "fused": True, "chunked": True}),
    "coded compress": partial(_compressed, {"bits": 2}),
}
