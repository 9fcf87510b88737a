"""Running GELU and SiLU so that one code serves them and the layer behind.

Whether there is such a layer shows when it saves its input. An activation that is
coded, and whose result no layer derived when it last ran fused, is left alone from
then on: a code of its derivative is smaller. One that is kept takes no more by running
fused, whoever reads it, and plans count on that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from daf.codecs.layout import layout_of
from daf.core.policy import KEEP, Method, Need, Site, Treatment
from daf.core.reports import FusionReport
from daf.operators.activation.function import (
    LEAST_BITS,
    FusedSmooth,
    Smooth,
    SmoothHeld,
    shared_treatment,
    values_of,
)
from daf.operators.capture_context import CountingHolder, OperatorContext, told_of
from daf.operators.eligibility import (
    autocast_objection,
    autograd_objection,
    has_usual_strides,
    is_plain_float,
)
from daf.saved_tensors.derivation import Derivation
from daf.saved_tensors.norm_inputs import channel_stride
from daf.saved_tensors.packed_tensor import Recipe, Rederived, Term
from daf.saved_tensors.packer import SMALL_BYTES
from daf.torch_compat.ownership import sole_holders

_UNREAD = "no layer behind it reads its result in backward"


class _Run(NamedTuple):
    """One ran fused, and layers behind were told its result."""

    is_coded: bool
    derivation: Derivation


class SmoothFusion:
    """What became of each activation."""

    def __init__(self) -> None:
        self._reports: dict[Site, FusionReport] = {}
        self._ran: dict[Site, _Run] = {}

    def reports(self) -> tuple[FusionReport, ...]:
        """Every one seen so far."""
        unread = {site for site, ran in self._ran.items() if ran.derivation.readers == 0}
        return tuple(
            replace(report, pattern="", reason=_UNREAD)
            if report.pattern and site in unread
            else report
            for site, report in self._reports.items()
        )

    def is_unread(self, site: Site) -> bool:
        """Was it coded when it last ran fused, and did no layer derive its result?"""
        last = self._ran.get(site)
        return last is not None and last.is_coded and last.derivation.readers == 0

    def note(self, site: Site, reason: str) -> None:
        """It ran fused, or why not."""
        pattern = "" if reason else f"{site.operator} + layer behind"
        self._reports[site] = FusionReport(site.module, site.call, pattern, reason, site.operator)

    def derive(self, site: Site, derivation: Derivation, *, is_coded: bool) -> None:
        """It runs fused, and this is what the layer behind is told."""
        self._ran[site] = _Run(is_coded, derivation)


def is_smooth(operator: Callable[..., Any]) -> bool:
    """Is this the function that modules of GELU or SiLU call?"""
    return operator in (F.gelu, F.silu)


def read_call(
    operator: Callable[..., Any], arguments: Sequence[Any], keywords: Mapping[str, Any]
) -> tuple[Any, Smooth] | None:
    """(input, activation); None where the arguments are odd, or it works in place."""
    names = dict(keywords)
    if "input" in names and not arguments:
        arguments = (names.pop("input"),)
    if len(arguments) != 1:
        return None
    if operator is F.gelu:
        approximate = names.pop("approximate", "none")
        known = approximate in ("none", "tanh") and not names
        return (arguments[0], Smooth("gelu", approximate)) if known else None
    inplace = names.pop("inplace", False)
    return None if names or inplace else (arguments[0], Smooth("silu"))


class SmoothFusing:
    """Runs them for one ``with`` of a capture."""

    def __init__(self, fusion: SmoothFusion, carrier: OperatorContext) -> None:
        self._fusion = fusion
        self._carrier = carrier
        sole_holders()  # known before the first backward pass asks

    def chosen(
        self,
        operator: Callable[..., Any],
        arguments: Sequence[Any],
        keywords: Mapping[str, Any],
    ) -> Callable[..., Any]:
        """What to run in the place of ``F.gelu`` or ``F.silu``: perhaps itself."""
        name: str = operator.__name__
        path, count = self._carrier.tracker.present_call(name)
        site = Site(path, name, count, 0)
        call = read_call(operator, arguments, keywords)
        treatment = self._treatment(site)
        reason = self._objection(call, site, treatment)
        self._fusion.note(site, reason)
        if call is None or treatment is None or reason:
            return operator
        x, smooth = call
        return lambda *_arguments, **_keywords: self._run(x, smooth, site, treatment)

    def _treatment(self, site: Site) -> Treatment | None:
        """How the input is held where that is to serve the layer behind too."""
        policy = self._carrier.policy
        own, linear = policy.treatment(Need.SMOOTH, site), policy.by_need.get(Need.LINEAR)
        if not policy.rederive:
            return None
        if own.method is Method.DERIVATIVE and linear is not None:
            return shared_treatment(linear)
        return KEEP if own == KEEP else None

    def _objection(
        self, call: tuple[Any, Smooth] | None, site: Site, treatment: Treatment | None
    ) -> str:
        if call is None:
            return "its arguments are odd, or it works in place"
        x, _ = call
        if treatment is None:
            return "the policy neither keeps it nor codes both it and the layer behind"
        if not is_plain_float(x):
            return "its input is no float32 tensor, nor on a GPU one of half the width"
        if channel_stride(x) is None or not has_usual_strides(x):
            return "its input lies neither contiguous nor channels-last"
        if x.nbytes < SMALL_BYTES:
            return "its input is small"
        unsaved = autocast_objection(x) or autograd_objection((x,), self._carrier.pack)
        if unsaved or self._carrier.hooks.is_constant(x):
            return unsaved or "its input is the caller's own"
        return _UNREAD if treatment != KEEP and self._fusion.is_unread(site) else ""

    def _run(self, x: Tensor, smooth: Smooth, site: Site, treatment: Treatment) -> Tensor:
        carrier = self._carrier
        carrier.tracker.next_call(site.operator)
        record = carrier.tracker.record(site.module, site.operator, site.call, 0)
        told, plain = carrier.ledger.reported_bytes, carrier.ledger.plain_bytes
        holder = CountingHolder(carrier, x, (), Need.SMOOTH, record)
        with carrier.hooks.collecting() as pending:
            result: Tensor = FusedSmooth.apply(x, lambda: smooth.forward(x.detach()))  # type: ignore[no-untyped-call]
        held = self._held(x, smooth, treatment, holder)
        derivation = Derivation(smooth.apply_)
        assert held.recipe is not None
        held.recipe = (held.recipe[0]._replace(derivation=derivation),)
        carrier.provenance.learn(result, held)
        carrier.provenance.learn_function(result, derivation)
        self._fusion.derive(site, derivation, is_coded=treatment != KEEP)
        record.plain_bytes += carrier.ledger.plain_bytes - plain
        record.held_bytes += carrier.ledger.reported_bytes - told
        if carrier.hooks.watcher is not None:
            carrier.hooks.watcher.saved(
                told_of(pending[0], x, held, holder)._replace(tells=derivation)
            )
        pending[0].settle(held, holder.plain)
        return result

    def _held(
        self, x: Tensor, smooth: Smooth, treatment: Treatment, holder: CountingHolder
    ) -> SmoothHeld:
        """What stands for the input; its recipe computes that, not yet the result."""
        kept = holder.hold_input(x) if treatment == KEEP else None
        if kept is not None:
            held = SmoothHeld(smooth, kept)
            held.recipe = (Term(self._carrier.counted(values_of(kept, x))),)
            return held
        recipe = self._known(x)
        holder.record.treatment = Treatment(Method.REDERIVE) if recipe is not None else treatment
        if recipe is None:
            recipe = (Term(holder.encode(x.detach(), None, None)),)
        held = SmoothHeld(smooth, Rederived(recipe, layout_of(x)))
        held.recipe = recipe
        return held

    def _known(self, x: Tensor) -> Recipe | None:
        """What is held anyway and tells the input well enough: a normalisation's code."""
        recipe = self._carrier.provenance.recipe(x, x._version)
        if recipe is None or len(recipe) > 1 or recipe[0].mask or recipe[0].derivation:
            return None
        return recipe if recipe[0].code.content.treatment.bits >= LEAST_BITS else None
