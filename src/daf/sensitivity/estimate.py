"""Measures sensitivities by a few extra passes over one batch, with fresh seeds of some codes."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from daf.capture.capture import Capture
from daf.core.code_errors import relative_error
from daf.core.policy import Method, Need, Policy, Site, exact_policy, with_chunked_operators
from daf.core.reports import SiteReport
from daf.sensitivity.gradient_passes import BUCKETS, Passes, sample_variance
from daf.sensitivity.prior import PriorObserver, product_weight
from daf.sensitivity.result import Sensitivity, SiteSensitivity
from daf.sensitivity.site_groups import alike_groups
from daf.step.batch_cut import BatchCut
from daf.step.microbatch import LossFunction, likely_cut, split_refusal
from daf.step.state_snapshot import preserved_state

_SEEDED = frozenset({Method.ROTATED, Method.MINMAX, Method.DERIVATIVE})
_CHANGE = 2.0  # of a gradient when a site is redrawn, squared, over its code's variance
_PRODUCT_OPERATORS = {"linear", "addmm"} | {
    f"conv{kind}{dimensions}d" for kind in ("", "_transpose") for dimensions in (1, 2, 3)
}
_LEAK = 1e-4  # share of the change outside the sites' own weights that is rounding
# Standard error of a prior, relative to its value: a product's formula is whole, a
# normalisation's leaves out what passes on, and elsewhere there is only a typical value.
_PRODUCT_DEVIATION, _OTHER_DEVIATION = 0.5, 10.0


@dataclass(frozen=True, slots=True)
class Effort:
    """Numbers of passes, each a forward and a backward of the whole batch."""

    local: int = 2  # redraw the inputs of products
    others: int = 24  # at most; redraw the rest, a site or alike group each
    micro_batches: int = 4  # take one pass together and measure the batch's own noise
    bias: int = 4  # passes of the first micro-batch, all codes redrawn
    buckets: int = BUCKETS


def measure_sensitivity(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    policy: Policy,
    *,
    effort: Effort | None = None,
    seed: int = 0,
    step_index: int = 0,
    separate_codes: bool = True,
    capture: Capture | None = None,
    relative: bool = False,
    cut: BatchCut | None = None,
    running: Policy | None = None,
) -> Sensitivity:
    """Measure what every site that ``policy`` codes adds to the gradient's squared error.

    Args:
        model: as it is trained; unchanged afterwards.
        loss_fn: ``loss_fn(model, batch)`` returns a scalar mean loss, or ``(sum, weight)``; inf and
            NaN raise NonFiniteLossError.
        batch: any nest of tensors; a part of a training batch serves as well.
        policy: its codes are measured; two bits everywhere are a good choice.
        effort: numbers of passes; the default costs 29 training steps on ``batch`` at most.
        seed, step_index: determine the codes' ordinary seeds.
        separate_codes: give every site a code of its own, and so a value of its own (for planning).
            False measures the policy as it runs, where one code may serve several sites and is
            charged for all of them.
        capture: to run under; None: a new one.
        relative: count errors beside each parameter's own gradient, as in steps
            of an optimizer that ``divides_by_gradients``.
        cut: how the batch is cut into micro-batches; None: the likeliest way.
        running: whose codes' bias is measured; None: that of ``policy``.
    """
    effort, running = effort or Effort(), running or policy
    if separate_codes:
        policy = replace(policy, rederive=False, operators=policy.operators - {"batch_norm"})
    with preserved_state(model, loss_fn) as snapshot:
        capture, cut = capture or Capture(model), cut or likely_cut(batch)
        passes = Passes(
            model, loss_fn, capture, seed, step_index, snapshot, cut, buckets=effort.buckets
        )
        return _Measurement(passes, batch, policy, running, effort, relative).run()


@dataclass(eq=False)
class _Measurement:
    """One measurement: its base pass, and what was learnt so far."""

    passes: Passes
    batch: Any
    policy: Policy
    running: Policy
    effort: Effort
    relative: bool

    def __post_init__(self) -> None:
        passes, model = self.passes, self.passes.model
        self._cut = passes.cut or likely_cut(self.batch)
        observer, parameters = PriorObserver(model), passes.sketcher.parameters
        elements = torch.zeros(len(parameters), dtype=torch.float64) if self.relative else None
        around = observer.watching
        self._base = passes.sketch(self.batch, self.policy, around=around, elements=elements)
        self._reports = {
            each.site: each for each in passes.capture.sites() if each.treatment.method in _SEEDED
        }
        self._weight_of = _local_weights(model, parameters, self._reports.values())
        self._micro_batch_sketches = self._sketch_micro_batches()
        self._counts = torch.ones(len(parameters), dtype=torch.float64)
        if elements is not None:
            self._counts = self._relative_counts(elements)
        self._means = observer.means
        by_module = _counted(observer.by_module, model, parameters, self._counts)
        self._priors = _priors(self._reports.values(), by_module)

    def run(self) -> Sensitivity:
        values = dict(self._priors)
        if self.effort.local:
            values |= self._measure_local()
        others = [site for site in self._reports if site not in self._weight_of]
        if self.effort.others and others:
            for group in alike_groups(others, self.effort.others):
                values |= self._measure_group(group)
        if self.relative:
            values = _unknown_as_usual(values)
        own, own_error = self._batch_variance()
        bias, bias_error = self._squared_bias()
        examples = self._cut.size(self.batch)
        return Sensitivity(
            MappingProxyType(values),
            gradient_energy=float(self._base.square().sum(1) @ self._counts),
            examples=examples,
            passes=self.passes.examples / examples,
            batch_variance=own,
            batch_variance_error=own_error,
            relative=self.relative,
            squared_bias=bias,
            squared_bias_error=bias_error,
        )

    def _relative_counts(self, elements: Tensor) -> Tensor:
        """Count errors by the gradient without codes; with codes if micro-batches cannot tell."""
        coded = self._base.square().sum(1)
        if not self._micro_batch_sketches or split_refusal(self.passes.model):
            return relative_counts(elements, coded, torch.zeros_like(coded), coded)
        own = torch.stack(self._micro_batch_sketches).mean(0).square().sum(1)
        noise = sample_variance(self._micro_batch_sketches).sum(1) / len(self._micro_batch_sketches)
        return relative_counts(elements, own, noise, coded)

    def _measure_local(self) -> dict[Site, SiteSensitivity]:
        """Measure products' inputs; if other weights changed too, none is local any more."""
        if not self._weight_of:
            return {}
        sketches = [self._base]
        for draw in range(1, self.effort.local + 1):
            draws = dict.fromkeys(self._weight_of, draw)
            sketches.append(self.passes.sketch(self.batch, self.policy, draws))
        variance = sample_variance(sketches)
        own = sorted(self._weight_of.values())
        counted = variance.sum(1) * self._counts
        total, landed = float(counted.sum()), float(counted[own].sum())
        if total - landed > _LEAK * total:
            self._weight_of = {}
            return {}
        errors = _variance_errors(sketches)
        found = {}
        for site, weight in self._weight_of.items():
            counts = float(self._counts[weight]) / relative_error(self._reports[site].treatment)
            value, error = counts * float(variance[weight].sum()), counts * float(errors[weight])
            found[site] = SiteSensitivity(value, error, self._priors[site].prior)
        return found

    def _measure_group(self, group: tuple[Site, ...]) -> dict[Site, SiteSensitivity]:
        """Measure a group that redraws together: equal errors are taken to add equally."""
        redrawn = self.passes.sketch(self.batch, self.policy, dict.fromkeys(group, 1))
        change = (redrawn - self._base).square()
        change *= self._counts[:, None]
        unit = _CHANGE * sum(relative_error(self._reports[site].treatment) for site in group)
        value = float(change.sum()) / unit
        error = float(_scatter(change).square().sum().sqrt()) / unit
        # What an error does to one mean moves all gradients before it together, not each by itself.
        independent = self._means.get(group[0].module, math.inf) if len(group) == 1 else 0
        error = max(error, value * math.sqrt(2.0 / max(2, independent)))
        return {site: SiteSensitivity(value, error, self._priors[site].prior) for site in group}

    def _squared_bias(self) -> tuple[float | None, float]:
        """Return what of all codes' errors does not average out, over the gradient's square."""
        # Both of the first micro-batch, plain and coded from one random state. The mean of S errors
        # is longer than their bias by their variance / S (squares), which is taken off. None where
        # nothing of so small a batch is coded.
        count = self.effort.bias
        if count < 2 or not self._micro_batch_sketches:
            return None, 0.0
        plain, part = self._micro_batch_sketches[0], self._micro_batches()[0]
        coded = [self.passes.sketch(part, self.running, later=1 + draw) for draw in range(count)]
        errors = torch.stack(coded) - plain
        if not errors.any():
            return None, 0.0
        squares = errors.mean(0).square() - errors.var(0) / count
        energy = float(plain.square().sum(1) @ self._counts) or 1.0
        deviation = float((_scatter(squares) * self._counts).square().sum().sqrt())
        return float(squares.sum(1) @ self._counts) / energy, deviation / energy

    def _micro_batches(self) -> list[Any]:
        """Return equal micro-batches; none if the batch is too small."""
        size, count = self._cut.size(self.batch), self.effort.micro_batches
        if min(size, count) < 2:
            return []
        whole = size // min(size, count)
        cut = self._cut.parts(self.batch, whole)
        return [part for part in cut if self._cut.size(part) == whole]

    def _sketch_micro_batches(self) -> list[Tensor]:
        parts, chunk_bytes = self._micro_batches(), self.policy.chunk_bytes
        if chunk_bytes and parts:
            share = self._cut.size(parts[0]) / self._cut.size(self.batch)
            chunk_bytes = max(1, int(chunk_bytes * share))
        exact = with_chunked_operators(exact_policy(), chunk_bytes, chunked=self.policy.chunked)
        return [self.passes.sketch(part, exact) for part in parts]

    def _batch_variance(self) -> tuple[float | None, float]:
        if not self._micro_batch_sketches:
            return None, 0.0
        # The batch's gradient is the mean of the micro-batches', so it varies less.
        size = self._cut.size(self.batch)
        share = size // min(size, self.effort.micro_batches) / size
        variance = float(sample_variance(self._micro_batch_sketches).sum(1) @ self._counts)
        errors = _variance_errors(self._micro_batch_sketches) * self._counts
        return variance * share, float(errors.square().sum().sqrt()) * share


def _variance_errors(sketches: Sequence[Tensor]) -> Tensor:
    """Return (parameters,): standard error of the summed variance of a parameter's buckets.

    It is the larger of the buckets' scatter and the jackknife over passes (Efron and Stein, Annals
    of Statistics 1981), which needs three.
    """
    by_bucket = _scatter(sample_variance(sketches))
    count = len(sketches)
    if count < 3:
        return by_bucket
    without = torch.stack(
        [sample_variance([*sketches[:i], *sketches[i + 1 :]]).sum(1) for i in range(count)]
    )
    spread = (without - without.mean(0)).square().sum(0)
    return torch.maximum(by_bucket, (spread * (count - 1) / count).sqrt())


def _scatter(squares: Tensor) -> Tensor:
    """Return (parameters,): standard error, by scatter, of the sum of a parameter's buckets."""
    return (squares.shape[1] * squares.var(1)).sqrt()


def _unknown_as_usual(values: Mapping[Site, SiteSensitivity]) -> dict[Site, SiteSensitivity]:
    # Before LoRA's first step its second matrix is 0: no error in the first's inputs counts yet.
    known = [each.at_least for each in values.values() if each.variance_per_error > 0.0]
    usual = float(np.median(known)) if known else 0.0
    return {
        site: each if each.variance_per_error > 0.0 else replace(each, standard_error=usual)
        for site, each in values.items()
    }


def _counted(
    by_module: Mapping[str, float],
    model: nn.Module,
    parameters: Sequence[nn.Parameter],
    counts: Tensor,
) -> dict[str, float]:
    """Return the formulae's values times their weights' counts (untrained: the median count)."""
    heard = counts[counts > 0.0]
    usual = float(heard.median()) if len(heard) else 1.0
    of_parameter = {id(each): float(count) for each, count in zip(parameters, counts, strict=True)}
    modules = dict(model.named_modules(remove_duplicate=False))

    def count(path: str) -> float:
        module = modules.get(path)
        weight = None if module is None else product_weight(module)
        weight = getattr(module, "weight", None) if weight is None else weight
        return of_parameter.get(id(weight), usual)

    return {path: value * count(path) for path, value in by_module.items()}


def _local_weights(
    model: nn.Module, parameters: Sequence[nn.Parameter], reports: Any
) -> dict[Site, int]:
    """Return inputs of products, each with the index of the only weight that it can disturb."""
    index_of = {id(each): index for index, each in enumerate(parameters)}
    modules = dict(model.named_modules(remove_duplicate=False))
    found: dict[Site, int] = {}
    for report in reports:
        site = report.site
        module = modules.get(site.module)
        weight = product_weight(module) if module is not None else None
        known = report.need is Need.LINEAR and site.operator in _PRODUCT_OPERATORS
        if known and weight is not None and id(weight) in index_of:
            found[site] = index_of[id(weight)]
    uses = Counter(found.values())
    return {site: weight for site, weight in found.items() if uses[weight] == 1}


def _priors(
    reports: Iterable[SiteReport], by_module: Mapping[str, float]
) -> dict[Site, SiteSensitivity]:
    """Return priors: by the formula where there is one, else the median of those."""
    needs = {each.site: each.need for each in reports}
    with_formula = [site for site, need in needs.items() if need in (Need.LINEAR, Need.NORM)]
    uses = Counter(site.module for site in with_formula)
    known = {
        site: by_module[site.module] / uses[site.module]
        for site in with_formula
        if by_module.get(site.module, 0.0) > 0.0
    }
    typical = float(np.median(list(known.values()))) if known else 1.0
    found = {}
    for site, need in needs.items():
        is_product = need is Need.LINEAR and site in known
        deviation = _PRODUCT_DEVIATION if is_product else _OTHER_DEVIATION
        value = known.get(site, typical)
        found[site] = SiteSensitivity(value, value * deviation, value)
    return found


# A gradient that is 0 in truth (a key's bias, to which attention is indifferent) holds only
# rounding: elements' squares this far below the usual do not count. In coarser dtypes, with more
# rounding, codes' errors count as at most so many times the gradient.
_ROUNDING = 1e-10
_MOST_TIMES = 16.0


# Errors count by the gradient's own length, along which SGD steps, or in an optimizer's step.
# Adam and its kin divide every element by the root of its usual square (Kingma and Ba, ICLR 2015,
# algorithm 1), so an error counts for much only in a parameter of small gradients. Under LoRA,
# codes that add little to the whole gradient may add much to the queries', which is small beside
# the pooler's. There errors count by the mean square of a parameter's elements that have a
# gradient: summed over parameters, elements x error / energy of the gradient.
def relative_counts(elements: Tensor, own: Tensor, noise: Tensor, coded: Tensor) -> Tensor:
    """Return (parameters,) float64: what a squared error of each gradient counts in a step.

    ``elements``: how many have a gradient. ``own``: energy of the batch's gradient without codes;
    ``coded``: with codes. ``noise``: what of ``own`` differs from batch to batch; the larger of
    both counts. 0 where the gradient is nothing but rounding.
    """
    own = torch.maximum(own, noise)
    energy = torch.maximum(own, coded / _MOST_TIMES)
    is_heard = own * elements.sum() > _ROUNDING * own.sum() * elements
    return torch.where(is_heard, elements / energy, torch.zeros_like(energy))
