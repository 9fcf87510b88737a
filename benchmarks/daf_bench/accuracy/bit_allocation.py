"""Which width every coded tensor gets: least added variance for given bytes, or the reverse.

Every site has choices, each with bytes and a variance that it adds to the gradient; one is
taken at every site. The sum of variances falls by most for each byte along the lower convex
hull of every site's choices, so taking hull steps in that order is the Lagrangian optimum
(Everett, Operations Research 1963); what is left of the limit goes to exchanges between
pairs of sites. The first step that does not fit gives a bound: no allocation is better.

``actnn_widths`` and ``gact_widths`` are re-implementations of two published allocations, for
comparison.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from daf.core.code_errors import relative_error
from daf.core.code_format import code_bytes
from daf.core.errors import BudgetError, DataError
from daf.core.policy import KEEP, Method, Site, Treatment
from daf.core.units import format_bytes
from daf.planning.highs import LinearProgram, Rows

Floats = NDArray[np.float64]
_MOST_EXCHANGES = 1000
_ELEMENT_BYTES = 4
STANDARD_TREATMENTS = (
    *(Treatment(Method.ROTATED, bits) for bits in (1, 2, 3, 4)),
    Treatment(Method.MINMAX, 8),
    KEEP,
)


RELATIVE_GAP = 1e-3
MOST_NODES = 200


class Choice(NamedTuple):
    """One way to store a site's tensor: bytes held, and squared gradient error added."""

    treatment: Treatment
    nbytes: int
    variance: float


@dataclass(frozen=True, slots=True)
class CodedSite:
    """A site and what can be done there, in any order."""

    site: Site
    choices: tuple[Choice, ...]


@dataclass(frozen=True, slots=True)
class Allocation:
    """What was chosen; ``bound``: what was minimised cannot be less for any other choice."""

    treatments: Mapping[Site, Treatment]
    nbytes: int
    variance: float
    bound: float


def held_bytes(elements: int, treatment: Treatment, element_bytes: int = _ELEMENT_BYTES) -> int:
    """Bytes that a code of ``elements`` holds, its headers included; kept: of the tensor."""
    if treatment == KEEP:
        return element_bytes * elements
    return code_bytes(elements, treatment.bits, headers=treatment.is_code)


def coded_sites(
    elements: Mapping[Site, int],
    variance_per_error: Mapping[Site, float],
    treatments: Iterable[Treatment] = STANDARD_TREATMENTS,
    element_bytes: int = _ELEMENT_BYTES,
) -> list[CodedSite]:
    """Every site of ``elements`` with the same choices.

    Args:
        elements: of the tensor saved at each site.
        variance_per_error: squared gradient error per unit of relative code error, as
            ``Sensitivity`` has it; in any unit that is the same for all.
        treatments: to choose among.
        element_bytes: of one element as PyTorch would keep it.

    Raises:
        DataError: a site has no sensitivity.
    """
    missing = sorted(str(site) for site in elements.keys() - variance_per_error.keys())
    if missing:
        raise DataError(
            f"asked to allocate {len(elements)} sites, but {', '.join(missing[:3])} "
            f"({len(missing)} in all) have no sensitivity; measure those too or leave them out"
        )
    listed = tuple(treatments)
    return [
        CodedSite(
            site,
            tuple(
                Choice(
                    each,
                    held_bytes(count, each, element_bytes),
                    variance_per_error[site] * relative_error(each),
                )
                for each in listed
            ),
        )
        for site, count in elements.items()
    ]


def least_variance(sites: Sequence[CodedSite], budget_bytes: int) -> Allocation:
    """The least added variance that ``budget_bytes`` can have.

    Raises:
        BudgetError: not even the smallest codes fit; ``least_bytes`` would do.
    """
    least = sum(min(choice.nbytes for choice in each.choices) for each in sites)
    if least > budget_bytes:
        raise BudgetError(
            f"asked to hold {len(sites)} codes in {format_bytes(budget_bytes)}; the smallest "
            f"take {format_bytes(least)}: allow that much, or replay or spill some",
            least,
        )
    return _solved(sites, budget_bytes, _variance, _nbytes)


def least_bytes(sites: Sequence[CodedSite], most_variance: float) -> Allocation:
    """The fewest bytes whose added variance is at most ``most_variance``.

    For a tolerance that is ``tolerance * Sensitivity.batch_variance``.

    Raises:
        DataError: the best codes add more.
    """
    least = sum(min(choice.variance for choice in each.choices) for each in sites)
    if least > most_variance:
        raise DataError(
            f"asked for codes that add a variance of at most {most_variance:.3g}; the best add "
            f"{least:.3g}: allow that much, or let tensors be kept"
        )
    return _solved(sites, most_variance, _nbytes, _variance)


def uniform(sites: Sequence[CodedSite], budget_bytes: int) -> Allocation:
    """The same treatment everywhere: of those that fit, the one that adds least.

    Raises:
        BudgetError: none fits.
    """
    totals: dict[Treatment, list[Choice]] = {}
    for each in sites:
        for choice in each.choices:
            totals.setdefault(choice.treatment, []).append(choice)
    whole = [each for each in totals.values() if len(each) == len(sites)]
    fitting = [each for each in whole if sum(map(_nbytes, each)) <= budget_bytes]
    if not fitting:
        least = min((sum(map(_nbytes, each)) for each in whole), default=None)
        raise BudgetError(
            f"asked for one width everywhere within {format_bytes(budget_bytes)}; none fits",
            None if least is None else int(least),
        )
    best = min(fitting, key=lambda each: sum(map(_variance, each)))
    return _allocation(sites, best, 0.0)


# --- the solver: least cost within a limit on the load ----------------------------------------

Measure = Callable[[Choice], float]


def _nbytes(choice: Choice) -> float:
    return choice.nbytes


def _variance(choice: Choice) -> float:
    return choice.variance


class _Step(NamedTuple):
    """Along one site's hull: to choice ``to`` for ``load`` more, saving ``saved``."""

    rate: float
    site: int
    to: int
    load: float
    saved: float


def _solved(sites: Sequence[CodedSite], limit: float, cost: Measure, load: Measure) -> Allocation:
    steps: list[_Step] = []
    hulls = [_lower_hull(each.choices, cost, load) for each in sites]
    chosen = [hull[0] for hull in hulls]
    for index, hull in enumerate(hulls):
        for place, (low, high) in enumerate(pairwise(hull)):
            more, saved = load(high) - load(low), cost(low) - cost(high)
            steps.append(_Step(saved / more, index, place + 1, more, saved))
    used, total = sum(map(load, chosen)), sum(map(cost, chosen))
    bound, closed = total, False
    blocked: set[int] = set()
    for step in sorted(steps, key=lambda step: (-step.rate, step.site, step.to)):
        fits = used + step.load <= limit
        if not closed:
            bound -= step.saved * min(1.0, (limit - used) / step.load)
            closed = not fits
        if fits and step.site not in blocked:
            chosen[step.site] = hulls[step.site][step.to]
            used += step.load
        else:
            blocked.add(step.site)
    exchanged = _exchanged(sites, chosen, limit, cost, load)
    return _allocation(sites, _proven(sites, exchanged, limit, cost, load), bound)


def _proven(
    sites: Sequence[CodedSite], found: list[Choice], limit: float, cost: Measure, load: Measure
) -> list[Choice]:
    """What HiGHS finds, where that is better: exchanges of pairs can miss it on few sites.

    Costs are relative to those found, since HiGHS also stops at an absolute gap of a millionth.
    """
    most = sum(map(cost, found))  # what costs more by itself is in nothing better
    every = [(site, choice) for site, each in enumerate(sites) for choice in each.choices]
    flat = [(site, choice) for site, choice in every if cost(choice) <= most]
    scale_cost = max(1e-30, most)
    scale_load = max(1e-30, *(load(choice) for _, choice in flat))
    program = LinearProgram(
        np.array([cost(choice) / scale_cost for _, choice in flat]), np.ones(len(flat))
    )
    owner, column = [site for site, _ in flat], list(range(len(flat)))
    program.add_rows(Rows(owner, column, 1.0, lower=1.0, upper=1.0, count=len(sites)))
    loads = np.array([[load(choice) / scale_load for _, choice in flat]])
    program.add_rows(Rows.of_dense(loads, lower=-np.inf, upper=limit / scale_load))
    whole = np.ones(len(flat), dtype=np.bool_)
    answer = program.solve(whole=whole, relative_gap=RELATIVE_GAP, most_nodes=MOST_NODES)
    if answer.amounts is None:
        return found
    better = [flat[place][1] for place in np.flatnonzero(answer.amounts > 0.5)]
    within = len(better) == len(sites) and sum(map(load, better)) <= limit
    return better if within and sum(map(cost, better)) < sum(map(cost, found)) else found


def _lower_hull(choices: Sequence[Choice], cost: Measure, load: Measure) -> list[Choice]:
    """By rising load and falling cost, with falling savings for each unit of load."""
    hull: list[Choice] = []
    for choice in sorted(choices, key=lambda each: (load(each), cost(each))):
        if hull and cost(choice) >= cost(hull[-1]):
            continue
        while len(hull) > 1 and _rate(hull[-2], hull[-1], cost, load) <= _rate(
            hull[-1], choice, cost, load
        ):
            hull.pop()
        hull.append(choice)
    return hull


def _rate(low: Choice, high: Choice, cost: Measure, load: Measure) -> float:
    return (cost(low) - cost(high)) / (load(high) - load(low))


def _exchanged(
    sites: Sequence[CodedSite], chosen: list[Choice], limit: float, cost: Measure, load: Measure
) -> list[Choice]:
    """The best change at one site or at two, again and again until none is left."""
    every = [(index, choice) for index, each in enumerate(sites) for choice in each.choices]
    owner = np.array([index for index, _ in every])
    loads = np.array([load(choice) for _, choice in every])
    costs = np.array([cost(choice) for _, choice in every])
    for _ in range(_MOST_EXCHANGES):
        now_load = np.array([load(choice) for choice in chosen])
        now_cost = np.array([cost(choice) for choice in chosen])
        more, saved = loads - now_load[owner], now_cost[owner] - costs
        pair = _best_pair(owner, more, saved, limit - now_load.sum())
        if pair is None or saved[list(pair)].sum() <= 1e-12 * max(1e-300, now_cost.sum()):
            break
        for place in pair:
            chosen[every[place][0]] = every[place][1]
    return chosen


def _best_pair(
    owner: NDArray[np.int64], more: Floats, saved: Floats, room: float
) -> tuple[int, ...] | None:
    """Columns of the one or two changes at different sites that save most within the room."""
    useful = np.flatnonzero((saved > 0) | (more < 0))
    if not len(useful):
        return None
    alone = np.where(more[useful] <= room, saved[useful], -np.inf)
    together = saved[useful][:, None] + saved[useful][None]
    fits = (more[useful][:, None] + more[useful][None] <= room) & (
        owner[useful][:, None] != owner[useful][None]
    )
    together = np.where(fits, together, -np.inf)
    best = int(alone.argmax())
    first, second = np.unravel_index(int(together.argmax()), together.shape)
    if alone[best] >= together[first, second]:
        return (int(useful[best]),) if alone[best] > 0 else None
    return (int(useful[first]), int(useful[second])) if together[first, second] > 0 else None


def _allocation(sites: Sequence[CodedSite], chosen: Sequence[Choice], bound: float) -> Allocation:
    return Allocation(
        {each.site: choice.treatment for each, choice in zip(sites, chosen, strict=True)},
        sum(choice.nbytes for choice in chosen),
        sum(choice.variance for choice in chosen),
        max(0.0, bound),
    )


# --- published allocations, re-implemented -----------------------------------------------------


def actnn_widths(
    elements: Mapping[Site, int], sensitivities: Mapping[Site, float], average_bits: float
) -> dict[Site, int]:
    """ActNN's allocation among layers (Chen et al., ICML 2021, and its published code).

    Minimises Σ C / (2^b - 1)² for a given mean width, greedily: all begin at 8 bits, and that
    width falls by one whose loss for each element is least.

    Args:
        elements: of each tensor.
        sensitivities: C of each: ``actnn_sensitivity``.
        average_bits: mean over all elements.
    """
    return _greedy_widths(
        elements, sensitivities, average_bits, {b: b - 1 for b in range(8, 1, -1)}
    )


def gact_widths(
    elements: Mapping[Site, int], sensitivities: Mapping[Site, float], average_bits: float
) -> dict[Site, int]:
    """GACT's allocation among tensors (Liu et al., ICML 2022, and its published code).

    The same objective and greedy, over the widths 8, 4, 2 and 1.

    Args:
        elements: of each tensor.
        sensitivities: C of each: the squared distance of two gradients under different seeds of
            that tensor's 1-bit code.
        average_bits: mean over all elements.
    """
    return _greedy_widths(elements, sensitivities, average_bits, {8: 4, 4: 2, 2: 1})


def actnn_sensitivity(
    squared_ranges: float,
    gradient_energy: float,
    *,
    group_elements: int,
    pixels: int,
    kernel_places: int = 1,
    depthwise_groups: int = 1,
) -> float:
    """ActNN's C of one example's input of a convolution or linear layer.

    ``kernel_places / 4 / depthwise_groups * G ‖R‖² / I * ‖dY‖²``, as its published code has it.

    Args:
        squared_ranges: Σ (max - min)² over the example's groups.
        gradient_energy: squared length of the loss's gradient at the layer's output.
        group_elements: G, in one group (256 as published).
        pixels: I, places of a channel (1 for a linear layer).
        kernel_places: of a convolution's kernel.
        depthwise_groups: of a grouped convolution.
    """
    range_per_pixel = squared_ranges * group_elements / pixels
    return kernel_places / 4 / depthwise_groups * range_per_pixel * gradient_energy


def _greedy_widths(
    elements: Mapping[Site, int],
    sensitivities: Mapping[Site, float],
    average_bits: float,
    below: Mapping[int, int],
) -> dict[Site, int]:
    top = max(below)
    if not 1 <= average_bits <= top:
        raise DataError(f"asked for {average_bits} bits on average; give 1 to {top}")
    sites = list(elements)
    widths = dict.fromkeys(sites, top)

    def push(index: int) -> None:
        site, width = sites[index], widths[sites[index]]
        loss = sensitivities[site] * (_per_level(below[width]) - _per_level(width))
        heapq.heappush(queue, (loss / (elements[site] * (width - below[width])), index))

    queue: list[tuple[float, int]] = []
    for index in range(len(sites)):
        push(index)
    total = top * sum(elements.values())
    target = average_bits * sum(elements.values())
    while total > target:
        _, index = heapq.heappop(queue)
        site = sites[index]
        total -= elements[site] * (widths[site] - below[widths[site]])
        widths[site] = below[widths[site]]
        if widths[site] > 1:
            push(index)
    return widths


def _per_level(bits: int) -> float:
    return float((2**bits - 1) ** -2.0)
