"""Ways to store activations that are compared for accuracy, by name.

``plain``; ``rotated-B`` and ``minmax-B``, one width everywhere; and allocations whose codes take
as many bytes as B bits everywhere would: ``allocated-B`` by measured sensitivity, smooth
activations' derivatives among what has a width (``spread-B``: attention's queries, keys and
weights too, which otherwise have eight bits),
``gact-B`` and ``actnn-B`` as published, with min-max codes. ActNN's formula takes the
energy of a block for its range, in which blocks of Gaussian values are proportional.
``planned``: by measured sensitivity the fewest bytes within the default tolerance, as a plan takes
them that has no room to spare.
``falling-KIND``: four bits, of which half goes in every second step (``falling``).
``tensor-B`` and ``channel-B`` are min-max codes of one width whose range is the whole tensor's or
each channel's, as DAF was published (arXiv 2507.07149).
``alam-B`` codes means of two neighbours (of four below one bit) in min-max codes of B bits
per element, as ALAM does. All but DAF's own are re-implementations. ``fused-`` before a name:
the same codes, held by operators that are fused and chunked where that can be; ``apart-``: no
code serves a second tensor, as where codes were published.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import nn

from daf.capture.capture import Capture
from daf.core.code_errors import GAUSSIAN_BLOCK_SQUARED_RANGE, minmax_error
from daf.core.code_format import BLOCK_ELEMENTS, header_bytes, plane_bytes
from daf.core.errors import UnknownNameError
from daf.core.policy import (
    KEEP,
    Method,
    Need,
    Policy,
    Site,
    Treatment,
    coded_policy,
    plain_policy,
    with_chunked_operators,
    with_fused_operators,
)
from daf.core.reports import SiteReport
from daf.operators.chunked.weight_gradient import CHUNK_BYTES
from daf.planning.planner import DEFAULT_TOLERANCE
from daf.sensitivity.estimate import measure_sensitivity
from daf.sensitivity.result import Sensitivity
from daf.step.microbatch import LossFunction, likely_cut, read_loss
from daf.step.state_snapshot import preserved_state
from daf_bench.accuracy.averaged_codec import averaged
from daf_bench.accuracy.bit_allocation import (
    STANDARD_TREATMENTS,
    CodedSite,
    actnn_widths,
    coded_sites,
    gact_widths,
    held_bytes,
    least_bytes,
    least_variance,
)
from daf_bench.accuracy.falling import FALLING, KINDS, UNIFORM, falling_policy

_VALUE_NEEDS = (Need.LINEAR, Need.NORM, Need.PRODUCT)
_OWN_CODES = (Method.ROTATED, Method.MINMAX, Method.DERIVATIVE)
POLICY_FORMS = (
    *("plain", "rotated-B", "minmax-B", "allocated-B", "spread-B"),
    *("gact-B", "actnn-B", "alam-B", "tensor-B", "channel-B"),
)
PLANNED = "planned"
FUSED, APART = "fused-", "apart-"
_SPREAD_LEAST_BITS = 3  # of q, k and attention's weights; plans give them more
_CODES = [each for each in STANDARD_TREATMENTS if each != KEEP]
_OF_WEIGHTS = [Treatment(Method.MINMAX, bits) for bits in (*range(_SPREAD_LEAST_BITS, 7), 8)]
# Errors of derivatives are the same at every step: where they count, they are worth any bytes.
_OF_SMOOTH = [*(Treatment(Method.DERIVATIVE, bits) for bits in (2, 3, 4)), KEEP]
_REFITTED = (PLANNED, "allocated", "spread", "gact", "actnn")


@dataclass(frozen=True, slots=True)
class Example:
    """What a policy may be fitted to: a model, a loss and one training batch.

    ``rederive``: whether one code may serve several tensors. ``chunked``: whether attention is
    computed again in backward, as fused policies have it. ``parts``: of how many like it a whole
    batch consists, whose chunks are that much larger. ``relative``: whether DAF's allocations count
    errors beside each parameter's own gradient; published ones look at the whole.
    """

    model: nn.Module
    loss_fn: LossFunction
    batch: Any
    rederive: bool = True
    chunked: bool = False
    parts: int = 1
    relative: bool = False


def make_policy(name: str, example: Example) -> Policy:
    """The policy called ``name``; allocations are measured on the example, which stays as it is.

    Raises:
        UnknownNameError: no such policy.
    """
    if name == "plain":
        return plain_policy()
    if name == PLANNED:
        return replace(_planned(example), name=name, rederive=example.rederive)
    if name.startswith(FALLING):
        return replace(_falling(name.removeprefix(FALLING), example), name=name)
    if name.startswith(FUSED):
        chunked = replace(example, chunked=True)
        return with_fused_operators(
            replace(make_policy(name.removeprefix(FUSED), chunked), name=name)
        )
    if name.startswith(APART):
        alone = replace(example, rederive=False)
        return replace(make_policy(name.removeprefix(APART), alone), name=name)
    kind, _, number = name.partition("-")
    try:
        bits = float(number)
    except ValueError:
        bits = 0.0
    least = _LEAST_AVERAGED if kind == "alam" else 1
    if kind not in _MAKERS or not least <= bits <= 8 or (kind in _WHOLE and bits != int(bits)):
        raise UnknownNameError(
            f"unknown policy {name!r}; known: {PLANNED}, {', '.join(FALLING + k for k in KINDS)}, "
            f"{', '.join(POLICY_FORMS)} with B from 1 "
            f"to 8, whole for one width everywhere (alam: {_LEAST_AVERAGED} to 4)"
        )
    return replace(_MAKERS[kind](bits, example), name=name, rederive=example.rederive)


def is_refitted(name: str) -> bool:
    """Is the policy of that name fitted to a model?"""
    if name.startswith(FALLING):
        return name != FALLING + UNIFORM
    return name.removeprefix(FUSED).removeprefix(APART).partition("-")[0] in _REFITTED


def minmax_policy(bits: int) -> Policy:
    """The published codec: min-max with stochastic rounding at one width, masks exact."""
    by_need = dict(coded_policy(bits).by_need)
    by_need |= dict.fromkeys(_VALUE_NEEDS, Treatment(Method.MINMAX, bits))
    return Policy(f"minmax-{bits}", MappingProxyType(by_need))


def _uniform(bits: float, example: Example) -> Policy:
    del example
    return coded_policy(int(bits))


def _uniform_minmax(bits: float, example: Example) -> Policy:
    del example
    return minmax_policy(int(bits))


def _ranged(bits: float, example: Example, *, by_channel: bool) -> Policy:
    del example
    code = Treatment(Method.RANGED, int(bits), by_channel=by_channel)
    by_need = dict(coded_policy(int(bits)).by_need) | dict.fromkeys(_VALUE_NEEDS, code)
    return Policy("ranged", MappingProxyType(by_need))


def _averaged(bits: float, example: Example) -> Policy:
    del example
    group = 2 if bits >= 1 else 4
    width = min(8, max(1, round(bits * group)))
    by_need = dict(coded_policy(max(1, width)).by_need)
    by_need |= dict.fromkeys(_VALUE_NEEDS, averaged(width, group))
    return Policy(f"alam-{bits}", MappingProxyType(by_need))


def _allocated(bits: float, example: Example) -> Policy:
    found = allocated_sites(example)
    chosen = least_variance(found.sites, budget_of(found.sites, found.elements, bits))
    return _with_sites(coded_policy(1), chosen.treatments)


def _planned(example: Example) -> Policy:
    found = allocated_sites(example)
    chosen = least_bytes(found.sites, DEFAULT_TOLERANCE * found.batch_variance)
    return _with_sites(coded_policy(1), chosen.treatments)


def _falling(kind: str, example: Example) -> Policy:
    if kind not in KINDS:
        known = ", ".join(FALLING + each for each in KINDS)
        raise UnknownNameError(f"unknown policy {FALLING + kind!r}; there are {known}")
    weights = {} if kind == UNIFORM else _sensitivity(example, coded_policy(2)).weights()
    return falling_policy(kind, weights)


class AllocatedSites(NamedTuple):
    """What allocations choose among, elements of every site, and the batch's own variance."""

    sites: list[CodedSite]
    elements: dict[Site, int]
    batch_variance: float


def allocated_sites(example: Example) -> AllocatedSites:
    """What ``allocated-B`` and ``planned`` choose among, as measured on the example."""
    values, smooth = _coded_elements(example, coded_policy(1), _VALUE_NEEDS, (Need.SMOOTH,))
    sensitivity = _sensitivity(example, coded_policy(2))
    found = _of_sites(sensitivity, elements := values | smooth)
    sites = coded_sites(values, found, _CODES) + coded_sites(smooth, found, _OF_SMOOTH)
    return AllocatedSites(sites, elements, sensitivity.batch_variance)


def _spread(bits: float, example: Example) -> Policy:
    """Over all values that have a code, as the operators run that will hold them.

    Sensitivities are measured at four bits where errors pass through attention's weights. Queries
    and keys of which those are computed again get three at least: their errors pass an
    exponential. So do weights that are held, whose errors meet themselves in the softmax's
    gradient. What bias either makes no sensitivity tells.
    """
    base = _with_attention(coded_policy(1), 1, example)
    values, scores, weights, smooth = _coded_elements(
        example, base, _VALUE_NEEDS, (Need.SCORE,), (Need.PROBABILITY,), (Need.SMOOTH,)
    )
    elements = values | scores | weights | smooth
    found = measured(example, _with_attention(coded_policy(2), 4, example), elements)
    wider = [each for each in _CODES if each.bits >= _SPREAD_LEAST_BITS]
    sites = coded_sites(values, found, _CODES) + coded_sites(scores, found, wider)
    sites += coded_sites(weights, found, _OF_WEIGHTS) + coded_sites(smooth, found, _OF_SMOOTH)
    budget = budget_of(sites, elements, bits)
    least = {
        Need.SCORE: Treatment(Method.ROTATED, _SPREAD_LEAST_BITS),
        Need.PROBABILITY: Treatment(Method.MINMAX, _SPREAD_LEAST_BITS),
    }
    by_need = MappingProxyType(dict(base.by_need) | least)
    whole = with_chunked_operators(replace(base, by_need=by_need), chunked=False)
    return _with_sites(whole, least_variance(sites, budget).treatments)


def _with_attention(policy: Policy, bits: int, example: Example) -> Policy:
    code = Treatment(Method.ROTATED, bits)
    by_need = dict(policy.by_need) | {
        Need.SCORE: code,
        Need.PRODUCT: code,
        Need.PROBABILITY: Treatment(Method.MINMAX, bits),
    }
    policy = replace(policy, by_need=MappingProxyType(by_need))
    if not example.chunked:
        return policy
    return with_chunked_operators(policy, CHUNK_BYTES // example.parts)


def _gact(bits: float, example: Example) -> Policy:
    base = minmax_policy(1)
    elements = coded_elements(example, base)
    found = measured(replace(example, relative=False), minmax_policy(2), elements)
    # Two gradients under different seeds of a 1-bit code differ by twice its variance.
    sensitivities = {site: 2 * value * minmax_error(1) for site, value in found.items()}
    return _minmax_widths(base, gact_widths(elements, sensitivities, bits))


def _actnn(bits: float, example: Example) -> Policy:
    base = minmax_policy(1)
    elements = coded_elements(example, base)
    plain = replace(example, relative=False)
    priors = {
        site: each.prior for site, each in _sensitivity(plain, minmax_policy(2)).sites.items()
    }
    least = min((value for value in priors.values() if value > 0), default=1.0)
    sensitivities = {
        site: GAUSSIAN_BLOCK_SQUARED_RANGE / 4 * (priors.get(site, 0.0) or least)
        for site in elements
    }
    return _minmax_widths(base, actnn_widths(elements, sensitivities, bits))


_WHOLE = ("rotated", "minmax", "tensor", "channel")
_LEAST_AVERAGED = 0.25
_MAKERS: Mapping[str, Callable[[float, Example], Policy]] = {
    "rotated": _uniform,
    "minmax": _uniform_minmax,
    "allocated": _allocated,
    "spread": _spread,
    "gact": _gact,
    "actnn": _actnn,
    "alam": _averaged,
    "tensor": partial(_ranged, by_channel=False),
    "channel": partial(_ranged, by_channel=True),
}


def _minmax_widths(base: Policy, widths: Mapping[Site, int]) -> Policy:
    return _with_sites(base, {s: Treatment(Method.MINMAX, bits) for s, bits in widths.items()})


def _with_sites(base: Policy, treatments: Mapping[Site, Treatment]) -> Policy:
    """Sites that borrow another's code ask for the least width, so that any will do."""
    return replace(base, by_site=MappingProxyType(dict(treatments)))


def budget_of(sites: Sequence[CodedSite], elements: Mapping[Site, int], bits: float) -> int:
    """What so many bits everywhere take, or the least that there are codes of."""
    least = sum(min(choice.nbytes for choice in each.choices) for each in sites)
    return max(least, sum(_bytes_at(count, bits) for count in elements.values()))


def _bytes_at(elements: int, bits: float) -> int:
    return int(plane_bytes(elements, 1) * bits) + header_bytes(elements)


def coded_elements(example: Example, policy: Policy) -> dict[Site, int]:
    """Elements of every site of values that holds a code of its own under ``policy``."""
    (found,) = _coded_elements(example, policy, _VALUE_NEEDS)
    return found


def _coded_elements(
    example: Example, policy: Policy, *kinds: Collection[Need]
) -> list[dict[Site, int]]:
    """The same of each kind: the sites of these needs."""
    capture, policy = Capture(example.model), replace(policy, rederive=example.rederive)
    with preserved_state(example.model):
        with capture.step(policy, 0, 0, batch=example.batch):
            result = example.loss_fn(example.model, example.batch)
            read_loss(result, likely_cut(example.batch).size(example.batch))
        reports = capture.sites()
    owning = [each for each in reports if each.treatment.method in _OWN_CODES and each.held_bytes]
    return [
        {each.site: _elements(each) for each in owning if each.need in needs} for needs in kinds
    ]


def _elements(report: SiteReport) -> int:
    """Whole blocks, from the bytes that their code holds (a norm's few statistics among them)."""
    per_block = held_bytes(BLOCK_ELEMENTS, report.treatment)
    return report.held_bytes // per_block * BLOCK_ELEMENTS


def _sensitivity(example: Example, policy: Policy) -> Sensitivity:
    own = replace(policy, rederive=example.rederive)
    return measure_sensitivity(
        example.model,
        example.loss_fn,
        example.batch,
        own,
        separate_codes=False,
        relative=example.relative,
    )


def measured(example: Example, policy: Policy, elements: Mapping[Site, int]) -> dict[Site, float]:
    """Variance per error of every site; the least measured where one had no code of its own."""
    return _of_sites(_sensitivity(example, policy), elements)


def _of_sites(sensitivity: Sensitivity, elements: Mapping[Site, int]) -> dict[Site, float]:
    found = {
        site: each.variance_per_error
        for site, each in sensitivity.sites.items()
        if each.variance_per_error > 0
    }
    least = min(found.values(), default=1.0)
    return {site: found.get(site, least) for site in elements}
