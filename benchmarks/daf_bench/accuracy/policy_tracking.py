"""A policy through one run: fitted anew as sensitivities change, its noise measured as it runs.

Sensitivities move fast in the first steps and slowly later, so fits are at the beginning and after
a growing number of steps, from an eighth of a batch each: some 2 % of a run of a thousand steps.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from daf.capture.compress import compress
from daf.core.code_errors import relative_error
from daf.core.errors import NonFiniteLossError
from daf.core.policy import Method, Policy, Site, Treatment, plain_policy, with_chunked_operators
from daf.operators.chunked.weight_gradient import CHUNK_BYTES
from daf.profiling.optimizer_probe import divides_by_gradients
from daf.sensitivity.estimate import measure_sensitivity
from daf.step.microbatch import LossFunction, likely_cut
from daf_bench.accuracy.falling import FALLING, FallingCap
from daf_bench.accuracy.policies import Example, is_refitted, make_policy

PART = 8
FIRST_FIT = 20
GROWTH = 3.0
_WITHOUT_ERROR = frozenset({Method.RANGED, Method.REGISTERED})  # theirs depends on the tensor


def fit_steps(steps: int) -> tuple[int, ...]:
    """0, then from ``FIRST_FIT`` on at steps that grow threefold, as far as there are steps."""
    found = [0]
    step = float(FIRST_FIT)
    while step < steps:
        found.append(int(step))
        step *= GROWTH
    return tuple(found)


class Follower:
    """One run's policy; ``noise`` holds (step, what codes add beside the batch's own noise)."""

    def __init__(
        self,
        name: str,
        model: nn.Module,
        loss_fn: LossFunction,
        optimizer: torch.optim.Optimizer,
        steps: int,
    ) -> None:
        self.fitted_ms = 0.0
        self.fits = 0
        self.noise: list[list[float | None]] = []  # as JSON gives it back
        self._name = name
        self._model = model
        self._loss_fn = loss_fn
        self.is_relative = divides_by_gradients(optimizer)
        self._fit_steps = fit_steps(steps)
        self._policy = plain_policy()
        self._coded: Any = None
        self._cap = FallingCap() if name.startswith(FALLING) else None
        is_told = name != "plain" and self._cap is None  # what is evicted, no formula tells
        self._noise_steps = {*self._fit_steps, steps - 1} if is_told else set()

    @property
    def evicted_share(self) -> float | None:
        """The share of codes that a falling cap evicts; None where none falls."""
        return self._cap and self._cap.evicted_share

    def policy_for(self, step: int, batch: Any, seed: int) -> Any:
        """The context that a step runs in."""
        if self._coded is None or (is_refitted(self._name) and step in self._fit_steps):
            start_s = time.perf_counter()
            self._policy = make_policy(self._name, self._example(batch))
            self.fitted_ms += 1000 * (time.perf_counter() - start_s)
            self.fits += 1
            self._coded = compress(self._model, policy=self._policy, seed=seed + 7919 * step)
        if self._cap is not None:
            self._cap.rise(self._coded)
        return self._coded

    def after_forward(self, step: int) -> None:
        """Lower the pool's cap, where that is what is tried."""
        if self._cap is not None:
            self._cap.fall(step, self._coded)

    def note_noise(self, step: int, batch: Any) -> None:
        """Measure what the codes of the last step add, if it is time to and can be told."""
        if step not in self._noise_steps:
            return
        reports = self._coded.sites()
        treatments: dict[Site, Treatment] = {each.site: each.treatment for each in reports}
        if any(each.method in _WITHOUT_ERROR for each in treatments.values()):
            return
        part, policy = self._example(batch).batch, _measurable(self._policy)
        try:
            found = measure_sensitivity(
                self._model,
                self._loss_fn,
                part,
                policy,
                separate_codes=False,
                relative=self.is_relative,
            )
        except NonFiniteLossError:
            self.noise.append([step, None])
            return
        own = found.batch_variance
        added = sum(
            each.variance_per_error * relative_error(treatments[site])
            for site, each in found.sites.items()
            if site in treatments
        )
        self.noise.append([step, added / own if own else None])

    def _example(self, batch: Any) -> Example:
        return example_of(self._model, self._loss_fn, batch, relative=self.is_relative)


def example_of(model: nn.Module, loss_fn: LossFunction, batch: Any, *, relative: bool) -> Example:
    """A part of a batch, as policies are fitted to."""
    cut = likely_cut(batch)
    part = cut.take(batch, 0, max(1, cut.size(batch) // PART))
    return Example(model, loss_fn, part, parts=PART, relative=relative)


def _measurable(policy: Policy) -> Policy:
    """The policy with PyTorch's own operators, but for attention by parts: its sites are others."""
    chunk_bytes = CHUNK_BYTES // PART if policy.chunked else None
    whole = replace(policy, operators=frozenset())
    return with_chunked_operators(whole, chunk_bytes, chunked=policy.chunked)
