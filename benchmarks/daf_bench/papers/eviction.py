"""What importance is worth when planes go: DAF's ``accuracy collapse``, by the gradient's error.

Codes of four bits lie in a pool whose cap is a share of their bytes. The pool evicts the least
important planes: by measured sensitivities, by the same for every site, by inverted ones, and by
the measured planes' importances shuffled among all planes; beside it whole activations go, by the
measured ones. Errors are lengths relative to plain PyTorch's gradient; what eviction adds is
counted beside what the whole codes err by.

``python -m daf_bench.papers.eviction JSON`` measures one workload.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from unittest.mock import patch

from torch import Tensor

import daf
from daf.codecs import codes
from daf.core.policy import Policy, Site, coded_policy
from daf.pool.paged_pool import plane_importance
from daf.pool.store import Evicts, PoolOptions
from daf.sensitivity.estimate import measure_sensitivity
from daf.step.microbatch import likely_cut
from daf_bench.accuracy.falling import INVERTED, MEASURED, SHUFFLED, UNIFORM, inverted
from daf_bench.harness.row_log import Row
from daf_bench.papers.coded_gradients import answer_with, gradient, measured_by, relative_error
from daf_bench.workloads.trainable import Trainable

WORKLOADS = ("w6", "w3")  # ResNet-20, and a transformer
BITS, SHARES, PASSES = 4, (0.85, 0.7), 4
COMPARED = 0.7  # the share of the figures
WHOLE = "whole activations"  # by measured importance
Importances = Callable[[int, int, float], list[float]]


def measured(workload: str, folder: Path | None, *, is_small: bool) -> Row:
    """Return the row of a workload, measured in a process of its own."""
    found = measured_by("daf_bench.papers.eviction", workload, folder, is_small=is_small)
    return {"part": "eviction", "workload": workload, **found}


def gains(rows: Iterable[Row], over: str) -> list[float]:
    """Return by workload the error that eviction adds under ``over`` over measured importance."""
    found = ({each["share"]: each for each in row["caps"]}[COMPARED] for row in rows)
    return [each[over] / each[MEASURED] for each in found]


def _measure(work: Trainable) -> Row:
    plain = gradient(work, daf.compress(work.model, bits="plain"))
    weights = _weights(work)
    whole = daf.compress(work.model, policy=coded_policy(BITS))
    before = relative_error(gradient(work, whole), plain)
    held_bytes = whole.stats.held_peak_bytes
    caps = [
        {"share": share, **_added(work, plain, weights, int(share * held_bytes), before)}
        for share in SHARES
    ]
    return {"held_bytes": held_bytes, "error": before, "caps": caps}


def _weights(work: Trainable) -> Mapping[Site, float]:
    batch = work.batch(0)
    cut, examples = likely_cut(batch), max(4, work.order.batch_size // 4)
    part = cut.take(batch, 0, examples)
    # As they run: a code that serves several sites is as important as all of them together.
    found = measure_sensitivity(
        work.model, work.task.loss, part, coded_policy(2), separate_codes=False
    )
    return MappingProxyType(found.weights())


def _added(
    work: Trainable, plain: Tensor, weights: Mapping[Site, float], cap: int, before: float
) -> dict[str, float]:
    """Return by importance the error that eviction adds to that of whole codes."""
    uniform = coded_policy(BITS)
    own = replace(uniform, weights=weights)
    seen: list[float] = []

    def noted(count: int, bits: int, weight: float = 1.0) -> list[float]:
        found = plane_importance(count, bits, weight)
        seen.extend(found)
        return found

    with _importances(noted):
        gradient(work, daf.compress(work.model, policy=own, pool_bytes=cap))

    def added(
        policy: Policy, shuffled: list[float] | None = None, evicts: Evicts = "planes"
    ) -> float:
        way = daf.compress(work.model, policy=policy, pool_bytes=PoolOptions(cap, evicts))
        squares = []
        for seed in range(PASSES):
            with _importances(_dealt(shuffled, seed) if shuffled else plane_importance):
                squares.append(relative_error(gradient(work, way), plain) ** 2)
        assert way.stats.evicted_bytes > 0
        return math.sqrt(max(0.0, sum(squares) / PASSES - before**2))

    return {
        MEASURED: added(own),
        UNIFORM: added(uniform),
        INVERTED: added(replace(uniform, weights=MappingProxyType(inverted(weights)))),
        SHUFFLED: added(own, seen),
        WHOLE: added(own, evicts="activations"),
    }


def _dealt(values: list[float], seed: int) -> Importances:
    """Return a function that gives every plane one of these, each once, in a drawn order."""
    drawn = iter(random.Random(seed).sample(values, len(values)))
    return lambda _count, bits, _weight=1.0: [next(drawn) for _ in range(bits)]


@contextmanager
def _importances(of: Importances) -> Iterator[None]:
    with patch.object(codes, "plane_importance", of):
        yield


if __name__ == "__main__":
    answer_with(_measure)
