"""Would codes of less than a bit be worth having? What they would save beside DAF's own widths.

The best code of half a bit that we know of and that is right on average: of every eight
coefficients behind the rotation, which one is greatest in magnitude and its sign (four bits),
scaled as the others are (EDEN: Vargaftik et al., ICML 2022). Its error follows from how large the
greatest of eight Gaussians is. There is no kernel of it; here its bytes and its error are put
among the choices of every site, as measured on a network that has learned for some steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from statistics import mean
from typing import Any

from daf.core.code_errors import relative_error
from daf.core.code_format import header_bytes, plane_bytes
from daf.core.policy import Method, Treatment
from daf.profiling.optimizer_probe import divides_by_gradients
from daf_bench.accuracy.bit_allocation import Choice, CodedSite, least_bytes, least_variance
from daf_bench.accuracy.policies import Example, allocated_sites, budget_of
from daf_bench.accuracy.policy_tracking import example_of
from daf_bench.accuracy.tasks import AccuracyTask, Effort, Prepared, batches, train_plainly

GROUP = 8
WIDTHS = (1.1, 1.25, 1.5, 2.0)
STEPS = 25
_ONE_BIT = Treatment(Method.ROTATED, 1)
_HALF_A_BIT = Treatment(Method.REGISTERED, codec="greatest of eight")  # nobody codes by it
Row = dict[str, Any]


def greatest_of(count: int) -> float:
    """E[max |g|] of ``count`` independent unit Gaussians, by the trapezoidal rule."""
    step = 1e-3
    places = (step * index for index in range(1, 12_000))
    return step * (0.5 + sum(1 - math.erf(place / math.sqrt(2)) ** count for place in places))


def half_a_bit_error() -> float:
    """Relative mean-square error: of a group, the greatest holds this share of the energy."""
    return GROUP / greatest_of(GROUP) ** 2 - 1


@dataclass(frozen=True, slots=True)
class BelowTask:
    """Some networks, each by its task, which the rows have for a policy."""

    tasks: Mapping[str, AccuracyTask]

    @property
    def name(self) -> str:
        """As rows and figures have it."""
        return "below-one-bit"

    @property
    def policies(self) -> tuple[str, ...]:
        """Which network."""
        return tuple(self.tasks)

    def measure(self, policy: str, seed: int, effort: Effort) -> Row:
        """By mean width: bytes of DAF's codes over those that add as much with half bits too."""
        learned = _learned(self.tasks[policy].prepare(seed, effort), seed)
        sites, elements, _ = allocated_sites(learned)
        wider = [_with_half_a_bit(each, elements[each.site]) for each in sites]
        fewer = {}
        for bits in WIDTHS:
            ours = least_variance(sites, budget_of(sites, elements, bits))
            fewer[f"{bits:g}"] = ours.nbytes / least_bytes(wider, ours.variance).nbytes
        return {"fewer_bytes": fewer}

    def figures(self, rows: Iterable[Row]) -> dict[str, float]:
        """Means over seeds."""
        listed, found = list(rows), {}
        for policy in dict.fromkeys(row["policy"] for row in listed):
            group = [row["fewer_bytes"] for row in listed if row["policy"] == policy]
            for bits in group[0]:
                name = f"{self.name}/{policy}/fewer_bytes_at_{bits}"
                found[name] = mean(each[bits] for each in group)
        return found


def _learned(prepared: Prepared, seed: int) -> Example:
    """The model after some steps without codes, and a part of the batch that comes next."""
    drawn = batches(prepared, seed)
    train_plainly(prepared, islice(drawn, min(STEPS, prepared.steps - 1)))
    relative = divides_by_gradients(prepared.optimizer)
    return example_of(prepared.model, prepared.task.loss, next(drawn), relative=relative)


def _with_half_a_bit(coded: CodedSite, elements: int) -> CodedSite:
    one = next((each for each in coded.choices if each.treatment == _ONE_BIT), None)
    if one is None:  # a smooth activation's, which has a table of its own
        return coded
    nbytes = plane_bytes(elements, 4) // GROUP + header_bytes(elements)
    variance = one.variance / relative_error(_ONE_BIT) * half_a_bit_error()
    return CodedSite(coded.site, (*coded.choices, Choice(_HALF_A_BIT, nbytes, variance)))
