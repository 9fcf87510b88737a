"""``daf bench accuracy``: plain PyTorch beside DAF and published codecs, over seeds.

Every (task, policy, seed) is one row, appended to a file of JSON lines as soon as it is
done; a run that is begun again goes on with the rows that are missing. All policies
of a seed begin from the same weights and see the same batches.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from daf.core.errors import DataError, RunFolderError
from daf.planning.planner import DEFAULT_TOLERANCE
from daf.session.rollback import Action, DivergenceWatch
from daf_bench.accuracy.gradient_bias import BiasTask
from daf_bench.accuracy.personalisation import BudgetTask
from daf_bench.accuracy.policies import APART, FUSED, PLANNED
from daf_bench.accuracy.policy_tracking import Follower
from daf_bench.accuracy.sub_bit import BelowTask
from daf_bench.accuracy.tasks import AccuracyTask, Effort, batches, evaluate, mean_loss
from daf_bench.doors.interval import mean_interval_of
from daf_bench.harness.result import BenchResult

POLICIES = (
    "plain",
    *(f"rotated-{bits}" for bits in (1, 2, 4)),
    *(f"allocated-{bits}" for bits in (1.1, 1.25, 1.5, 2, 3)),
    *(f"fused-{each}" for each in ("rotated-1", "rotated-2", "allocated-1.25", "allocated-1.5")),
    *(f"minmax-{bits}" for bits in (1, 2, 4, 8)),
    *(f"gact-{bits}" for bits in (1.5, 2, 4)),
    *(f"actnn-{bits}" for bits in (1.5, 2, 4)),
    *(f"alam-{bits}" for bits in (0.5, 1, 2)),
    *(f"{each}-{bits}" for each in ("tensor", "channel") for bits in (2, 4, 8)),
    *(f"apart-{each}" for each in ("gact-2", "actnn-2", "minmax-2", "alam-1")),
)
_OURS = ("rotated", "allocated", "spread", PLANNED)
_THEIRS = ("minmax", "gact", "actnn", "alam", "tensor", "channel")
FULL = Effort()
WITHIN_POINTS = 0.5
FAR_POINTS = 10.0
LEAST_SEEDS = 8  # of an interval: fewer seeds bound next to nothing
_FIRST_STEPS = 2  # the first step loads code, and its account is still incomplete

Row = dict[str, Any]
Task = AccuracyTask | BiasTask | BudgetTask | BelowTask


@dataclass(frozen=True, slots=True)
class AccuracyJob:
    """What is run."""

    tasks: Sequence[Task]
    policies: Sequence[str] = POLICIES
    seeds: Sequence[int] = (0, 1, 2)
    effort: Effort = FULL


QUICK = Effort(most_steps=12, most_tests=256)
QUICK_POLICIES = ("plain", "rotated-2", "allocated-1.5", "gact-2", "minmax-1", "alam-0.5")


def run(
    job: AccuracyJob,
    rows_file: Path | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> BenchResult:
    """Run what is missing in ``rows_file`` and judge all of it.

    A task that needs something that is not there gives one row that says what.

    Raises:
        RunFolderError: ``rows_file`` holds something else.
    """
    rows = read_rows(rows_file)
    done = {(row["task"], row["policy"], row["seed"], row["effort"]) for row in rows}
    effort = _effort_name(job.effort)
    for task in job.tasks:
        for seed in job.seeds:
            for policy in job.policies if isinstance(task, AccuracyTask) else task.policies:
                if (task.name, policy, seed, effort) in done:
                    continue
                on_progress(f"{task.name}, {policy}, seed {seed}")
                try:
                    row = measured_row(task, policy, seed, job.effort)
                except DataError as error:
                    row = {"task": task.name, "policy": policy, "seed": seed, "skipped": str(error)}
                row["effort"] = effort
                rows.append(row)
                if "skipped" not in row:
                    _append(rows_file, row)
    wanted = [row for row in rows if row["effort"] == effort]
    notes = (f"{100 * job.effort.steps_share:g} % of every task's steps", *_NOTES)
    return BenchResult("accuracy", wanted, figures(wanted, job.tasks), notes)


def metrics_of(job: AccuracyJob) -> dict[str, str]:
    """The metric of every task that is trained for accuracy, by the task's name."""
    return {each.name: each.metric for each in job.tasks if isinstance(each, AccuracyTask)}


_NOTES = (
    "saved_ratio: most bytes saved for backward in a step, plain over held, at plain's micro-batch",
    "step_ratio: median step time over plain's with the same seed; runs are not interleaved",
    "gact and actnn are re-implementations of the published allocations with min-max codes, alam "
    "of averaging neighbours",
    "behind_plain: how much worse the metric is than plain's with the same seeds, its mean and the "
    "ends of its interval of 95 % (Student's t), where there are eight seeds or more",
    "added_noise: (step, variance that codes added over the batch's own), measured while training; "
    "noise_is_relative: of steps that divide by gradients, not of the gradient (AdamW)",
    "evicted_share: of the codes' bytes, in the steps in which a falling cap evicts planes",
)


def measured_row(task: Task, policy: str, seed: int, effort: Effort) -> Row:
    """Whatever a task measures of one policy.

    Raises:
        DataError: something that it needs is not there.
    """
    if isinstance(task, AccuracyTask):
        return train_once(task, policy, seed, effort)
    return {"task": task.name, "policy": policy, "seed": seed} | task.measure(policy, seed, effort)


def train_once(task: AccuracyTask, policy_name: str, seed: int, effort: Effort) -> Row:
    """One row: train under one policy and evaluate; a loss that is not finite ends it early."""
    prepared = task.prepare(seed, effort)
    model, loss_fn = prepared.model, prepared.task.loss
    model.train()
    follower = Follower(policy_name, model, loss_fn, prepared.optimizer, prepared.steps)
    divergence = DivergenceWatch()
    diverged_at: int | None = None
    held_rows: list[tuple[int, int]] = []
    step_ms: list[float] = []
    losses: list[float] = []
    order = hashlib.blake2b(digest_size=8)
    for step, batch in enumerate(batches(prepared, seed)):
        coded = follower.policy_for(step, batch, seed)
        order.update(batch[0].contiguous().numpy().tobytes())
        start_s = time.perf_counter()
        prepared.optimizer.zero_grad()
        with coded:
            loss = mean_loss(loss_fn(model, batch))
        follower.after_forward(step)
        losses.append(float(loss.detach()))
        if divergence.note(step, losses[-1]) in (Action.ROLL_BACK, Action.STOP):
            diverged_at = step if diverged_at is None else diverged_at
        if not math.isfinite(losses[-1]):
            break
        loss.backward()  # type: ignore[no-untyped-call]
        prepared.optimizer.step()
        prepared.schedule.step()
        step_ms.append(1000 * (time.perf_counter() - start_s))
        held_rows.append((coded.stats.plain_peak_bytes, coded.stats.held_peak_bytes))
        follower.note_noise(step, batch)
    finished = len(step_ms) == prepared.steps and _is_finite(model)
    plain_bytes = max((plain for plain, _ in held_rows), default=0)
    held_bytes = max((held for _, held in held_rows), default=0)
    metrics = evaluate(model, prepared.task, effort.most_tests) if finished else {}
    return {
        "task": task.name,
        "policy": policy_name,
        "seed": seed,
        "finished": finished,
        "steps": len(step_ms),
        "metrics": metrics,
        "before": dict(prepared.before),
        "final_loss": statistics.mean(losses[-10:]),
        "saved_bytes_plain": plain_bytes,
        "saved_bytes": held_bytes,
        "saved_ratio": plain_bytes / held_bytes if held_bytes else None,
        "step_ms": statistics.median(step_ms[_FIRST_STEPS:] or step_ms or [0.0]),
        "fitted_ms": follower.fitted_ms,
        "fits": follower.fits,
        "added_noise": follower.noise,
        "noise_is_relative": follower.is_relative,
        "diverged_at": diverged_at,
        "evicted_share": follower.evicted_share,
        "data_order": order.hexdigest(),
    }


def _is_finite(model: torch.nn.Module) -> bool:
    return all(bool(each.isfinite().all()) for each in model.parameters())


def _effort_name(effort: Effort) -> str:
    return f"{effort.steps_share:g}/{effort.most_steps}/{effort.most_tests}"


# --- rows ---------------------------------------------------------------------------------------


def read_rows(rows_file: Path | None) -> list[Row]:
    """The rows that a file holds; a last line that was cut off is left out.

    Raises:
        RunFolderError: another line is no row.
    """
    if rows_file is None or not rows_file.exists():
        return []
    lines = rows_file.read_text("utf-8").split("\n")
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            _ = row["task"], row["policy"], row["seed"], row["effort"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            if number == len(lines):  # the process ended in the middle of it
                break
            raise RunFolderError(
                f"{rows_file}, line {number} is no row of daf bench accuracy ({error}); name "
                "another file with --rows"
            ) from error
        rows.append(row)
    return rows


def _append(rows_file: Path | None, row: Row) -> None:
    if rows_file is None:
        return
    rows_file.parent.mkdir(parents=True, exist_ok=True)
    content = rows_file.read_bytes() if rows_file.exists() else b""
    whole = content[: content.rfind(b"\n") + 1]  # without a line that was cut off
    if whole != content:
        rows_file.write_bytes(whole)
    with rows_file.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


# --- figures ------------------------------------------------------------------------------------


def figures(rows: Iterable[Row], tasks: Iterable[Task]) -> dict[str, float]:
    """Per task and policy means and spreads; per task the largest saved ratio near plain's metric.

    *Near*: the mean is within half a point of plain's over the same seeds (for a loss, within 1 %)
    and within plain's spread over seeds (its range), where that is larger than nothing.
    """
    found: dict[str, float] = {}
    listed = [row for row in rows if "skipped" not in row]
    for task in tasks:
        own = [row for row in listed if row["task"] == task.name]
        if not isinstance(task, AccuracyTask):
            found |= task.figures(own)
            continue
        means = {}
        for policy in dict.fromkeys(row["policy"] for row in own):
            group = [row for row in own if row["policy"] == policy]
            name = f"{task.name}/{policy}"
            if not all(row["finished"] for row in group):
                found[f"{name}/unfinished"] = sum(not row["finished"] for row in group)
                continue
            values = [row["metrics"][task.metric] for row in group]
            means[policy] = statistics.mean(values)
            found[f"{name}/{task.metric}"] = means[policy]
            found[f"{name}/spread"] = max(values) - min(values)
            found[f"{name}/saved_ratio"] = min(row["saved_ratio"] for row in group)
            found |= _noise_figures(name, group) | _behind_plain(task, name, own, policy)
            if (ratio := _step_ratio(group, own)) is not None:
                found[f"{name}/step_ratio"] = ratio
        found |= _near_plain(task, own, means, found)
        found |= _failures(task, own, means)
    return found


def _failures(task: AccuracyTask, own: list[Row], means: dict[str, float]) -> dict[str, float]:
    """Policies under which a model does not learn, and the share of such runs that was caught.

    It does not learn if a run ends early or is far behind plain's: ``FAR_POINTS``, or a loss
    larger by a quarter. Caught: codes were seen to add more than the tolerance, or the loss astray.
    """
    if "plain" not in means:
        return {}
    plain, found = means["plain"], {}
    for policy in dict.fromkeys(row["policy"] for row in own):
        group = [row for row in own if row["policy"] == policy]
        failed = [row for row in group if _is_far(task, row, plain)]
        if failed:
            found[f"{task.name}/{policy}/failed"] = float(len(failed))
            caught = sum(map(_is_caught, failed)) / len(failed)
            found[f"{task.name}/{policy}/caught"] = caught
    return found


def _is_far(task: AccuracyTask, row: Row, plain: float) -> bool:
    if not row["finished"]:
        return True
    value = row["metrics"][task.metric]
    return bool(value < plain - FAR_POINTS if task.higher_is_better else value > 1.25 * plain)


def _is_caught(row: Row) -> bool:
    noises = [noise for _, noise in row.get("added_noise") or ()]
    too_much = any(noise is None or noise > DEFAULT_TOLERANCE for noise in noises)
    return too_much or row.get("diverged_at") is not None


def _noise_figures(name: str, group: list[Row]) -> dict[str, float]:
    """The worst added noise seen, and for DAF's own allocation what measuring it took."""
    noises = [noise for row in group for _, noise in row.get("added_noise") or () if noise]
    found = {f"{name}/added_noise": max(noises)} if noises else {}
    evicted = [row["evicted_share"] for row in group if row.get("evicted_share") is not None]
    if evicted:
        found[f"{name}/evicted_share"] = statistics.mean(evicted)
    # By the median step, so that a machine that was halted does not make measuring look cheap.
    trained = sum(row["steps"] * row["step_ms"] for row in group)
    if "allocated-" in name and trained:
        found[f"{name}/sensitivity_overhead"] = sum(row["fitted_ms"] for row in group) / trained
    return found


def _step_ratio(group: list[Row], own: list[Row]) -> float | None:
    plain = {row["seed"]: row["step_ms"] for row in own if row["policy"] == "plain"}
    ratios = [row["step_ms"] / plain[row["seed"]] for row in group if plain.get(row["seed"])]
    return statistics.median(ratios) if ratios else None


def _losses(task: AccuracyTask, own: list[Row], policy: str) -> list[float]:
    """How much worse than plain's a policy's metric is, of each seed that both have."""
    plain, theirs = (
        {r["seed"]: r["metrics"][task.metric] for r in own if r["policy"] == name and r["finished"]}
        for name in ("plain", policy)
    )
    sign = 1.0 if task.higher_is_better else -1.0
    return [sign * (plain[seed] - theirs[seed]) for seed in sorted(plain.keys() & theirs.keys())]


def _behind_plain(task: AccuracyTask, name: str, own: list[Row], policy: str) -> dict[str, float]:
    """The mean loss of the metric to plain's with the same seeds, and its interval of 95 %."""
    losses = [] if policy == "plain" else _losses(task, own, policy)
    if len(losses) < LEAST_SEEDS:
        return {}
    found = mean_interval_of(losses)
    return {
        f"{name}/behind_plain": found.middle,
        f"{name}/behind_plain_low": found.low,
        f"{name}/behind_plain_high": found.high,
        f"{name}/behind_plain_seeds": float(len(losses)),
    }


def _near_plain(
    task: AccuracyTask, own: list[Row], means: dict[str, float], found: dict[str, float]
) -> dict[str, float]:
    if "plain" not in means:
        return {}
    plain, spread = means["plain"], found[f"{task.name}/plain/spread"]
    allowed = WITHIN_POINTS if task.higher_is_better else 0.01 * plain
    if spread > 0:
        allowed = min(allowed, spread)

    def loss(policy: str) -> float:
        behind = _losses(task, own, policy)
        return statistics.mean(behind) if behind else math.inf

    def best(kinds: tuple[str, ...]) -> float:
        near = [each for each in means if each.startswith(kinds) and loss(each) <= allowed]
        return max((found[f"{task.name}/{each}/saved_ratio"] for each in near), default=0.0)

    ours, theirs = best(_OURS), best(_THEIRS)
    fused, apart = (
        best(tuple(prefix + each for each in kinds))
        for prefix, kinds in ((FUSED, _OURS), (APART, _THEIRS))
    )
    result = {f"{task.name}/saved_ratio_within_half_point": max(ours, fused)}
    if ours and theirs:
        result[f"{task.name}/bytes_vs_best_baseline"] = theirs / ours
    if fused and apart:
        result[f"{task.name}/fused_bytes_vs_best_published"] = apart / fused
    return result
